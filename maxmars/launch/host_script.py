"""The bash script that a TPU host gets: it installs, starts, watches and stops its process.

Each command reports on a line `[maxmars-host] HOST STATE`, since gcloud mixes the hosts' outputs.
States: `installed`, `install-failed`, `started`, `idle`, `running`, `exited CODE`, `stopped CODE`
(after `stop`) and `lost` (the process is gone without an exit code, as after a reboot).
"""

from __future__ import annotations

import re
import shlex
import sys

from maxmars.launch.job import Job
from maxmars.launch.source import CONSTRAINTS

_REPORT = re.compile(r"\[maxmars-host\] (\S+) (\S.*)$")

_SCRIPT = r"""#!/usr/bin/env bash
# A run of maxmars on this host: install, start, status, follow SKIP, wait SECONDS, stop, kill.
set -euo pipefail
name=@NAME@
digest=@DIGEST@
python=@PYTHON@
home="$HOME/maxmars-$name"
self="$home.sh"
log="$home/train.log"

say() { printf '[maxmars-host] %s %s\n' "$(hostname)" "$*"; }

alive() {
  local pid
  pid="$(cat "$home/pid" 2>/dev/null)" && [[ -n $pid ]] && grep -qsz maxmars "/proc/$pid/cmdline"
}

state() {
  local tries
  for tries in {1..20}; do  # the exit code comes a moment after the end
    if alive; then echo running && return; fi
    if [[ -f $home/exit_code ]]; then
      if [[ -f $home/stopped ]]; then printf 'stopped '; else printf 'exited '; fi
      cat "$home/exit_code" && return
    fi
    if [[ ! -f $home/pid ]]; then echo idle && return; fi
    sleep 0.1
  done
  echo lost
}

# A Python as on the machine that this was launched from.
make_environment() {
  if "$python" -c 'import venv, ensurepip'; then
    "$python" -m venv --clear "$home/venv"
  else
    python3 -m pip install --quiet --user uv
    python3 -m uv venv --quiet --seed --clear --python "${python#python}" "$home/venv"
  fi
}

prepare() {
  rm -rf "$home/source" "$home/venv"
  mkdir -p "$home/source"
  tar -xzf "$home.tar.gz" -C "$home/source"
  make_environment
  "$home/venv/bin/python" -m pip install --disable-pip-version-check \
    -c "$home/source/@CONSTRAINTS@" "$home/source[tpu,gcs]"
  cd "$home/source"
  @SETUP@
}

install() {
  mkdir -p "$home"
  [[ ! -f $home.env ]] || chmod 600 "$home.env"
  if [[ ! -f $home/installed || $(<"$home/installed") != "$digest" ]]; then
    rm -f "$home/installed"
    if ! bash "$self" prepare >"$home/install.log" 2>&1; then
      tail -n 20 "$home/install.log"
      say install-failed
      return
    fi
    printf '%s' "$digest" >"$home/installed"
  fi
  say installed
}

start() {
  if ! alive; then
    rm -f "$home/pid" "$home/exit_code" "$home/stopped"
    touch "$log"
    wc -l <"$log" >"$home/lines_before"
    setsid nohup bash "$self" run >>"$log" 2>&1 </dev/null &
    for _ in {1..200}; do
      [[ ! -f $home/pid ]] || break
      sleep 0.05
    done
  fi
  say started
}

run() {
  local code=0
  cd "$home/source"
  if [[ -f $home.env ]]; then
    set -a
    # shellcheck disable=SC1090
    . "$home.env"
    set +a
  fi
  @COMMAND@ &
  printf '%s\n' "$!" >"$home/pid.part"
  mv "$home/pid.part" "$home/pid"
  wait "$!" || code=$?
  printf '%s\n' "$code" >"$home/exit_code.part"
  mv "$home/exit_code.part" "$home/exit_code"
}

# The log of this start, each line with its number: gcloud repeats a command whose ssh broke.
follow() {
  local number="$1" line
  if [[ -f $home/pid ]]; then
    tail -n "+$(($(<"$home/lines_before") + number + 1))" -s 0.1 -f --pid="$(<"$home/pid")" "$log" |
      while IFS= read -r line || [[ -n $line ]]; do
        printf '%s\t%s\n' "$((++number))" "$line"
      done
  fi
  say "$(state)"
}

signal() { if alive; then kill "-$1" "$(<"$home/pid")" 2>/dev/null || true; fi; }

wait_end() {
  local end=$((SECONDS + $1))
  while alive && ((SECONDS < end)); do sleep 0.1; done
  signal KILL
  say "$(state)"
}

main() {
  case "$1" in
    install) install ;;
    prepare) prepare ;;
    start) start ;;
    run) run ;;
    status) say "$(state)" ;;
    follow) follow "$2" ;;
    wait) wait_end "$2" ;;
    stop)
      if alive; then touch "$home/stopped"; fi
      signal TERM
      wait_end 600
      ;;
    kill) wait_end 0 ;;
  esac
}

# A new version of this file may replace it while it runs: bash must not read on.
{
  main "$@"
  exit
}
"""


def host_script(job: Job) -> str:
    """The script, which is to lie at `~/maxmars-NAME.sh` beside NAME.tar.gz and NAME.env."""
    major, minor = sys.version_info[:2]
    values = {
        "NAME": shlex.quote(job.name),
        "DIGEST": job.source.digest,
        "PYTHON": f"python{major}.{minor}",
        "CONSTRAINTS": CONSTRAINTS,
        "SETUP": "true" if job.source.setup is None else f"bash {job.source.setup}",
        "COMMAND": shlex.join(job.train_command("MAXMARS_PYTHON")).replace(
            "MAXMARS_PYTHON", '"$home/venv/bin/python"', 1
        ),
    }
    script = _SCRIPT
    for key, value in values.items():
        script = script.replace(f"@{key}@", value)
    return script


def host_command(name: str, words: str) -> str:
    """What to run on a host by ssh: a command of the script of the run of this name."""
    return f"bash maxmars-{name}.sh {words}"


def read_report(line: str) -> tuple[str, str] | None:
    """Host and state that a line of output reports; None if it reports none."""
    match = _REPORT.search(line.rstrip())
    return None if match is None else (match[1], match[2])
