"""Shared settings of all tests: no network, one thread per process, fixed random numbers, and the markers of setup.cfg."""

import ast
import gc
import os
import random
import re
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Before anything imports torch, transformers or vLLM; child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

# A shell starts background processes, as one part of the tests, with SIGINT ignored, and their children would inherit it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# `python -m pytest` puts the repository root on sys.path, and there `recipes` (torchtune's wheel has one) and `kernels`
# (Hugging Face's package) would resolve to this project. The tests use the installed names, torchtune_ext.recipes and .kernels.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

import hypothesis  # noqa: E402  (after the environment is set)
import pytest  # noqa: E402

# A random failure says nothing about a change, so property tests draw the same examples in every run. `make test-random`
# draws others. No example has a deadline, since the machine may be busy.
patient = dict(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("same", derandomize=True, database=None, **patient)
hypothesis.settings.register_profile("random", print_blob=True, **patient)
hypothesis.settings.load_profile("same")  # pytest's option --hypothesis-profile is read after this file


def seed(number: int) -> None:
    """Seed the global generators of random, numpy and torch, if imported."""
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(number)


# Each test is independent of earlier tests, also in its random numbers after a fixture that another test may have created.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call():
    seed(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Print a failing Hypothesis example as the decorator that keeps it in the test."""
    report = yield
    for note in getattr(call.excinfo and call.excinfo.value, "__notes__", ()):
        try:
            # Hypothesis writes "Failing test case: name(a=1, b=2)" over several lines.
            (statement,) = ast.parse(note.partition(": ")[2]).body
            drawn = [keyword for keyword in statement.value.keywords if keyword.arg not in item.funcargs]
        except (SyntaxError, ValueError, AttributeError):
            continue  # not a call, or a value without a name: Hypothesis also prints @reproduce_failure
        report.sections.append(("to keep it", f"@example({', '.join(map(ast.unparse, drawn))})"))
    return report


def pytest_addoption(parser):
    parser.addoption("--without", default="", metavar="MARKER,...", help="excludes these from the tests of -m and -k")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Workers get whole files. One worker gets all files with shared runs, so each run is made once."""
    from xdist.scheduler import LoadFileScheduling

    runs = re.compile(r"\b(served|full_workspace|lora_served|lora_workspace|talks_workspace|kl_run)\b")
    tests = (ROOT / "tests" / "integration").glob("test_*.py")
    together = {str(path.relative_to(ROOT)) for path in tests if runs.search(path.read_text())}

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "runs" if file in together else file

    return Scheduling(config, log)


# Most tests of unit/grading and unit/measured start processes: graders, compilers, sandboxes.
FOLDERS = {"gpu": "gpu", "learns": "learns", "unit/grading": "slow", "unit/measured": "slow"}


def pytest_collection_modifyitems(config, items):
    """Folders imply markers (`FOLDERS`). `gpu` is skipped without a CUDA device."""
    for item in items:
        for folder, marker in FOLDERS.items():
            if ROOT / "tests" / folder in item.path.parents:
                item.add_marker(marker)
    without = set(config.getoption("--without").split(","))
    left_out = [item for item in items if without & {marker.name for marker in item.iter_markers()}]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        import torch

        if not torch.cuda.is_available():
            for item in gpu_items:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish(session):
    """Exclude all imported modules from garbage collections, which take a second otherwise, and in each fork, too."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left():
    """Destroy leftover process groups. FSDP2 on one device creates a group, and a fork in a later file would inherit it and
    wait for missing ranks."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Return the folder of the data sets, TORCHTUNE_EXT_DATA or ../shared/data; skip if it is missing."""
    path = Path(os.environ.get("TORCHTUNE_EXT_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"TORCHTUNE_EXT_DATA: {path} not found")
    return path


PACKAGES = ("bubblewrap", "chromium", "gcc", "clang", "iproute2", "util-linux")  # Debian's names


def pytest_unconfigure(config):
    """Print as the last line the number of tests skipped for a missing system package."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reasons = [report.longrepr[2] for report in reporter.stats.get("skipped", ())] if reporter else []
    packages = [next((name for name in PACKAGES if name in reason), None) for reason in reasons]
    counted = [f"{packages.count(name)} for {name} (apt install {name})" for name in PACKAGES if name in packages]
    if counted:
        reporter.write_line(f"skipped: {', '.join(counted)}")
