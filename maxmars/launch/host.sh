# shellcheck shell=bash disable=SC2154
# What the script ~/maxmars-NAME.sh does on each TPU host: install, start, status, follow SKIP,
# wait SECONDS, stop, kill. `host_script` in tpu_vm.py writes above it the values of this run: name,
# digest (of the source), python (such as python3.12), wheel, constraints, setup (may be empty),
# train, max_restarts and pause (seconds before each of them); and `starts_again`.
#
# Each command reports on a line `[maxmars-host] HOST STATE`, since gcloud mixes the hosts' outputs.
# States: installed, install-failed, started, idle, running, restarting CODE (after the pause),
# exited CODE, stopped CODE (after stop) and lost (this script is gone too, as after a reboot).
set -euo pipefail
home="$HOME/maxmars-$name"
self="$home.sh"
log="$home/train.log"

report() { printf '[maxmars-host] %s %s\n' "$(hostname)" "$*"; }

# Whether there is the process of this name: the `run` of this script, or the `train` that it starts.
alive() {
  local pid
  pid="$(cat "$home/$1.pid" 2>/dev/null)" && [[ -n $pid ]] && grep -qsz maxmars "/proc/$pid/cmdline"
}

signal() { if alive "$2"; then kill "-$1" "$(<"$home/$2.pid")" 2>/dev/null || true; fi; }

put() {
  printf '%s\n' "$2" >"$home/$1.part"
  mv "$home/$1.part" "$home/$1"
}

state() {
  if alive run && [[ -f $home/restarting ]]; then
    printf 'restarting '
    cat "$home/restarting"
  elif alive run; then
    echo running
  elif [[ -f $home/exit_code ]]; then
    if [[ -f $home/stopped ]]; then printf 'stopped '; else printf 'exited '; fi
    cat "$home/exit_code"
  elif [[ -f $home/run.pid ]]; then
    echo lost
  else
    echo idle
  fi
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
    -c "$home/source/$constraints" "$home/source/${wheel}[tpu,gcs]"
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
  if ! alive run; then
    rm -f "$home"/{run.pid,train.pid,restarting,exit_code,stopped}
    touch "$log"
    wc -l <"$log" >"$home/lines_before"
    setsid nohup bash "$self" run >>"$log" 2>&1 </dev/null &
    for _ in {1..200}; do
      [[ ! -f $home/train.pid ]] || break
      sleep 0.05
    done
  fi
  report started
}

# Every host starts its process again by itself. They need not wait for each other's end: JAX aborts
# what is left of a run as soon as a new process asks for its coordinator, and the new one waits
# until all have come.
run() {
  local code restarts=0
  put run.pid "$$"
  export JAX_PLATFORMS=tpu,cpu  # JAX would else take the CPU where it finds no TPU
  load_environment
  cd "$home/source"
  while true; do
    "$home/venv/bin/python" "${train[@]}" &
    put train.pid "$!"
    if [[ -f $home/stopped ]]; then signal TERM train; fi  # since the last look
    code=0
    wait "$!" || code=$?
    if ! starts_again "$code" || ((restarts++ >= max_restarts)); then break; fi
    put restarting "$code"
    if [[ ! -f $home/stopped ]]; then sleep "$pause"; fi
    if [[ -f $home/stopped ]]; then break; fi
    rm "$home/restarting"
    echo "maxmars: exit code $code; restart $restarts of at most $max_restarts"
  done
  put exit_code "$code"
}

# The log since `start`, each line with its number: gcloud repeats a command whose ssh broke.
follow() {
  local number="$1" line
  if [[ -f $home/train.pid ]]; then
    tail -n "+$(($(<"$home/lines_before") + number + 1))" -s 0.1 -f --pid="$(<"$home/train.pid")" "$log" |
      while IFS= read -r line || [[ -n $line ]]; do
        printf '%s\t%s\n' "$((++number))" "$line"
      done
  fi
  report "$(state)"
}

# Wait while the state is like this, so many seconds at most.
wait_while() {
  local end=$((SECONDS + $2))
  # shellcheck disable=SC2053
  while [[ $(state) == $1 ]] && ((SECONDS < end)); do sleep 0.1; done
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
    wait)
      wait_while running "$2"
      report "$(state)"
      ;;
    stop)
      if alive run; then touch "$home/stopped"; fi
      signal TERM train
      wait_while "r*" 600  # running or restarting
      signal KILL train
      wait_while "r*" 5
      report "$(state)"
      ;;
    kill)
      signal KILL run
      signal KILL train
      report "$(state)"
      ;;
  esac
}

# A new version of this file may replace it while it runs: bash must not read on.
{
  main "$@"
  exit
}
