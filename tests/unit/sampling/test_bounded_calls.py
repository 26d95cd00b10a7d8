"""Engine calls with deadlines: timeouts, and errors of calls that were given up."""

import asyncio

import pytest

pytest.importorskip("torch")

from torchtune_ext.sampling.backend import BackendCrashed, call_with_deadline

pytestmark = pytest.mark.timeout(60)


class Answer:
    is_dead = False

    def describe_exit(self):
        return "the engine's process was killed by SIGKILL"


def test_call_with_deadline_ends_at_deadline_or_crash():
    async def slow(seconds):
        await asyncio.sleep(seconds)
        return "done"

    async def scenario():
        assert await call_with_deadline(Answer(), slow(0.15), 10, "slow") == "done"
        with pytest.raises(BackendCrashed, match="did not answer slow within 0.03 s"):
            await call_with_deadline(Answer(), slow(60), 0.03, "slow")
        dead = Answer()
        dead.is_dead = True
        with pytest.raises(BackendCrashed, match="killed by SIGKILL during slow"):
            await call_with_deadline(dead, slow(60), 0.5, "slow")

    asyncio.run(scenario())


@pytest.mark.parametrize("way", ["cancelled", "too late"])
def test_call_with_deadline_abandoned_error_is_retrieved(way, complaints):
    """A caller that gives up a call has reported why, so a later error of the call is not reported."""

    async def refused():
        try:
            await asyncio.sleep(60)
        finally:
            raise RuntimeError("Session is closed")

    async def scenario():
        call = asyncio.create_task(call_with_deadline(Answer(), refused(), 60 if way == "cancelled" else 0.02, "ping"))
        await asyncio.sleep(0.01)
        if way == "cancelled":
            call.cancel()
        with pytest.raises(asyncio.CancelledError if way == "cancelled" else BackendCrashed):
            await call

    asyncio.run(scenario())
    assert not complaints()
