"""What a run asks of a cluster, as the bundles of one placement group. Only Ray decides where they go.

A bundle is what has to be on one machine: the trainer's ranks of one machine, or a server. All of them are in one group, which
Ray places as a whole or not at all: two groups of two runs could each wait for what the other one has.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# By what each rank and each server computes: Ray's name of it, and ours for several of them.
KINDS = {"gpus": ("GPU", "GPUs"), "cpus": ("CPU", "cores")}


@dataclass(frozen=True, slots=True)
class Request:
    """What a run asks for."""

    kind: str  # "gpus" or "cpus"
    ranks: int  # of the trainer, each with one GPU or core
    servers: int
    each: int = 1  # GPUs or cores of a server

    @property
    def resource(self) -> str:
        """Ray's name of what is asked for."""
        return KINDS[self.kind][0]

    def machines(self, largest: int) -> int:
        """Returns on how many machines the trainer is, equally many ranks on each: on as few as hold it. Args: largest: what
        the largest machine has of what is asked for. Where no machine has any, the trainer waits for one that holds it."""
        counts = (count for count in range(1, self.ranks + 1) if self.ranks % count == 0)
        return next((count for count in counts if self.ranks // count <= largest), 1)

    def bundles(self, machines: int) -> list[int]:
        """Returns the GPUs or cores of each bundle: the trainer's on each of its machines, and then each server's."""
        return [self.ranks // machines] * machines + [self.each] * self.servers

    def words(self) -> str:
        """Returns the words of the command that ask for this."""
        return f"--train-{self.kind} {self.ranks} --engine-{self.kind} {self.servers * self.each}"


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of the cluster."""

    name: str  # Ray's, which is another one when the machine comes back
    address: str
    total: int  # what it has of what is asked for


def there_is(request: Request, there: Sequence[Machine]) -> str:
    """Returns what the cluster has: "12 GPUs on 2 machines (10.0.0.1: 8, 10.0.0.2: 4)"."""
    having = sorted((machine for machine in there if machine.total), key=lambda machine: -machine.total)
    each = ", ".join(f"{machine.address}: {machine.total}" for machine in having)
    total, count = sum(machine.total for machine in having), len(having)
    return f"{total} {KINDS[request.kind][1]} on {count} machine{'s' * (count != 1)}" + (f" ({each})" if each else "")
