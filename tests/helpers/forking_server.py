"""vLLM's server with an engine that is a fork of it, so that vLLM is imported once.

    python -m helpers.forking_server ARGUMENTS

As in client_process.py, a fork is safe, since the server's process has no OpenMP threads.
"""

import multiprocessing
import runpy

import vllm.collect_env
import vllm.v1.engine.utils as engine_utils

if __name__ == "__main__":
    # For the first `/server_info`, `pip list` would take seconds.
    vllm.collect_env.get_pip_packages = lambda *_: ("pip", "")
    engine_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
