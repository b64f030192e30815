#!/usr/bin/env bash
# Trains a small GPT-2 on the Python standard library and prints a sample of what it learnt.
# Needs Python 3.11 or newer and pip, and nothing else: it makes its own environment in .venv.
#
#   bash tools/quickstart.sh [arguments of `maxmars train`]
#
# Run again, it continues or says that it is done. The run is in runs/quickstart, or in --workdir.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
# shellcheck source=tools/venv.sh
source "$root/tools/venv.sh"

workdir="" help="" previous=""
for argument in "$@"; do
  case "$previous $argument" in
    *" --help" | *" -h") help=yes ;;
    "--workdir "*) workdir="$argument" ;;
    *" --workdir="*) workdir="${argument#--workdir=}" ;;
  esac
  previous="$argument"
done
if [[ -z $workdir ]]; then
  workdir="$root/runs/quickstart"
  set -- --workdir "$workdir" "$@"
fi

# In many containers HOME cannot be written.
[[ -w ${HOME:-/} ]] || export MAXMARS_CACHE="${MAXMARS_CACHE:-$_venv/cache}"
prepare_venv
"$VENV_PYTHON" -m maxmars train "$root/configs/quickstart.py" "$@"
[[ -z $help ]] || exit 0
maxmars="${VENV_PYTHON%python}maxmars"
printf '\nA sample; for more, run\n  %q generate %q --prompt "def "\n\n' \
  "${maxmars#"$PWD/"}" "${workdir#"$PWD/"}"
"$VENV_PYTHON" -m maxmars generate "$workdir" --prompt "def "
