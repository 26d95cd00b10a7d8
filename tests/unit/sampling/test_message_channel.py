"""Messages between two processes: complete, in order, one frame per loop iteration, one end event."""

import asyncio
import socket
import threading

import pytest

from torchtune_ext.sampling.child_process import MessageChannel, pack_messages, receive_messages


def exchanged(say, chunk: int | None = None) -> tuple[list[list[object]], int]:
    """Return the received messages per frame, and the number of end events. `chunk`: bytes per read."""
    frames, ends = [], []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        receiver = MessageChannel(frames.append, lambda: ends.append(1))
        if chunk is not None:
            whole = receiver.data_received
            receiver.data_received = lambda data: [whole(data[i : i + chunk]) for i in range(0, len(data), chunk)]
        sender = MessageChannel(lambda messages: None, lambda: None)
        sender.send("before the connection")
        await loop.create_connection(lambda: receiver, sock=theirs)
        await loop.create_connection(lambda: sender, sock=ours)
        await say(sender)
        sender.close()
        while not ends:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(run(), 20))
    return frames, len(ends)


async def three_turns(sender: MessageChannel) -> None:
    for turn in range(3):
        for i in range(4):
            sender.send((turn, i, b"x" * 10_000))
        await asyncio.sleep(0.01)


def test_message_channel_one_turn_is_sent_as_frame():
    frames, ends = exchanged(three_turns)
    assert frames[0] == ["before the connection"] and ends == 1
    assert [[message[:2] for message in frame] for frame in frames[1:]] == [
        [(turn, i) for i in range(4)] for turn in range(3)
    ]


def test_message_channel_split_frames_are_reassembled():
    frames, _ = exchanged(three_turns, chunk=7)
    assert sum(frames, []) == ["before the connection"] + [(t, i, b"x" * 10_000) for t in range(3) for i in range(4)]


def test_message_channel_delivers_messages_sent_before_close():
    async def say_and_end(sender: MessageChannel) -> None:
        sender.send("last")

    frames, ends = exchanged(say_and_end)
    assert sum(frames, []) == ["before the connection", "last"] and ends == 1
    assert len(pack_messages([1])) > 8


def test_message_channel_receive_reads_exactly_one_frame():
    """The second frame has already arrived and belongs to the loop."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sent = [("first", b"x" * 300_000)]
        writer = threading.Thread(target=ours.sendall, args=(pack_messages(sent) + pack_messages(["second"]),))
        writer.start()
        assert receive_messages(theirs) == sent and receive_messages(theirs) == ["second"]
        writer.join()


@pytest.mark.parametrize("cut", [0, 5, 8, 20])
def test_message_channel_truncated_frame_raises_eof(cut):
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(pack_messages(["x" * 100])[:cut])
        with pytest.raises(EOFError, match="the other end was closed"):
            receive_messages(theirs)
