# Makes or reuses the virtual environment of this checkout. Source it, then call
#   prepare_venv [EXTRA]      for example: prepare_venv dev
# which sets VENV_PYTHON. The environment is .venv, or MAXMARS_VENV; the Python that makes it is the
# first of at least 3.11 that is found, or PYTHON.
# shellcheck shell=bash

_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
_venv="${MAXMARS_VENV:-$_root/.venv}"
[[ $_venv == /* ]] || _venv="$PWD/$_venv"
VENV_PYTHON="$_venv/bin/python"

_fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Running a Python is the only way to know: a shim on PATH may stand for nothing, and some
# distributions leave venv out.
_find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
      2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  _fail "no Python of at least 3.11 with the venv module was found; install one (on Debian and" \
    "Ubuntu: apt install python3 python3-venv), or name one: PYTHON=/path/to/python3."
}

# Makes the environment hold maxmars, and one extra besides if it is named. A file in it says for
# which checkout; while packages are installed it is empty, so that what a kill leaves is made anew.
# An environment without the file was made by hand: it is installed into, and never deleted.
prepare_venv() {
  local extra="${1:-}" mark="$_venv/maxmars-root" python quiet=(--quiet)
  local installed="$_venv/maxmars-installed-${extra:-alone}"
  if [[ -e $mark && $(<"$mark") != "$_root" ]] || ! "$VENV_PYTHON" -c '' 2>/dev/null; then
    [[ -e $mark || -e $_venv/pyvenv.cfg || -z $(ls -A "$_venv" 2>/dev/null) ]] ||
      _fail "$_venv is not a virtual environment; delete it, or set MAXMARS_VENV to another place."
    python="$(_find_python)"
    printf 'Making a virtual environment in %s; installing takes minutes.\n' "$_venv" >&2
    "$python" -m venv --clear "$_venv"
    printf '%s\n' "$_root" >"$mark"
  fi
  [[ ! $installed -nt $_root/pyproject.toml ]] || return 0
  [[ ! -t 2 ]] || quiet=()
  [[ ! -e $mark ]] || : >"$mark"
  "$VENV_PYTHON" -m pip --version >/dev/null 2>&1 || "$VENV_PYTHON" -m ensurepip >/dev/null
  # Python compiles what it imports; pip would compile all, which takes half of the time.
  "$VENV_PYTHON" -m pip install "${quiet[@]}" --disable-pip-version-check --no-compile \
    -e "$_root${extra:+[$extra]}" >&2 ||
    _fail "pip could not install maxmars; run the command again when the cause is gone."
  [[ ! -e $mark ]] || printf '%s\n' "$_root" >"$mark"
  touch "$installed"
}
