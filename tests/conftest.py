"""What every test shares: no network, one thread a process, the same random numbers, and the rings of setup.cfg."""

import ast
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

# Whoever was started by a shell in the background, as one part of the tests is, ignores Ctrl-C, and so would all that it starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# `python -m pytest` puts the repository root on sys.path, and there `recipes` (torchtune's wheel has one) and `kernels`
# (Hugging Face's package) would be ours. The tests use the installed names, torchtune_ext.recipes and .kernels.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

import hypothesis  # noqa: E402  (after the environment is set)
import pytest  # noqa: E402

# A test that fails by chance says nothing of the change that it failed after: property tests draw the same examples in every
# run. `make test-random` draws others. A busy machine is no fault of a test, so no example has a deadline.
patient = dict(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("same", derandomize=True, database=None, **patient)
hypothesis.settings.register_profile("random", print_blob=True, **patient)
hypothesis.settings.load_profile("same")  # pytest's option --hypothesis-profile is read after this file


def seed(number: int) -> None:
    """Of the generators that belong to everybody; what is not imported yet has none."""
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(number)


# No test depends on the one before it: not its fixtures, and not what it draws after a fixture that another test may have made.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call():
    seed(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """An example that failed is printed as the line that keeps it in the test."""
    report = yield
    for note in getattr(call.excinfo and call.excinfo.value, "__notes__", ()):
        try:
            # Hypothesis writes "Failing test case: name(a=1, b=2)" over several lines.
            (statement,) = ast.parse(note.partition(": ")[2]).body
            drawn = [keyword for keyword in statement.value.keywords if keyword.arg not in item.funcargs]
        except (SyntaxError, ValueError, AttributeError):
            continue  # no call, or one of a value that has no name: hypothesis prints a line @reproduce_failure, too
        report.sections.append(("to keep it", f"@example({', '.join(map(ast.unparse, drawn))})"))
    return report


def pytest_addoption(parser):
    parser.addoption("--without", default="", metavar="MARKER,...", help="leaves these out of what -m and -k choose")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Workers take whole files. One of them takes all that look at the same runs, and so makes each of these once."""
    from xdist.scheduler import LoadFileScheduling

    runs = re.compile("full_workplace|lora_workplace|lora_served")
    tests = (ROOT / "tests" / "integration").glob("test_*.py")
    together = {str(path.relative_to(ROOT)) for path in tests if runs.search(path.read_text())}

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "runs" if file in together else file

    return Scheduling(config, log)


def pytest_collection_modifyitems(config, items):
    """Folders imply rings: tests/gpu is `gpu`, tests/learns is `learns`. `gpu` is skipped without a CUDA device."""
    for item in items:
        for ring in ("gpu", "learns"):
            if ROOT / "tests" / ring in item.path.parents:
                item.add_marker(ring)
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


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left():
    """A model that FSDP2 holds on one device makes a process group, which a fork in a later file would take for its own and wait
    for ranks that are not there."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the data sets: TORCHTUNE_EXT_DATA, or ../shared/data from here; skips where there is none."""
    path = Path(os.environ.get("TORCHTUNE_EXT_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no data in {path}; set TORCHTUNE_EXT_DATA")
    return path


PACKAGES = ("bubblewrap", "chromium", "gcc", "clang", "iproute2", "util-linux")  # Debian's names


def pytest_unconfigure(config):
    """The last line of a run: what was skipped for want of a package of the system."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reasons = [report.longrepr[2] for report in reporter.stats.get("skipped", ())] if reporter else []
    packages = [next((name for name in PACKAGES if name in reason), None) for reason in reasons]
    counted = [f"{packages.count(name)} for {name} (apt install {name})" for name in PACKAGES if name in packages]
    if counted:
        reporter.write_line(f"skipped: {', '.join(counted)}")
