# shellcheck shell=bash disable=SC2154
# What the script ~/maxmars-NAME.sh does on each TPU host: install, start, status, follow SKIP,
# wait SECONDS, stop, kill. `host_script` in tpu_vm.py writes above it the values of this run: name,
# digest (of the source), python (such as python3.12), constraints, setup (may be empty) and train.
#
# Each command reports on a line `[maxmars-host] HOST STATE`, since gcloud mixes the hosts' outputs.
# States: installed, install-failed, started, idle, running, exited CODE, stopped CODE (after stop)
# and lost (the process is gone without an exit code, as after a reboot).
set -euo pipefail
home="$HOME/maxmars-$name"
self="$home.sh"
log="$home/train.log"

report() { printf '[maxmars-host] %s %s\n' "$(hostname)" "$*"; }

alive() {
  local pid
  pid="$(cat "$home/pid" 2>/dev/null)" && [[ -n $pid ]] && grep -qsz maxmars "/proc/$pid/cmdline"
}

state() {
  for _ in {1..20}; do  # the exit code comes a moment after the end
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
    -c "$home/source/$constraints" "$home/source[tpu,gcs]"
}

load_environment() {
  if [[ -f $home.env ]]; then
    set -a
    # shellcheck disable=SC1090
    . "$home.env"
    set +a
  fi
}

# Before each start, since a reboot undoes what it mounted.
set_up() {
  [[ -n $setup ]] || return 0
  load_environment
  cd "$home/source"
  bash "$setup"
}

install() {
  mkdir -p "$home"
  [[ ! -f $home.env ]] || chmod 600 "$home.env"
  if [[ ! -f $home/installed || $(<"$home/installed") != "$digest" ]]; then
    rm -f "$home/installed"
    if ! bash "$self" prepare >"$home/install.log" 2>&1; then
      tail -n 20 "$home/install.log"
      report install-failed
      return
    fi
    printf '%s' "$digest" >"$home/installed"
  fi
  if ! bash "$self" set_up >"$home/setup.log" 2>&1; then
    tail -n 20 "$home/setup.log"
    report install-failed
    return
  fi
  report installed
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
  report started
}

run() {
  local code=0
  load_environment
  cd "$home/source"
  "$home/venv/bin/python" "${train[@]}" &
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
  report "$(state)"
}

signal() { if alive; then kill "-$1" "$(<"$home/pid")" 2>/dev/null || true; fi; }

wait_end() {
  local end=$((SECONDS + $1))
  while alive && ((SECONDS < end)); do sleep 0.1; done
  signal KILL
  report "$(state)"
}

main() {
  case "$1" in
    install) install ;;
    prepare) prepare ;;
    set_up) set_up ;;
    start) start ;;
    run) run ;;
    status) report "$(state)" ;;
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
