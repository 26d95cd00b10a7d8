"""What a run asks of a cluster, as the bundles of one placement group. Ray alone decides where they go.

A bundle is what has to be on one machine. All of them are in one group, which Ray places as a whole or not at all: two groups
of two runs could each wait for what the other one has.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# By what each rank and each server computes: Ray's name of it, and ours for several of them.
KINDS = {"gpus": ("GPU", "GPUs"), "cpus": ("CPU", "cores")}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a run asks for."""

    kind: str  # "gpus" or "cpus"
    ranks: int  # of the trainer, each with one GPU or core
    servers: int
    each: int = 1  # GPUs or cores of a server
    # whether the servers have to be on the machine of rank 0: their weights travel through its memory
    beside: bool = True

    @property
    def resource(self) -> str:
        """Ray's name of what is asked for."""
        return KINDS[self.kind][0]

    def words(self) -> str:
        """Returns the words of the command that ask for this."""
        return f"--train-{self.kind} {self.ranks} --engine-{self.kind} {self.servers * self.each}"


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of the cluster."""

    name: str  # Ray's, which is another one when the machine comes back
    address: str
    total: int  # what it has of what is asked for


@dataclass(frozen=True, slots=True)
class Layout:
    """The bundles of a run."""

    amounts: tuple[int, ...]  # of each bundle
    machines: int  # the trainer's; the bundle of machine i is bundle i
    ranks: int  # on each of these

    def bundle_of_server(self, number: int) -> int:
        """Returns which bundle the server with this number, from 0, is in."""
        return min(self.machines + number, len(self.amounts) - 1) if len(self.amounts) > self.machines else 0


def layout(asked: Asked, there: Sequence[Machine]) -> Layout:
    """Lays the trainer out on as few machines as hold it, with equally many ranks on each.

    Where no number of machines does, the layout is one for a single machine: `why_never` says what is missing.
    """
    beside = asked.servers * asked.each if asked.beside else 0
    largest = max((machine.total for machine in there), default=0)
    for machines in range(1, asked.ranks + 1):
        if asked.ranks % machines == 0 and asked.ranks // machines + beside <= largest and machines <= len(there):
            break
    else:
        machines = 1
    ranks = asked.ranks // machines
    servers = () if asked.beside else (asked.each,) * asked.servers
    return Layout((ranks + beside, *(ranks,) * (machines - 1), *servers), machines, ranks)


def there_is(asked: Asked, there: Sequence[Machine]) -> str:
    """Returns what the cluster has: "12 GPUs on 2 machines (10.0.0.1: 8, 10.0.0.2: 4)"."""
    having = sorted((machine for machine in there if machine.total), key=lambda machine: -machine.total)
    what = KINDS[asked.kind][1]
    if not having:
        return f"no {what} on its {_machines(len(there))}"
    each = ", ".join(f"{machine.address}: {machine.total}" for machine in having[:8]) + (", ..." * (len(having) > 8))
    total = sum(machine.total for machine in having)
    return f"{total} {what if total > 1 else what[:-1]} on {_machines(len(having))} ({each})"


def why_never(asked: Asked, made: Layout, there: Sequence[Machine]) -> str | None:
    """Returns why the cluster can never hold the bundles, whoever else uses it, or None where it may be able to."""
    what = KINDS[asked.kind][1]
    if sum(made.amounts) > sum(machine.total for machine in there):
        return f"{sum(made.amounts)} {what} are asked for"
    if max(made.amounts) <= max(machine.total for machine in there):
        return None
    if not asked.beside:
        return f"{max(made.amounts)} of the {what} have to be on one machine"
    return (
        f"{max(made.amounts)} of the {what} have to be on one machine: the trainer's {made.ranks} and beside them the servers' "
        f"{made.amounts[0] - made.ranks}, since the weights travel through the memory of that machine"
    )


def _machines(count: int) -> str:
    return "1 machine" if count == 1 else f"{count} machines"
