#!/usr/bin/env bash
# Downloads wheels for a machine with a GPU that has JAX, CUDA and PyTorch but no network.
#
#   bash tools/gpu_wheels.sh [DIR] [PYTHON_VERSION]      (.wheels, 3.12)
#
# There: python3 -m pip install --no-index --no-deps --target SITE DIR/*.whl; PYTHONPATH=SITE.
# Taken are what maxmars needs beside JAX, each in the version that this Python has installed (PYTHON
# names another one), and the newest Flax. Left to the machine: jax, jaxlib, CUDA, torch, numpy,
# scipy, tensorstore, transformers, pytest, rich, protobuf, pyarrow and what these bring along.
set -euo pipefail

folder="${1:-.wheels}" version="${2:-3.12}" python="${PYTHON:-python3}"
packages=(
  optax orbax-checkpoint etils aiofiles humanize simplejson treescope  # beside JAX and Flax
  grain array-record dm-tree portpicker                                # the input pipeline
  tensorflow-datasets tensorflow-metadata googleapis-common-protos     # files of TFDS
  immutabledict simple-parsing docstring-parser termcolor toml wrapt
  tyro typeguard                                                       # the command line
  jaxtyping wadler-lindig beartype safetensors tiktoken                # small
)
platforms=()
for number in 2014 _2_17 _2_24 _2_26 _2_27 _2_28 _2_31 _2_34 _2_35; do
  platforms+=(--platform "manylinux${number}_x86_64")
done

mkdir -p "$folder"
rm -f "$folder"/*.whl # two versions of one package would stop the installation
installed() {
  "$python" -c 'import sys; from importlib.metadata import version
for name in sys.argv[1:]: print(f"{name}=={version(name)}")' "$@"
}
mapfile -t wanted < <(installed "${packages[@]}")
((${#wanted[@]} == ${#packages[@]})) || { echo "error: install maxmars and its extra dev first" >&2; exit 1; }
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
  --implementation cp --python-version "$version" "${platforms[@]}" --dest "$folder" \
  "${wanted[@]}" flax # which follows JAX, and the machine's is newer than this Python may allow
# Promise comes as its source alone, which is Python for any machine.
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$folder" \
  "$(installed promise)"
du -m "$folder"/*.whl | sort -rn | head -n 5
printf '%d wheels for Python %s in %s: %s MB in all\n' \
  "$(find "$folder" -name '*.whl' | wc -l)" "$version" "$folder" "$(du -sm "$folder" | cut -f1)"
