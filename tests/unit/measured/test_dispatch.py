"""Which text goes to which machine: to the one with the least work, groups to one machine, and nothing is lost."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from torchtune_ext.measured import dispatch as dispatch_module
from torchtune_ext.measured.dispatch import Dispatch


def dispatch_of(*machines):
    """Each machine is (name, kind, room)."""
    dispatch = Dispatch()
    for machine in machines:
        dispatch.join(*machine)
    return dispatch


def given_out(dispatch):
    """Gives out all that can be given out: the machine of each text."""
    given = {}
    while (pair := dispatch.next()) is not None:
        given[pair[0]] = pair[1]
    return given


def test_the_machine_with_the_least_work_is_next():
    dispatch = dispatch_of(("a", "x", 9), ("b", "x", 9))
    for number in range(4):
        dispatch.add(number)
    assert Counter(given_out(dispatch).values()) == {"a": 2, "b": 2}
    dispatch.done(0)
    dispatch.done(2)
    dispatch.add(4)
    assert given_out(dispatch) == {4: "a"}


def test_a_machine_has_no_more_than_its_room_and_one_that_joins_finds_work():
    dispatch = dispatch_of(("a", "x", 2))
    for number in range(6):
        dispatch.add(number)
    assert given_out(dispatch) == {0: "a", 1: "a"}
    dispatch.join("b", "x", 3)
    assert given_out(dispatch) == {2: "b", 3: "b", 4: "b"}
    dispatch.done(0)
    assert given_out(dispatch) == {5: "a"}


def test_what_a_lost_machine_had_comes_first_in_the_order_in_which_it_came():
    dispatch = dispatch_of(("a", "x", 3))
    for number in range(5):
        dispatch.add(number)
    given_out(dispatch)
    assert dispatch.leave("a") == [0, 1, 2]
    assert given_out(dispatch) == {} and len(dispatch) == 5
    dispatch.join("b", "x", 4)
    assert list(given_out(dispatch)) == [0, 1, 2, 3]


def test_a_group_is_measured_on_one_machine_also_if_its_texts_come_late():
    dispatch = dispatch_of(("a", "x", 2), ("b", "x", 2))
    for number in range(4):
        dispatch.add(number, "g")
    assert given_out(dispatch) == {0: "a", 1: "a"}
    for number in range(2):
        dispatch.done(number)
    assert given_out(dispatch) == {2: "a", 3: "a"}
    dispatch.add(4, "other")
    assert given_out(dispatch) == {4: "b"}
    dispatch.add(5, "g")
    assert given_out(dispatch) == {}, "b has room, and yet the text waits for the machine of its group"
    dispatch.done(2)
    assert given_out(dispatch) == {5: "a"}


def test_a_group_without_its_machine_goes_to_one_of_the_same_kind():
    dispatch = dispatch_of(("a", "x", 3))
    for number in range(3):
        dispatch.add(number, "g")
    given_out(dispatch)
    dispatch.done(0)
    dispatch.join("b", "y", 9)
    dispatch.join("c", "x", 1)
    dispatch.leave("a")
    assert given_out(dispatch) == {1: "c"}, "b has more room, but its speeds are other ones"
    dispatch.leave("c")
    assert given_out(dispatch) == {1: "b", 2: "b"}, "there is no other of its kind"


def test_a_text_that_failed_goes_to_another_machine_if_there_is_one():
    dispatch = dispatch_of(("a", "x", 1), ("b", "x", 1))
    dispatch.add(0)
    assert given_out(dispatch) == {0: "a"}
    dispatch.again(0)
    assert given_out(dispatch) == {0: "b"}
    dispatch.leave("a")
    dispatch.again(0)
    assert given_out(dispatch) == {0: "b"}


def test_a_canceled_text_takes_no_room():
    dispatch = dispatch_of(("a", "x", 1))
    for number in range(3):
        dispatch.add(number, "g" if number else None)
    assert given_out(dispatch) == {0: "a"}
    assert dispatch.cancel(1) is None and dispatch.cancel(0) == "a" and dispatch.cancel(0) is None
    assert given_out(dispatch) == {2: "a"}
    assert len(dispatch) == 1


def test_machines_of_old_groups_are_forgotten(monkeypatch):
    monkeypatch.setattr(dispatch_module, "KEPT_GROUPS", 2)
    dispatch = dispatch_of(("a", "x", 9), ("b", "x", 9))
    for number in range(3):
        dispatch.add(number, number)
    assert given_out(dispatch) == {0: "a", 1: "b", 2: "a"}
    dispatch.add(3, 1)
    dispatch.add(4, 0)
    assert given_out(dispatch) == {3: "b", 4: "a"}
    assert len(dispatch._homes) == 2


@pytest.mark.parametrize("name, room", [("a", 1), ("b", 0)])
def test_a_machine_that_is_there_or_has_no_room_is_refused(name, room):
    with pytest.raises(ValueError, match=name):
        dispatch_of(("a", "x", 1)).join(name, "x", room)


class Anything(RuleBasedStateMachine):
    """Texts, machines, losses and cancelations in any order."""

    def __init__(self):
        super().__init__()
        self.dispatch = Dispatch()
        self.next_number = 0
        self.open = {}  # what is not done: its group
        self.at_work = {}  # what machines have: their name
        self.rooms = {}
        self.kinds = {}
        self.homes = {}  # machine of each group, as long as that machine is there
        self.seen = {}  # kind of the last machine of each group
        self.free = set()  # what has failed once is not bound to its group

    @rule(group=st.sampled_from([None, 1, 2, 3]))
    def add(self, group):
        self.dispatch.add(self.next_number, group)
        self.open[self.next_number] = group
        self.next_number += 1

    @rule(name=st.sampled_from("abcd"), kind=st.sampled_from("xy"), room=st.integers(1, 3))
    def join(self, name, kind, room):
        if name not in self.rooms:
            self.dispatch.join(name, kind, room)
            self.rooms[name], self.kinds[name] = room, kind

    @precondition(lambda self: self.rooms)
    @rule(data=st.data())
    def leave(self, data):
        name = data.draw(st.sampled_from(sorted(self.rooms)))
        had = sorted(number for number, place in self.at_work.items() if place == name)
        assert self.dispatch.leave(name) == had
        for number in had:
            del self.at_work[number]
        del self.rooms[name]
        self.homes = {group: home for group, home in self.homes.items() if home != name}

    @rule(times=st.integers(1, 5))
    def give(self, times):
        for _ in range(times):
            loads = {name: sum(place == name for place in self.at_work.values()) for name in self.rooms}
            waiting = self.open.keys() - self.at_work.keys()
            given = self.dispatch.next()
            if given is None:
                for number in waiting - self.free:
                    assert not any(loads[name] < self.rooms[name] for name in self.allowed(self.open[number]))
                return
            number, name = given
            group = self.open[number]
            assert number in waiting and loads[name] < self.rooms[name]
            if group is None and number not in self.free:
                assert loads[name] == min(load for each, load in loads.items() if load < self.rooms[each])
                assert number == min(n for n in waiting if self.open[n] is None and n not in self.free)
            elif number not in self.free:
                assert name in self.allowed(group)
                self.homes[group], self.seen[group] = name, self.kinds[name]
            self.at_work[number] = name

    def allowed(self, group):
        """The machines that a text of the group may go to: its own, or those of the same kind, or any."""
        if group in self.homes:
            return {self.homes[group]}
        return {name for name in self.rooms if self.kinds[name] == self.seen.get(group)} or set(self.rooms)

    @precondition(lambda self: self.at_work)
    @rule(data=st.data(), how=st.sampled_from(["done", "again"]))
    def end(self, data, how):
        number = data.draw(st.sampled_from(sorted(self.at_work)))
        getattr(self.dispatch, how)(number)
        del self.at_work[number]
        if how == "done":
            del self.open[number]
            self.free.discard(number)
        else:
            self.free.add(number)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data):
        number = data.draw(st.sampled_from(sorted(self.open)))
        assert self.dispatch.cancel(number) == self.at_work.pop(number, None)
        del self.open[number]
        self.free.discard(number)

    @invariant()
    def every_text_is_in_one_place(self):
        line = [number for numbers in self.dispatch._line.values() for number in numbers]
        bound = [number for machine in self.dispatch.machines.values() for number in machine.bound]
        has = [number for machine in self.dispatch.machines.values() for number in machine.at_work]
        assert sorted(line + bound + has) == sorted(self.open)
        assert {number: self.dispatch._places[number] for number in has} == self.at_work
        assert len(self.dispatch) == len(self.open) and self.dispatch.at_work == len(self.at_work)

    def teardown(self):
        """Whatever happened, one large machine gets all that is left."""
        for name in sorted(self.rooms):
            self.dispatch.leave(name)
        self.dispatch.join("last", "z", 1000)
        assert sorted(given_out(self.dispatch)) == sorted(self.open)


Anything.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestAnything = Anything.TestCase
