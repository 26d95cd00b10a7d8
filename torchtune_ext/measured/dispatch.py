"""Decides which text goes to which machine. It knows nothing of Ray, processes or time."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

KEPT_GROUPS = 10_000  # groups whose machine is remembered, since their texts may come minutes apart


@dataclass(eq=False, slots=True)
class Machine:
    """A machine that measures, as long as its actor lives."""

    name: str
    kind: str  # its fingerprint: speeds of machines of one kind may be compared
    room: int  # texts that it may have at a time
    title: str = ""  # for people
    fault: str = ""  # why it gets nothing more


@dataclass(eq=False, slots=True)
class Text:
    """A text that is not done."""

    group: Hashable = None  # texts of one group are measured on one machine; None: it has none
    machine: Machine | None = None  # the one that has it; None: it waits
    placed: asyncio.Event = field(default_factory=asyncio.Event)  # a machine has it
    failed_at: str = ""  # the machine that could not measure it


class Dispatch:
    """Gives each text to the machine with the least work at that moment, and all texts of a group to one machine.

    A machine has only a few texts at a time, so one that joins finds work and one that is lost takes little with it. A group is
    bound to a machine when its first text goes out. If that machine is lost, what is not done goes to another one together: one
    of the same kind if there is any. A text that failed goes to another machine, without its group.
    """

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}  # by name
        self.texts: list[Text] = []  # all that are not done, in the order in which they came
        self._homes: OrderedDict[Hashable, Machine] = OrderedDict()  # the machine of each group, also when it is lost

    def next(self) -> Text | None:
        """Gives out a text, whose `machine` is then the one that gets it; None: nothing can be given out now."""
        loads = Counter(text.machine for text in self.texts)
        free = [each for each in self.machines.values() if loads[each] < each.room and not each.fault]
        for text in self.texts if free else ():
            if text.machine is None and (possible := [each for each in self._possible(text) if each in free]):
                text.machine = min(possible, key=lambda each: loads[each])
                if text.group is not None and not text.failed_at:
                    self._homes[text.group] = text.machine
                    self._homes.move_to_end(text.group)
                    if len(self._homes) > KEPT_GROUPS:
                        self._homes.popitem(last=False)
                return text
        return None

    def _possible(self, text: Text) -> list[Machine]:
        """The machines that a text may go to."""
        home = self._homes.get(text.group)
        if home is not None and home.name in self.machines and not text.failed_at:
            return [self.machines[home.name]]
        others = [each for each in self.machines.values() if each.name != text.failed_at] or [*self.machines.values()]
        return [each for each in others if home is not None and each.kind == home.kind] or others
