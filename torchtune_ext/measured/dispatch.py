"""Decides which text goes to which machine. It knows nothing of Ray, processes or time."""

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from torchtune_ext.run.errors import Mistake

KEPT_GROUPS = 10_000  # groups whose machine is remembered, since their texts may come minutes apart


@dataclass(slots=True)
class Machine:
    """One machine that measures."""

    name: str
    kind: str  # its fingerprint: speeds of machines of one kind may be compared
    room: int  # texts that it may have at a time
    at_work: set[int] = field(default_factory=set)  # numbers of the texts that it has
    bound: deque[int] = field(default_factory=deque)  # numbers that wait for it: their group is measured there


class Dispatch:
    """Gives each text to the machine with the least work at that moment, and all texts of a group to one machine.

    Texts wait in one line, and a machine has only a few at a time, so one that joins finds work and one that leaves takes
    little with it. A group is bound to a machine when its first text goes out. If that machine leaves, what is not done goes
    to another one together: one of the same kind if there is any.

    Texts are known by numbers, which grow in the order in which they came.
    """

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        self._line: OrderedDict[Hashable, deque[int]] = OrderedDict()  # what waits for any machine, by key
        self._keys: dict[int, Hashable] = {}  # the key of each text that is not done: its group, or itself
        self._places: dict[int, str] = {}  # the machine of each text that is at work
        # (name, kind) of the machine of a group; no name once it has left
        self._homes: OrderedDict[Hashable, tuple[str | None, str]] = OrderedDict()
        self._avoided: dict[int, str] = {}  # the machine that could not measure a text

    def __len__(self) -> int:
        """Returns how many texts are not done."""
        return len(self._keys)

    @property
    def at_work(self) -> int:
        """How many texts machines have."""
        return len(self._places)

    def add(self, number: int, group: Hashable = None) -> None:
        """Puts a text at the end of the line."""
        key = ("alone", number) if group is None else ("group", group)
        self._keys[number] = key
        home = self._homes.get(key)
        if home is not None and home[0] is not None:
            self.machines[home[0]].bound.append(number)
        else:
            self._line.setdefault(key, deque()).append(number)

    def join(self, name: str, kind: str, room: int) -> None:
        """Takes in a machine."""
        if name in self.machines or room < 1:
            raise Mistake(f"machine {name!r} is there already, or has no room ({room})")
        self.machines[name] = Machine(name, kind, room)

    def leave(self, name: str) -> list[int]:
        """Takes out a machine. What it had goes to the front of the line. Returns the numbers that it had at work."""
        machine = self.machines.pop(name)
        lost = sorted(machine.at_work)
        for number in lost:
            del self._places[number]
        for key, (home, kind) in self._homes.items():
            if home == name:
                self._homes[key] = (None, kind)
        self._put_back([*lost, *machine.bound])
        return lost

    def next(self) -> tuple[int, str] | None:
        """Gives out a text: returns its number and the name of its machine, or None if nothing can be given out now."""
        free = [machine for machine in self.machines.values() if len(machine.at_work) < machine.room]
        for machine in sorted(free, key=lambda each: len(each.at_work)):
            if not machine.bound:
                key = next((key for key in self._line if self._may_go(key, machine)), None)
                if key is None:
                    continue
                machine.bound = self._line.pop(key)
                self._remember(key, machine)
            number = machine.bound.popleft()
            machine.at_work.add(number)
            self._places[number] = machine.name
            return number, machine.name
        return None

    def done(self, number: int) -> None:
        """Forgets a text that a machine has measured."""
        self.machines[self._places.pop(number)].at_work.discard(number)
        self._forget(number)

    def again(self, number: int) -> None:
        """Puts a text back that its machine could not measure. It goes to another one if there is any, without its group."""
        name = self._places.pop(number)
        self.machines[name].at_work.discard(number)
        self._avoided[number] = name
        key = ("alone", number)
        self._homes[key] = (None, self.machines[name].kind)
        self._keys[number] = key
        self._put_back([number])

    def cancel(self, number: int) -> str | None:
        """Forgets a text. Returns the machine that has it, which may still be told, or None."""
        if number not in self._keys:
            return None
        if (name := self._places.pop(number, None)) is not None:
            self.machines[name].at_work.discard(number)
        else:
            self._withdraw(number)
        self._forget(number)
        return name

    def _withdraw(self, number: int) -> None:
        """Takes a text out of the line, or from those that wait for their machine."""
        waiting = self._line.get(self._keys[number])
        if waiting is not None and number in waiting:
            waiting.remove(number)
            if not waiting:
                del self._line[self._keys[number]]
            return
        for machine in self.machines.values():
            if number in machine.bound:
                machine.bound.remove(number)
                return

    def _forget(self, number: int) -> None:
        del self._keys[number]
        self._avoided.pop(number, None)
        self._homes.pop(("alone", number), None)

    def _put_back(self, numbers: Iterable[int]) -> None:
        """Puts texts back into the line, where those come first that came first."""
        for number in numbers:
            self._line.setdefault(self._keys[number], deque()).append(number)
        in_order = {key: deque(sorted(waiting)) for key, waiting in self._line.items()}
        self._line = OrderedDict(sorted(in_order.items(), key=lambda item: item[1][0]))

    def _remember(self, key: Hashable, machine: Machine) -> None:
        """Notes where a group is measured. Without a group there is nothing to compare a text with."""
        if key[0] == "group":
            self._homes[key] = (machine.name, machine.kind)
            self._homes.move_to_end(key)
            if len(self._homes) > KEPT_GROUPS:
                self._homes.popitem(last=False)

    def _may_go(self, key: Hashable, machine: Machine) -> bool:
        """Tells whether the first texts of a key may go to this machine."""
        home = self._homes.get(key)
        return home is None or machine in self._best(self._line[key][0], home[1])

    def _best(self, number: int, kind: str) -> list[Machine]:
        """The machines for a text that has been on another one: not that one again, and of the same kind, if possible."""
        there = list(self.machines.values())
        others = [machine for machine in there if machine.name != self._avoided.get(number)] or there
        return [machine for machine in others if machine.kind == kind] or others
