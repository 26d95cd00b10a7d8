"""What a run asks of a cluster, as the bundles of one placement group. Only Ray decides where they go.

A bundle is what has to be on one machine. All of them are in one group, which Ray places as a whole or not at all: two groups
of two runs could each wait for what the other one has.
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
    # Where the servers are: "beside" rank 0, through whose memory the weights then travel; "anywhere"; or "auto", which is
    # beside it if the trainer needs no further machine for that.
    where: str = "auto"

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

    amounts: tuple[int, ...]  # GPUs or cores of each bundle
    machines: int  # the trainer's; the bundle of machine i is bundle i
    ranks: int  # on each of these
    servers: tuple[int, ...]  # the bundle of each server: the first one, or one of its own


def layout(request: Request, there: Sequence[Machine]) -> Layout:
    """Lays the trainer out on as few machines as hold it, equally many ranks on each, and the servers where `request` says.

    If the machines can hold no layout, this is one whose largest bundle fits a machine, if there is one: the cluster may
    grow, and `why_never` says what is missing.
    """
    beside = {"beside": [True], "anywhere": [False], "auto": [True, False]}[request.where]
    candidates = [_on(request, m, at) for m in range(1, request.ranks + 1) if request.ranks % m == 0 for at in beside]
    largest = max((machine.total for machine in there), default=0)
    fitting = next((bundles for bundles in candidates if holds(bundles, there)), None)
    return fitting or next((bundles for bundles in candidates if max(bundles.amounts) <= largest), candidates[0])


def _on(request: Request, machines: int, beside: bool) -> Layout:
    amounts = [request.ranks // machines] * machines
    if beside:
        amounts[0] += request.servers * request.each
        servers = [0] * request.servers
    else:
        amounts += [request.each] * request.servers
        servers = range(machines, len(amounts))
    return Layout(tuple(amounts), machines, request.ranks // machines, tuple(servers))


def holds(bundles: Layout, there: Sequence[Machine]) -> bool:
    """Returns whether the machines, once they are free, can hold all bundles, the trainer's on different machines."""
    first, share, server = bundles.amounts[0], bundles.ranks, bundles.amounts[-1]
    servers = len(bundles.amounts) - bundles.machines
    totals = [machine.total for machine in there]
    # Machines of the same size are as good as each other for the first bundle.
    for place in {total: i for i, total in enumerate(totals) if total >= first}.values():
        others = totals[:place] + totals[place + 1 :]
        room = (totals[place] - first) // server + sum(total // server for total in others)
        # The other ranks go where they take the place of the fewest servers.
        taken = sorted(total // server - (total - share) // server for total in others if total >= share)
        shares = bundles.machines - 1
        if len(taken) >= shares and room - sum(taken[:shares]) >= servers:
            return True
    return False


def there_is(request: Request, there: Sequence[Machine]) -> str:
    """Returns what the cluster has: "12 GPUs on 2 machines (10.0.0.1: 8, 10.0.0.2: 4)"."""
    having = sorted((machine for machine in there if machine.total), key=lambda machine: -machine.total)
    what = KINDS[request.kind][1]
    if not having:
        return f"no {what} on its {_machines(len(there))}"
    each = ", ".join(f"{machine.address}: {machine.total}" for machine in having[:8]) + (", ..." * (len(having) > 8))
    total = sum(machine.total for machine in having)
    return f"{total} {what if total > 1 else what[:-1]} on {_machines(len(having))} ({each})"


def why_never(request: Request, bundles: Layout, there: Sequence[Machine]) -> str | None:
    """Returns why the cluster cannot hold the bundles even when it is free, or None if it may be able to."""
    what = KINDS[request.kind][1]
    if holds(bundles, there):
        return None
    if sum(bundles.amounts) > sum(machine.total for machine in there):
        return f"{sum(bundles.amounts)} {what} are asked for"
    largest = max(bundles.amounts)
    if largest <= max(machine.total for machine in there):
        parts = ", ".join(map(str, bundles.amounts))
        return (
            f"no place for parts of {parts} {what}: each has to be on one machine, and the trainer's, equally many ranks in "
            "each, on different ones"
        )
    if bundles.servers[0] > 0:
        return f"{largest} of the {what} have to be on one machine"
    return (
        f"{largest} of the {what} have to be on one machine: the trainer's {bundles.ranks} and beside them the servers' "
        f"{largest - bundles.ranks}, since with --servers {request.where} the weights travel through the memory of that machine"
    )


def _machines(count: int) -> str:
    return "1 machine" if count == 1 else f"{count} machines"
