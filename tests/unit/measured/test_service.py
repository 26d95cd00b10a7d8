"""The settings `bench:` choose the service, and results become scores that a rollout browser can show."""

import asyncio
from dataclasses import fields

import pytest

pytest.importorskip("tree_sitter_c")

from helpers.calm_kernels import HONEST, CalmReduction, fenced
from helpers.waiting import start_thread
from torchtune_ext.measured import grading
from torchtune_ext.measured.bench import BenchService
from torchtune_ext.measured.grading import check_bench, measured_score, open_bench
from torchtune_ext.measured.kernels import Dgemm
from torchtune_ext.measured.results import BenchConfig, Result
from torchtune_ext.measured.sandbox import SandboxError
from torchtune_ext.measured.timing import Timing

SPEED = Timing(**{each.name: {float: 0.25, int: 30, bool: True}[each.type] for each in fields(Timing)})


def test_without_an_address_it_is_this_machine():
    with open_bench(BenchConfig(workers=1, budget_s=0.2)) as bench:
        wrong = bench.submit(CalmReduction(), fenced(HONEST.replace("s += x[i]", "s -= x[i]"))).result(200)
        broken = bench.submit(CalmReduction(), fenced("void reduction(int n) {}")).result(200)
    score = measured_score(wrong, -0.5)
    assert score.reward == -0.5 and score.parts["outcome_wrong_result"] == 1 and "should be" in score.note
    assert (
        "conflicting types" in measured_score(broken, -1).note
        and measured_score(broken, -1).parts["outcome_compile_error"] == 1
    )


class Broken(CalmReduction):
    naive = "void reduction("


class Undecodable(CalmReduction):
    """Raises a kind of ValueError that cannot be made of a text, where a kernel of ones is fine."""

    def reference(self, size, inputs):
        return super().reference(size, inputs) if size["n"] == 1 else b"\xff".decode()


@pytest.mark.parametrize(
    "config, kernel, message",
    [
        ({"cores": [4093]}, CalmReduction(), r"cores=\[4093\]: use some of \["),
        ({"threads": 4000}, CalmReduction(), "threads=4000, but this process may run on"),
        ({"compiler": "nogcc"}, CalmReduction(), "no C compiler: nogcc not found on PATH; install one"),
        ({}, Dgemm(1_000_000), "dgemm with m=1000000 n=1000000 k=1000000 cannot be measured here: no room for"),
        ({}, Broken(), "reduction with n=.* cannot be measured here: Broken.naive: .* ends with compile_error"),
        ({}, Undecodable(), "reduction with n=.* cannot be measured here: 'utf-8' codec can't decode"),
    ],
    ids=["cores", "threads", "compiler", "size", "own program", "own error"],
)
def test_rehearse_bench_unmeasurable_kernel_raises_before_start(config, kernel, message):
    with pytest.raises((ValueError, SandboxError), match=message):
        check_bench(BenchConfig(**config), [kernel])


def test_with_an_address_it_is_a_cluster(monkeypatch):
    calls = []
    monkeypatch.setattr(grading, "RayBench", lambda *words, **settings: calls.append((words, settings)))
    open_bench(BenchConfig(address="10.0.0.1:6379", threads=4, budget_s=3.0))
    ((words, settings),) = calls
    assert not words and settings["address"] == "10.0.0.1:6379"
    assert settings["threads"] == 4 and settings["budget_s"] == 3.0


def test_measured_score_has_speed_parts_and_text_facts():
    score = measured_score(Result("dgemm", "ok", "time", "", SPEED), 1.5)
    assert score.reward == 1.5 and score.note == ""
    assert {name: value for name, value in score.parts.items() if value} == {
        "outcome_ok": 1.0,
        "gflops": 0.25,
        "speedup": 0.25,
        "spread": 0.25,
        "peak_share": 0.25,
        "speedup_spread": 0.25,
    }
    assert all(isinstance(value, float) for value in score.parts.values())
    late = measured_score(
        Result("dgemm", "timeout", "verify", "its calls took too long", None, fingerprint="a machine"), -0.5
    )
    assert late.parts["outcome_timeout"] == 1 and "gflops" not in late.parts and late.note == "its calls took too long"
    assert late.facts == {"machine": "a machine", "techniques": ""}


def test_bench_service_without_event_loop_raises(monkeypatch):
    def refused(policy):
        raise OSError("Too many open files")

    monkeypatch.setattr(type(asyncio.get_event_loop_policy()), "new_event_loop", refused)
    making, outcome = start_thread(BenchService)
    making.join(20)
    assert isinstance(*outcome, OSError)
