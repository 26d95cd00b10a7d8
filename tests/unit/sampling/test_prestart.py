"""Prestarted client processes: for which commands they start, and that all of them end."""

import subprocess
import sys
from importlib import reload
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")

from helpers.waiting import wait_until
from torchtune_ext.run.catalog import package_folder
from torchtune_ext.sampling import client_process, engine_args, prestart
from torchtune_ext.sampling.child_process import pack_messages

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def begun(monkeypatch):
    """Replace the processes that would import vLLM by idle processes."""
    processes = []

    def spawn(module, out, environ):
        process, ours = original("http.server", out, environ)
        processes.append(process)
        return process, ours

    original = prestart.spawn
    monkeypatch.setattr(prestart, "spawn", spawn)
    monkeypatch.setattr(prestart, "vllm_cpu", lambda: True)
    yield processes
    prestart.discard_prestarted()


@pytest.mark.parametrize("recipe", ["grpo_full", "grpo_lora", "grpo_async", "evaluate"])
def test_a_recipe_with_an_engine(recipe, begun):
    prestart.prestart_client([recipe, "--config", "grpo/tiny", "max_steps=1"])
    assert len(begun) == 1


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["warmup_sft", "--config", "warmup/tiny"],
        ["lora_finetune_single_device", "--config", "qwen2/0.5B_lora_single_device"],
        ["--nproc_per_node", "2", "grpo_full", "--config", "grpo/tiny"],
        ["no_such.py", "--config", "grpo/tiny"],
        ["grpo_full", "--help"],
        ["grpo_full", "--config", "grpo/tiny", "dry_run=True"],
        ["grpo_full", "--config", "grpo/tiny", "replay=runs/tiny/grpo"],
        ["grpo_full", "--config", "grpo/tiny", "engine.address=http://127.0.0.1:8000"],
        ["grpo_full", "--config", "grpo/tiny", "engine.backend=my_module.MyBackend"],
    ],
)
def test_commands_without_an_engine_of_our_own(words, begun):
    prestart.prestart_client(words)
    assert not begun


def test_prestart_recognizes_copied_recipe_and_ignores_other_files(tmp_path, begun):
    copy, other = tmp_path / "my_grpo.py", tmp_path / "other.py"
    copy.write_text((package_folder("recipes") / "grpo.py").read_text())
    other.write_text("print('no engine')\n")
    prestart.prestart_client([str(other)])
    assert not begun
    prestart.prestart_client([str(copy)])
    assert len(begun) == 1


def test_prestart_process_is_taken_once_while_running(begun):
    prestart.prestart_client(["grpo_full"])
    process, end = prestart.take_prestarted()
    assert process is begun[0] and prestart.take_prestarted() is None
    process.kill()
    end.close()

    prestart.prestart_client(["grpo_full"])
    begun[1].kill()
    begun[1].wait()
    assert prestart.take_prestarted() is None


def test_a_machine_that_cannot_start_it_now(begun, monkeypatch):
    def spawn(*_):
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(prestart, "spawn", spawn)
    prestart.prestart_client(["grpo_full"])
    assert prestart.take_prestarted() is None


def test_prestart_untaken_process_is_ended(begun):
    prestart.prestart_client(["grpo_full"])
    prestart.discard_prestarted()
    assert begun[0].poll() is not None


def test_prestart_process_ends_with_killed_trainer():
    code = """
        import os
        from torchtune_ext.sampling import prestart
        prestart.vllm_cpu = lambda: True
        prestart.prestart_client(["grpo_full"])
        print(prestart._prestarted[0].pid, flush=True)
        os.kill(os.getpid(), 9)
    """
    code = "\n".join(line.strip() for line in code.splitlines())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path.cwd())
    wait_until(lambda: not psutil.pid_exists(int(done.stdout)))


def test_prestart_vllm_import_error_is_logged(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('it is broken')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(prestart, "vllm_cpu", lambda: True)
    prestart.prestart_client(["grpo_full"])
    process, end = prestart.take_prestarted()
    with end:
        end.sendall(pack_messages(["model", None, str(tmp_path / "engine.log"), prestart.child_environment({})]))
        assert process.wait(50) == 1
    assert "ImportError: it is broken" in (tmp_path / "engine.log").read_text()


def test_variables_that_replace_settings_reach_no_engine(monkeypatch, capsys):
    for name in prestart.IGNORED_VARIABLES:
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "info")
    variables = prestart.child_environment(prestart.CLIENT_VARIABLES)
    assert not prestart.IGNORED_VARIABLES.keys() & variables.keys() and variables["VLLM_LOGGING_LEVEL"] == "info"
    engine_args.warn_ignored_variables.cache_clear()
    engine_args.warn_ignored_variables()
    said = capsys.readouterr().out.splitlines()
    assert (
        said[0]
        == "engine:    environment variable VLLM_CPU_KVCACHE_SPACE=3 is ignored; set engine.kv_cache_bytes instead"
    )
    assert len(said) == len(prestart.IGNORED_VARIABLES)


def test_log_level_in_lower_case_is_accepted(monkeypatch):
    try:
        for level, number in (("debug", 10), ("INFO", 20), ("verbose", 30), ("", 30)):
            monkeypatch.setenv("VLLM_LOGGING_LEVEL", level)
            assert number == reload(client_process).LOG_LEVEL
    finally:
        monkeypatch.undo()
        reload(client_process)
