"""Where each group is, from its submission until it is taken: what the timeline is told."""

import json

from waiting import wait_until


def places(source):
    return source._stream.times


def in_run(*numbers):
    return [("group", number) for number in numbers]


def test_where_each_group_is_told_until_it_is_taken(make):
    source, engine = make(staleness=1, at_once=False)
    source.open(version=0)
    assert places(source).now == dict.fromkeys(in_run(0, 1, 2, 3), "engine")
    for number in (0, 1, 2):
        engine.calls[number].answer()
    wait_until(lambda: places(source).now == dict.fromkeys(in_run(0, 1, 2), "buffer") | {("group", 3): "engine"})
    source.take(2)
    assert places(source).gone == dict.fromkeys(in_run(0, 1), ["taken"])
    source.open(version=1)
    state = json.loads(json.dumps(source.state_dict()))

    # A checkpoint has group 2; the others are sampled again.
    resumed, engine = make(staleness=1, cursor=6)
    resumed.load_state_dict(state, step=1, version=1)
    assert places(resumed).now == {("group", 2): "buffer"}
    resumed.take(2)
    assert places(resumed).gone == dict.fromkeys(in_run(2, 3), ["taken"])

    # Versions that jump make groups 2 and 3 too old, one of them in the buffer, the other one with the engine.
    source.open(version=3)
    assert [places(source).gone[key] for key in in_run(2, 3)] == [["cancelled"]] * 2
    assert {places(source).now[key] for key in in_run(2, 3)} == {"engine"}


def test_groups_of_a_refill_are_not_taken_for_those_of_the_run(make):
    source, _ = make()
    source.open(version=0)
    source.take(2)
    source.take(3, refill=1)
    taken = [*in_run(0, 1), *(("refill", place) for place in range(3))]
    assert places(source).gone == dict.fromkeys(taken, ["taken"]) and places(source).now == {}
