"""What an engine is good for at the moment, and how it may change: a table of states, without a clock and without I/O."""

from collections.abc import Callable
from enum import Enum

from torchtune_ext.sampling.calls import CoreLost


class State(Enum):
    """What an engine is good for at the moment."""

    RESTARTING = "restarting"
    STALE = "stale"
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"
    RETIRED = "retired"


# Where each state may lead.
NEXT = {
    State.RESTARTING: {State.STALE, State.DEAD, State.RETIRED},
    State.STALE: {State.HEALTHY, State.DEAD, State.RETIRED},
    State.HEALTHY: {State.SUSPECT, State.STALE, State.DEAD, State.RETIRED},
    State.SUSPECT: {State.HEALTHY, State.STALE, State.DEAD, State.RETIRED},
    State.DEAD: {State.RESTARTING, State.RETIRED},
    State.RETIRED: set(),
}


class Health:
    """The state of one engine, and the only way back to work for one that was lost. It has no clock and no I/O: its lane
    tells it what has happened.

        restarting   a life comes up; the first one, too
        stale        it answers, but nobody has proven yet that it holds the current weights: it gets no requests
        healthy      it samples
        suspect      it has been silent for longer than it should; it still samples, but others get the new groups
        dead         its life is over
        retired      it failed too often and is not started again; the cause is kept

    Only `confirm` leads from stale to healthy, and it wants two things of the engine: the version of the last completed
    publication, and that every tensor is the one that was sent. (Before the first publication, the current weights are those
    of the disk, which each life reads by itself.) An engine that merely answers may hold weights of long ago, and nobody would
    see it in the samples.
    """

    def __init__(self):
        self.state = State.RESTARTING
        self.cause = ""  # of the last change for the worse
        self._behind = False  # stale since others have newer weights, and not since it comes up
        self.on_change: Callable[[], None] = lambda: None  # called after each change

    @property
    def serves(self) -> bool:
        """Whether it may be given requests."""
        return self.state in (State.HEALTHY, State.SUSPECT)

    @property
    def up(self) -> bool:
        """Whether there is a life that can load weights when it is told to. One that comes up does so by itself."""
        return self.serves or self._behind

    def become(self, state: State, cause: str = "") -> None:
        """Notes a change; one that the table does not have from here changes nothing. Args: cause: of one for the worse."""
        assert state is not State.HEALTHY, "an engine becomes healthy only by `confirm` and `clear`"
        self._go(state, cause)

    def outdate(self, cause: str) -> None:
        """Notes that others have newer weights than an engine that serves."""
        if self.serves:
            self._go(State.STALE, cause)
            self._behind = True

    def clear(self) -> None:
        """Notes that a suspect engine works."""
        if self.state is State.SUSPECT:
            self._go(State.HEALTHY)

    def confirm(self, version: int, published: int, wrong: str | None) -> None:
        """Takes the proof that the engine holds the current weights. Without it nothing changes.

        Args: version: which the engine holds; published: that of the last completed publication; wrong: what of its tensors is
        not what was sent; None: all are. Raises CoreLost when it holds others.
        """
        if version != published:
            raise CoreLost(f"it holds version {version}, and version {published} is published")
        if wrong is not None:
            raise CoreLost(f"it does not hold the weights of version {version} as they were published: {wrong}")
        self._go(State.HEALTHY)

    def _go(self, state: State, cause: str = "") -> None:
        if state in NEXT[self.state]:
            self.state, self.cause, self._behind = state, cause or self.cause, False
            self.on_change()
