"""RolloutSource with real scheduler, stream and graders, and a scripted engine."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace

import pytest

from helpers.manual_engine import SAMPLES, SEED, GroupRequest, wait_for_groups
from helpers.scripted_task import PROBLEMS, NumberedTask
from helpers.waiting import wait_until
from torchtune_ext.grading import Grader, Ungraded
from torchtune_ext.pipeline.groups import group_from_record, group_to_json
from torchtune_ext.pipeline.source import RolloutSource
from torchtune_ext.pipeline.staleness import StalenessScheduler
from torchtune_ext.sampling.engine import SamplingConfig
from torchtune_ext.tasks.problem_stream import ProblemStream, problem_index
from torchtune_ext.training.checkpoints import RunState


def expected_request(number, batch=2):
    """The expected engine request for group `number` of a run."""
    problem = str(problem_index(number, PROBLEMS, SEED))
    return GroupRequest(problem, step=number // batch + 1, refill=0, seed_index=number % batch)


def expected_requests(*numbers):
    return [expected_request(number) for number in numbers]


def names(groups):
    return [group.problem.id for group in groups]


def wait_for(source, *numbers):
    """Waits until these groups are finished but not yet collected."""
    wait_for_groups(source._stream, *numbers)


@pytest.mark.parametrize("staleness", [0, 2])
def test_source_prefetch_zero_submits_groups_on_demand(make_source, staleness):
    source, engine = make_source(staleness, prefetch_steps=0)
    for step in range(3):
        source.on_publish(version=step)
        assert len(engine.requests) == 2 * step
        groups, metrics = source.take(2)
        assert names(groups) == [expected_request(n).problem for n in (2 * step, 2 * step + 1)]
        assert not metrics  # no groups were prefetched
    assert engine.requests == expected_requests(*range(6))


def test_source_prefetch_one_submits_next_step_groups(make_source):
    source, engine = make_source(staleness=1)
    source.on_publish(version=0)
    assert engine.requests == expected_requests(0, 1, 2, 3)
    for step in range(1, 4):
        source.take(2)
        assert len(engine.requests) == 2 * step + 2, "the engine still has the weights of the previous version"
        source.on_publish(version=step)
        assert engine.requests == expected_requests(*range(2 * step + 4))


def test_source_step_groups_ordered_with_staleness_metrics(make_source):
    source, engine = make_source(staleness=2, prefetch_steps=1, completes_immediately=False)
    source.on_publish(version=0)
    for number in (3, 1, 0):
        engine.requests[number].complete()
    wait_for(source, 3, 1, 0)
    groups, metrics = source.take(2)
    assert names(groups) == [expected_request(n).problem for n in (0, 1)]
    want = {"staleness_mean": 0, "staleness_max": 0, "buffer": 1, "running": 1, "dropped": 0, "dropped_tokens": 0}
    want |= {"staleness_0": 1, "staleness_1": 0, "staleness_2": 0}
    assert metrics == {f"async/{name}": value for name, value in want.items()}

    # Group 4 may overtake group 2, but does not overtake group 3.
    source.on_publish(version=1)
    engine.requests[4].complete()
    wait_for(source, 4)
    engine.requests[2].complete()
    groups, metrics = source.take(2)
    assert names(groups) == [expected_request(n).problem for n in (2, 3)]
    assert (metrics["async/staleness_mean"], metrics["async/staleness_max"], metrics["async/buffer"]) == (1, 1, 1)
    assert [metrics[f"async/staleness_{staleness}"] for staleness in range(3)] == [0, 1, 0]
    source.on_publish(version=2)
    engine.requests[5].complete()
    groups, metrics = source.take(2)
    assert names(groups) == [expected_request(n).problem for n in (4, 5)] and metrics["async/staleness_mean"] == 1


def test_source_version_jump_resamples_too_stale_groups(make_source, caplog):
    source, engine = make_source(staleness=1, completes_immediately=False)
    source.on_publish(version=0)
    engine.requests[3].complete()
    wait_for(source, 3)
    engine.requests[0].complete()
    engine.requests[1].complete()
    # This call also collects group 3.
    assert names(source.take(2)[0]) == [expected_request(n).problem for n in (0, 1)]
    source.on_publish(version=1)
    engine.requests[4].complete("xxx", "xxx")  # finished, not yet collected
    engine.requests[2].complete_sample(1, "xxxxx")
    wait_for(source, 4)

    source.on_publish(version=3)  # groups 2 and 3 have version 0, groups 4 and 5 version 1
    assert engine.requests[6:] == expected_requests(2, 3, 4, 5), "they keep their problems and their seeds"
    assert engine.requests[2].future.cancelled() and engine.requests[5].future.cancelled()
    dropped = {
        int(n): int(tokens)
        for n, tokens in re.findall(r"group (\d) is too stale .* (\d+) tokens are dropped", caplog.text)
    }
    assert dropped == {2: 5, 3: 4, 4: 6, 5: 0}

    engine.requests[2].complete_sample(0, "late")
    for request in engine.requests[6:]:
        request.complete("y", "y")
    for numbers in ((2, 3), (4, 5)):
        groups, metrics = source.take(2)
        assert names(groups) == [expected_request(n).problem for n in numbers]
        assert [sample.text for group in groups for sample in group.samples] == ["y"] * 4
        assert (metrics["async/dropped"], metrics["async/dropped_tokens"]) == (4, 15)


def test_source_resume_keeps_finished_and_resubmits_running_groups(make_source):
    source, engine = make_source(staleness=1, completes_immediately=False)
    source.on_publish(version=0)
    engine.requests[2].complete()
    wait_for(source, 2)
    engine.requests[0].complete()
    engine.requests[1].complete()
    source.take(2)  # group 2 is finished, group 3 is running
    source.on_publish(version=1)
    state = json.loads(json.dumps(source.state_dict()))
    finished = source._stream.finished[2]

    resumed, engine = make_source(staleness=1, cursor=6)
    resumed.load_state_dict(state, step=1)
    assert engine.requests == []
    for step in (2, 3):
        groups, metrics = resumed.take(2)
        assert names(groups) == [expected_request(n).problem for n in (2 * step - 2, 2 * step - 1)]
        assert metrics["async/staleness_max"] == 1.0
        assert engine.requests == expected_requests(*range(3, 2 * step + 2))
        if step == 2:
            assert group_to_json(groups[0]) == group_to_json(finished) and groups[0].problem is not finished.problem
        resumed.on_publish(version=step)


def test_source_resume_counts_previously_dropped_tokens(make_source):
    source, _engine = make_source(staleness=1)
    source.on_publish(version=0)
    wait_for(source, 0, 1, 2, 3)
    source.on_publish(version=2)
    resumed, _ = make_source(staleness=1, cursor=4)
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())), step=2)
    metrics = resumed.take(2)[1]
    assert (metrics["async/dropped"], metrics["async/dropped_tokens"]) == (4, 16)


def test_source_resume_other_batch_size_requires_empty_queue(make_source):
    source, _ = make_source(staleness=1, prefetch_steps=0)
    source.on_publish(version=0)
    source.take(2)
    assert source.state_dict() == {}
    resumed, engine = make_source(staleness=0, batch=3, cursor=2)
    resumed.load_state_dict({}, step=1)
    resumed.take(3)
    assert [(request.step, request.seed_index) for request in engine.requests] == [(2, 0), (2, 1), (2, 2)]
    assert [request.problem for request in engine.requests] == [expected_request(n).problem for n in (2, 3, 4)]

    source, _ = make_source(staleness=1)
    source.on_publish(version=0)
    with pytest.raises(ValueError, match="prompts_per_step=3: .*checkpoint.* 2"):
        make_source(staleness=1, batch=3)[0].load_state_dict(source.state_dict(), step=0)


def test_source_timeout_names_unfinished_groups(make_source):
    with Grader(NumberedTask(), timeout_s=90.0) as hanging:
        source, engine = make_source(staleness=1, completes_immediately=False, batch=8, deadline_s=0.05, grader=hanging)
        source.on_publish(version=0)
        engine.requests[2].complete()
        engine.requests[1].complete_sample(0, "x")
        engine.requests[0].complete("x", "long")
        wait_until(lambda: "1 of 2 texts are not graded" in source._stream.describe_pending(0))
        with pytest.raises(TimeoutError) as raised:
            source.take(8)
    message = str(raised.value)
    assert re.match(
        r"no completion or grade arrived for \d+ s \(rollouts\.deadline_s=0.05\), waiting for 7 groups", message
    )
    assert re.search(r"group 0 \(version 0\): submitted \d+ s ago, 1 of 2 texts are not graded; ", message)
    assert re.search(
        r"group 1 \(version 0\): submitted \d+ s ago, the engine has not finished 1 of 2 completions; ", message
    )
    assert "group 2 " not in message and "group 6 " not in message and "; and 2 more" in message
    assert message.endswith("or raise rollouts.deadline_s")


def test_source_deadline_excludes_training_time(make_source):
    source, engine = make_source(staleness=1, completes_immediately=False)
    source.on_publish(version=0)
    source._stream.last_progress_at -= 1000.0  # a long training step
    waits = []

    def watch(name):
        waits.append(name)
        if len(waits) == 2:  # the first wait timed out
            for number in (0, 1):
                engine.requests[number].complete()
        return nullcontext()

    assert len(source.take(2, watch)[0]) == 2 and waits[0] == "generate"


def test_source_refill_has_own_seeds_and_next_problems(make_source, caplog):
    source, engine = make_source()
    source.on_publish(version=0)
    source.take(2)
    groups, metrics = source.refill(3, 1)
    assert names(groups) == [expected_request(n).problem for n in (2, 3, 4)] and metrics == {}
    source.refill(1, 2)
    assert [(request.step, request.refill, request.seed_index) for request in engine.requests[2:]] == [
        (1, 1, 0),
        (1, 1, 1),
        (1, 1, 2),
        (1, 2, 0),
    ]
    source.on_publish(version=1)
    assert names(source.take(2)[0]) == [expected_request(n).problem for n in (6, 7)]
    assert [(request.step, request.refill, request.seed_index) for request in engine.requests[6:]] == [
        (2, 0, 0),
        (2, 0, 1),
    ]


def test_source_refill_past_deadline_raises(make_source):
    source, engine = make_source()
    source.take(2)
    source._deadline_s, engine.completes_immediately = 0.05, False
    with pytest.raises(
        TimeoutError, match=r"waiting for 2 groups: group 0 \(version 0\): .*; group 1 .*rollouts\.deadline_s"
    ):
        source.refill(2, 1)
    with pytest.raises(TimeoutError, match="waiting for 1 group: group 0 "):
        source.refill(1, 2)


def test_source_rank_without_stream_does_nothing(make_source):
    problems = ProblemStream(NumberedTask(), SEED)
    source = RolloutSource(
        StalenessScheduler(2, 10, 1), None, problems, SAMPLES, SamplingConfig(max_tokens=8), SEED, 1.0
    )
    for version in range(3):
        source.on_publish(version)
    assert source.state_dict() == {} and problems.cursor == 0
    main, _ = make_source(staleness=1)
    main.on_publish(version=0)
    wait_for(main, 0, 1)
    source.load_state_dict(main.state_dict(), step=0)
    source.on_publish(version=5)
    assert source.state_dict() == {}
    source.close()


@pytest.mark.parametrize("change", ["settings", "problem", "grader"])
def test_source_resume_resamples_finished_groups_after_changes(make_source, change, caplog):
    source, _ = make_source(staleness=1)
    source.on_publish(version=0)
    wait_for(source, 0, 1, 2, 3)
    state = json.loads(json.dumps(source.state_dict()))
    assert [number for number, _ in state["finished"]] == [0, 1, 2, 3]
    if change == "settings":
        state["sampling"]["sampling"]["temperature"] = 0.5
    elif change == "problem":
        state["problem_positions"][2] = [2, 99]
    else:
        # The grader failed when group 2 was graded, and has been fixed since.
        group = group_from_record(json.loads(state["finished"][2][1]))
        failed = tuple(replace(sample, outcome=Ungraded("infra_failed", "down")) for sample in group.samples)
        state["finished"][2][1] = group_to_json(replace(group, samples=failed))
    resumed, engine = make_source(staleness=1, cursor=4)
    resumed.load_state_dict(state, step=0)
    resampled = [0, 1, 2, 3] if change == "settings" else [2]
    assert f"{len(resampled)} finished groups are sampled again" in caplog.text
    resumed.on_publish(version=0)
    assert [request.seed_index + 2 * request.step - 2 for request in engine.requests] == resampled
    assert len(resumed.take(2)[0]) == 2


def test_source_state_with_old_keys_loads(make_source):
    source, _ = make_source(staleness=1)
    source.on_publish(version=0)
    wait_for(source, 0, 1, 2, 3)
    state = json.loads(json.dumps(source.state_dict()))
    old_names = {"scheduler": "ledger", "problem_positions": "cursors", "sampling": "drawn"}
    resumed, engine = make_source(staleness=1, cursor=4)
    resumed.load_state_dict({old_names.get(key, key): value for key, value in state.items()}, step=0)
    assert resumed.state_dict() == state and engine.requests == []


def test_source_resumes_checkpoint_with_three_step_numbers(make_source, repo_root):
    """The file was written before version, updates and the scheduler's step were computed from the step."""
    file = repo_root / "tests" / "golden" / "recipe_before_one_step_number.json"
    recipe = json.loads(file.read_text())
    assert (recipe["step"], recipe["version"], recipe["source"]["scheduler"]["published_step"]) == (1, 1, 1)
    state = RunState.from_recipe_state(recipe)
    resumed, engine = make_source(staleness=1, cursor=state.cursor)
    resumed.load_state_dict(state.source, state.step)
    del recipe["source"]["scheduler"]["published_step"]
    assert resumed.state_dict() == recipe["source"]
    resumed.on_publish(state.step)
    assert engine.requests == expected_requests(3, 4, 5)
    groups, metrics = resumed.take(2)
    assert names(groups) == [expected_request(n).problem for n in (2, 3)] and metrics["async/staleness_max"] == 1
    assert groups[0].samples[0].completion.versions.tolist() == [0, 0]


def test_source_later_group_error_is_deferred_until_take(make_source):
    """The step that was just trained is still evaluated and saved."""
    source, engine = make_source(staleness=1)
    source.on_publish(version=0)
    source.take(2)
    engine.config.max_model_len = 8
    source.on_publish(version=1)
    assert source.state_dict()["scheduler"]["version"] == 1
    with pytest.raises(ValueError, match=r"problem '\d+' of step 3: .*prompt"):
        source.take(2)


def test_source_refill_long_prompt_names_problem_and_step(make_source):
    source, engine = make_source()
    source.on_publish(version=0)
    source.take(2)
    engine.config.max_model_len = 8
    with pytest.raises(ValueError, match=r"problem '\d+' of step 1: .*prompt"):
        source.refill(1, 1)


def test_source_take_without_on_publish_raises(make_source):
    source, _ = make_source()
    source.on_publish(version=0)
    source.take(2)
    with pytest.raises(RuntimeError, match=r"call source\.on_publish\(version\) after each weight sync"):
        source.take(2)


def test_source_close_cancels_in_flight_requests(make_source):
    source, engine = make_source(staleness=1, completes_immediately=False)
    source.on_publish(version=0)
    source.close()
    assert [request.future.cancelled() for request in engine.requests] == [True] * 4
    source.close()


def test_source_replay_checkpoint_is_refused(make_source):
    source, _ = make_source()
    with pytest.raises(ValueError, match="this checkpoint is from a replay of run abc"):
        source.load_state_dict({"replayed": "abc"}, step=1)
