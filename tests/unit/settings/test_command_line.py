"""The exit status of `tune run` under torchrun. Invalid arguments: tests/mistakes."""

import signal

import pytest

from torchtune_ext.settings.command_line import shorten_rank_failures


def test_torchrun_exit_status_is_first_failed_rank(tmp_path, capsys):
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    def failure(rank, exitcode, later=0):
        failed = ProcessFailure(local_rank=rank, pid=1, exitcode=exitcode, error_file=str(tmp_path / "none"))
        failed.timestamp += later
        return failed

    for error, status, message in (
        (ChildFailedError("grpo.py", {1: failure(1, -15), 0: failure(0, 2)}), 2, ""),
        (ChildFailedError("grpo.py", {1: failure(1, -15), 3: failure(3, 1)}), 1, "rank 3 ended with exit code 1"),
        (
            ChildFailedError("grpo.py", {0: failure(0, 1), 1: failure(1, -9)}),
            137,
            "rank 1 was killed by SIGKILL, perhaps by the kernel's out-of-memory killer (see dmesg)",
        ),
        (
            # Rank 0 was stopped, so torchrun killed it.
            ChildFailedError("grpo.py", {0: failure(0, -9, 30), 1: failure(1, 1)}),
            1,
            "rank 1 ended with exit code 1",
        ),
        (SignalException("stopped", signal.SIGTERM), 143, ""),
        (SignalException("stopped", signal.SIGINT), 130, ""),
    ):
        with pytest.raises(SystemExit) as left, shorten_rank_failures():
            raise error
        assert left.value.code == status
        printed = capsys.readouterr().err
        assert printed.startswith(message) and bool(printed) == bool(message)
    with pytest.raises(KeyError), shorten_rank_failures():
        raise KeyError("a bug")
