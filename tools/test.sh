#!/usr/bin/env bash
# Runs the tests on fake CPU devices, in its own environment (.venv, made on the first run).
#
#   bash tools/test.sh [arguments of pytest; paths are relative to the checkout]
#
# Without -m, leaves out what is marked seconds, slow, long, gpu or peers; .ci/run runs the first two
# of these. MAXMARS_TEST_WORKERS says how many processes run the tests (2); -n 0 runs them in one,
# which --pdb needs.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
# shellcheck source=tools/venv.sh
source "$root/tools/venv.sh"
prepare_venv dev
cd "$root"

selection=(-m "not seconds and not slow and not long and not gpu and not peers")
for argument in "$@"; do
  case "$argument" in
    --*) ;;
    -m*) selection=() ;;
  esac
done
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
exec "$VENV_PYTHON" -m pytest -n "${MAXMARS_TEST_WORKERS:-2}" --dist loadscope \
  "${selection[@]}" "$@"
