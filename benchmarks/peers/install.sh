#!/bin/sh
# Creates benchmarks/peers/.venv-kvpress for `python -m benchmarks run kvpress`: about 1.5 GB, a few minutes.
# Another interpreter: PYTHON=python3.12 sh benchmarks/peers/install.sh
set -eu
here=$(cd "$(dirname "$0")" && pwd)
venv="$here/.venv-kvpress"
test -x "$venv/bin/python" || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$here/requirements-kvpress.txt"
"$venv/bin/python" -c "import kvpress, transformers; print('kvpress with transformers', transformers.__version__)"
