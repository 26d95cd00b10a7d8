"""Which preemptions the engine's process counts: those of a full cache, not those of a pause."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("torch")

from torchtune_ext.sampling.client_process import forget_preemptions_of_pauses  # noqa: E402


class Request:
    def __init__(self, *events):
        self.events = [SimpleNamespace(type=event) for event in events]

    def said(self):
        return [event.type for event in self.events]


class Scheduler:
    """As much of vLLM's as is wrapped."""

    def __init__(self, running):
        self.running = running

    def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        while reset_running_requests and self.running:
            self.preempt(self.running.pop())
        return True

    @staticmethod
    def preempt(request):
        if request.events is not STOPPED:
            request.events.append(SimpleNamespace(type="PREEMPTED"))


STOPPED: list = [SimpleNamespace(type="PREEMPTED")]  # events of a request whose pause notes nothing


@pytest.fixture
def vllm(monkeypatch):
    """Modules with the names that are imported; returns the scheduler's class."""
    found = type("Scheduler", (Scheduler,), {"reset_prefix_cache": Scheduler.reset_prefix_cache})
    for name in (
        "vllm",
        "vllm.v1",
        "vllm.v1.core",
        "vllm.v1.core.sched",
        "vllm.v1.core.sched.scheduler",
        "vllm.v1.engine",
    ):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm"].__version__ = "0.99.1"
    sys.modules["vllm.v1.core.sched.scheduler"].Scheduler = found
    sys.modules["vllm.v1.engine"].EngineCoreEventType = SimpleNamespace(PREEMPTED="PREEMPTED")
    return found


def test_a_real_preemption_next_to_a_pause_is_counted(vllm):
    forget_preemptions_of_pauses()
    before, again, quiet = Request("QUEUED", "PREEMPTED", "SCHEDULED"), Request("SCHEDULED"), Request()
    waiting, quiet.events = Request("PREEMPTED"), STOPPED
    scheduler = vllm([before, again, quiet])
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert before.said() == ["QUEUED", "PREEMPTED", "SCHEDULED"] and again.said() == ["SCHEDULED"]
    assert waiting.said() == quiet.said() == ["PREEMPTED"]
    scheduler.preempt(again)  # the cache is full, after the pause
    assert again.said() == ["SCHEDULED", "PREEMPTED"]
    scheduler.running = [again]
    assert scheduler.reset_prefix_cache() and again.said() == ["SCHEDULED", "PREEMPTED"]


def test_a_vllm_with_another_method_is_refused_by_its_version(vllm):
    vllm.reset_prefix_cache = lambda self, everything=True: True
    with pytest.raises(RuntimeError, match=r"vLLM 0.99.1 is not the version.*\['self', 'everything'\]"):
        forget_preemptions_of_pauses()
