# Makes or reuses the virtual environment of this checkout. Source it, then call
#   prepare_venv [EXTRA]      for example: prepare_venv dev
# which sets VENV_PYTHON. The environment is .venv, or MAXMARS_VENV; the Python that makes it is the
# first of at least 3.11 that is found, or PYTHON.
# shellcheck shell=bash

_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
_venv="${MAXMARS_VENV:-$_root/.venv}"
[[ $_venv == /* ]] || _venv="$PWD/$_venv"
VENV_PYTHON="$_venv/bin/python"

_say() { printf '%s\n' "$*" >&2; }

_fail() {
  _say "error: $*"
  exit 1
}

# Prints the version of a Python that can make the environment. Running it is the only way to know:
# a shim on PATH may stand for nothing, and some distributions leave venv out.
_python_version() {
  "$1" -c 'import sys
if sys.version_info < (3, 11): sys.exit(1)
import ensurepip, venv
print(sys.version.split()[0])' 2>/dev/null
}

_find_python() {
  local candidate
  if [[ -n ${PYTHON:-} ]]; then
    _python_version "$PYTHON" >/dev/null || _fail "PYTHON=$PYTHON is not a Python of at least 3.11" \
      "with the venv module; name another one, or none to have one found."
    printf '%s\n' "$PYTHON"
    return
  fi
  for candidate in python3 python3.13 python3.12 python3.11; do
    if _python_version "$candidate" >/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  _fail "no Python of at least 3.11 with the venv module was found; install one (on Debian and" \
    "Ubuntu: apt install python3 python3-venv), or name one: PYTHON=/path/to/python3."
}

# The environment's Python and the checkout it belongs to; fails if it does not run.
_fingerprint() {
  local version
  version="$("$VENV_PYTHON" -c 'import sys; print(sys.version.split()[0])' 2>/dev/null)" || return 1
  printf 'python %s\nroot %s\n' "$version" "$_root"
}

_project_hash() {
  "$VENV_PYTHON" -c 'import hashlib, sys
print("pyproject", hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' \
    "$_root/pyproject.toml"
}

# Makes the environment if there is none that works. The stamp says `installing` from before the
# first package until after the last, so an environment that was left half made is made anew.
_make_venv() {
  local stamp="$_venv/maxmars-stamp" python
  if [[ -e $stamp ]]; then
    if _fingerprint >/dev/null && [[ $(head -n 2 "$stamp") == "$(_fingerprint)" ]] &&
      [[ -z ${PYTHON:-} || $(_python_version "$PYTHON") == "$(_python_version "$VENV_PYTHON")" ]]; then
      return
    fi
    _say "$_venv is incomplete or of another Python or place; making it anew."
  elif _python_version "$VENV_PYTHON" >/dev/null; then
    # Made by hand: install into it, never delete it. Some tools leave pip out.
    "$VENV_PYTHON" -m pip --version >/dev/null 2>&1 || "$VENV_PYTHON" -m ensurepip >/dev/null
    return
  elif [[ -d $_venv && ! -e $_venv/pyvenv.cfg && -n $(ls -A "$_venv") ]]; then
    _fail "$_venv is not a virtual environment; delete it, or set MAXMARS_VENV to another place."
  fi
  python="$(_find_python)"
  _say "Making a virtual environment in $_venv with Python $(_python_version "$python")."
  "$python" -m venv --clear "$_venv"
}

# Shows what pip is at, on a terminal only, and logs everything.
_log_pip() {
  local line
  while IFS= read -r line; do
    printf '%s\n' "$line" >>"$1"
    if [[ -t 2 && $line =~ ^(Collecting|Processing|Installing) ]]; then
      printf '\r\033[K  %.70s' "$line" >&2
    fi
  done
  [[ ! -t 2 ]] || printf '\r\033[K' >&2
}

_install() {
  local extras="$1" log="$_venv/install.log" start=$SECONDS
  local target="$_root${extras:+[$extras]}"
  _say "Installing maxmars${extras:+ with extra $extras} and what it needs; the first time takes" \
    "minutes. Log: $log"
  : >"$log"
  if ! "$VENV_PYTHON" -m pip install --disable-pip-version-check -e "$target" 2>&1 | _log_pip "$log"
  then
    tail -n 25 "$log" >&2
    _fail "pip could not install maxmars; the whole output is in $log. Run the command again when" \
      "the cause is gone."
  fi
  _say "Installed in $((SECONDS - start)) s."
}

# Makes the environment hold maxmars, and one extra besides if it is named.
prepare_venv() {
  local extra="${1:-}" installed="" stamp="$_venv/maxmars-stamp" fingerprint
  # One at a time, as two scripts may start together. Not every file system can lock.
  exec 9<"$_root"
  flock 9 2>/dev/null || true
  _make_venv
  fingerprint="$(_fingerprint)"$'\n'"$(_project_hash)"
  [[ ! -e $stamp ]] || installed="$(sed -n 's/^extras //p' "$stamp")"
  if [[ ",$installed," != *",$extra,"* && -n $extra ]]; then
    installed="${installed:+$installed,}$extra"
  fi
  fingerprint+=$'\n'"extras $installed"
  if [[ ! -e $stamp || $(<"$stamp") != "$fingerprint" ]]; then
    printf 'installing\n' >"$stamp"
    _install "$installed"
    printf '%s\n' "$fingerprint" >"$stamp"
  fi
  exec 9<&-
}
