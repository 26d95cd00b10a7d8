"""Which text goes to which machine: to the one with the least work, groups to one machine, and nothing is lost."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from torchtune_ext.measured.ray_bench import Dispatch, Machine, Text


class Tried(Dispatch):
    """What the tasks of texts and machines do with it, in short words."""

    def __init__(self, *machines):
        """Each machine is (name, kind, room)."""
        super().__init__()
        self.numbered = {}
        for machine in machines:
            self.join(*machine)

    def join(self, name, kind, room):
        self.machines[name] = Machine(name, kind, room)

    def leave(self, name):
        """Takes out a machine, and returns the numbers of the texts that it had."""
        machine = self.machines.pop(name)
        lost = [number for number, text in self.numbered.items() if text.machine is machine]
        for number in lost:
            self.numbered[number].machine = None
        return lost

    def add(self, number, group=None):
        self.numbered[number] = Text(group)
        self.texts.append(self.numbered[number])

    def done(self, number):
        self.texts.remove(self.numbered.pop(number))

    def again(self, number):
        text = self.numbered[number]
        text.failed_at, text.machine = text.machine.name, None

    def given_out(self):
        """Gives out all that can be given out: the machine of each text."""
        given = {}
        while (text := self.next()) is not None:
            given[self.number(text)] = text.machine.name
        return given

    def number(self, text):
        return next(number for number, each in self.numbered.items() if each is text)


def test_a_machine_has_no_more_than_its_room_and_one_that_joins_finds_work():
    dispatch = Tried(("a", "x", 2))
    for number in range(6):
        dispatch.add(number)
    assert dispatch.given_out() == {0: "a", 1: "a"}
    dispatch.join("b", "x", 3)
    assert dispatch.given_out() == {2: "b", 3: "b", 4: "b"}
    dispatch.done(0)
    assert dispatch.given_out() == {5: "a"}


def test_a_machine_with_a_fault_gets_nothing_more():
    dispatch = Tried(("a", "x", 3))
    dispatch.add(0)
    dispatch.machines["a"].fault = "its Bench is closed"
    assert dispatch.given_out() == {}


def test_a_group_is_measured_on_one_machine_also_if_its_texts_come_late():
    dispatch = Tried(("a", "x", 2), ("b", "x", 2))
    for number in range(4):
        dispatch.add(number, "g")
    assert dispatch.given_out() == {0: "a", 1: "a"}
    for number in range(2):
        dispatch.done(number)
    assert dispatch.given_out() == {2: "a", 3: "a"}
    dispatch.add(4, "other")
    assert dispatch.given_out() == {4: "b"}
    dispatch.add(5, "g")
    assert dispatch.given_out() == {}, "b has room, and yet the text waits for the machine of its group"
    dispatch.done(2)
    assert dispatch.given_out() == {5: "a"}


def test_a_text_that_failed_goes_to_another_machine_if_there_is_one():
    dispatch = Tried(("a", "x", 1), ("b", "x", 1))
    dispatch.add(0)
    assert dispatch.given_out() == {0: "a"}
    dispatch.again(0)
    assert dispatch.given_out() == {0: "b"}
    dispatch.leave("a")
    dispatch.again(0)
    assert dispatch.given_out() == {0: "b"}


class Anything(RuleBasedStateMachine):
    """Texts, machines, losses and cancelations in any order."""

    def __init__(self):
        super().__init__()
        self.dispatch = Tried()
        self.next_number = 0
        self.open = {}  # what is not done: its group
        self.at_work = {}  # what machines have: their name
        self.rooms = {}
        self.kinds = {}
        self.homes = {}  # machine of each group
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

    @rule(times=st.integers(1, 5))
    def give(self, times):
        for _ in range(times):
            loads = {name: sum(place == name for place in self.at_work.values()) for name in self.rooms}
            waiting = self.open.keys() - self.at_work.keys()
            text = self.dispatch.next()
            if text is None:
                for number in waiting - self.free:
                    assert not any(loads[name] < self.rooms[name] for name in self.allowed(self.open[number]))
                return
            number, name = self.dispatch.number(text), text.machine.name
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
        if self.homes.get(group) in self.rooms:
            return {self.homes[group]}
        return {name for name in self.rooms if self.kinds[name] == self.seen.get(group)} or set(self.rooms)

    @precondition(lambda self: self.at_work)
    @rule(data=st.data())
    def fail(self, data):
        number = data.draw(st.sampled_from(sorted(self.at_work)))
        self.dispatch.again(number)
        del self.at_work[number]
        self.free.add(number)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data):
        """It is measured, or canceled."""
        number = data.draw(st.sampled_from(sorted(self.open)))
        self.dispatch.done(number)
        self.at_work.pop(number, None)
        del self.open[number]
        self.free.discard(number)

    @invariant()
    def every_text_is_in_one_place(self):
        texts = self.dispatch.numbered
        assert texts.keys() == self.open.keys() and [*texts.values()] == self.dispatch.texts
        placed = {number: text.machine.name for number, text in texts.items() if text.machine is not None}
        assert placed == self.at_work

    def teardown(self):
        """Whatever happened, one large machine gets all that is left."""
        for name in sorted(self.rooms):
            self.dispatch.leave(name)
        self.dispatch.join("last", "z", 1000)
        assert sorted(self.dispatch.given_out()) == sorted(self.open)


Anything.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestAnything = Anything.TestCase
