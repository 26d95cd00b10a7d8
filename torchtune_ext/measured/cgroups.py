"""Groups of processes (cgroups) whose memory and number the kernel limits together, and which are killed as one.

Limits of a process (sandbox.c) bound each process for itself; a group bounds what a compiler and the programs that it starts
use together. A new session does not leave it, nor does it end with a harness that is killed: the next start finds it and
ends who is in it. It is a layer for machines that allow it, and not of the floor.

A sandbox has a group of its own in each hierarchy that it needs, which it owns (owned.py), and in that one for each child.
Version 2 has one hierarchy for all; in version 1 memory and pids have one each.
"""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtune_ext.measured.owned import Owned

PREFIX = "torchtune-ext-programs-"
# First the one whose limit keeps members from starting others, since each hierarchy is emptied on its own in version 1.
CONTROLLERS = ("pids", "memory")
END_S = 5.0  # seconds until killed processes have left their group
_RETRY_S = 0.5e-3


@dataclass(frozen=True, slots=True)
class Place:
    """Where groups can be made."""

    folder: Path
    version: int
    controllers: tuple[str, ...]

    @property
    def joined_by(self) -> str:
        """The file whose writer becomes a member. A process that moves itself by `tasks` needs no lock of the whole machine."""
        return "tasks" if self.version == 1 else "cgroup.procs"


@dataclass(frozen=True, slots=True)
class Group:
    """The group of one child: a folder in each hierarchy, or none where groups cannot be made."""

    places: tuple[tuple[Place, Path], ...] = ()

    @property
    def files(self) -> list[str]:
        """The files to which a process writes "0" to become a member."""
        return [str(folder / place.joined_by) for place, folder in self.places]

    def close(self) -> None:
        """Kills all members and removes the group. What does not end in time is left to the next start."""
        for _, folder in self.places:
            _remove(folder)


NO_GROUP = Group()


class Cgroups:
    """The groups of one sandbox. Those that a killed harness has left behind are emptied and removed first.

    Args:
        places: where groups can be made (see `find`); none: groups without any effect.

    Raises:
        OSError: they cannot be made there.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self._number = 0
        self._own: list[tuple[Place, Owned]] = []
        try:
            for place in places:
                self._own.append((place, Owned(place.folder, PREFIX, _remove)))
                if place.version == 2:
                    words = " ".join(f"+{name}" for name in place.controllers)
                    (self._own[-1][1].path / "cgroup.subtree_control").write_text(words)
        except BaseException:
            self.close()
            raise

    def new(self, memory_bytes: int, processes: int) -> Group:
        """Makes a group whose members together may use `memory_bytes`, and be `processes` processes and threads.

        Raises:
            OSError: it cannot be made.
        """
        self._number += 1
        folders: list[tuple[Place, Path]] = []
        try:
            # Two threads may come with the same number, and two processes after a fork.
            name = f"{os.getpid()}-{self._number}-{time.monotonic_ns()}"
            for place, own in self._own:
                folder = own.path / name
                folder.mkdir(mode=0o755)
                folders.append((place, folder))
                for file, value in _limits(place, memory_bytes, processes):
                    if (folder / file).exists():
                        (folder / file).write_text(str(value))
        except BaseException:
            Group(tuple(folders)).close()
            raise
        return Group(tuple(folders))

    def close(self) -> None:
        """Removes all groups, and kills who is still in them."""
        for _, own in self._own:
            own.close()
        self._own = []


def find() -> tuple[Place, ...]:
    """Finds where this process may make groups for its children: of version 2, or of version 1 with what there is of it.

    A group of version 2 that has processes cannot have groups with limits, so there the new ones stand beside our own, if its
    owner has turned both controllers on for all below, and no limit of our own group would be evaded by that.
    """
    try:
        mounts, memberships = Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text()
    except OSError:
        return ()
    return find_in(mounts, memberships)


def find_in(mounts: str, memberships: str) -> tuple[Place, ...]:
    """The same, from the content of /proc/self/mountinfo and /proc/self/cgroup (proc_pid_mountinfo(5), cgroups(7))."""
    first: list[Place] = []
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        (root, point), (kind, _, options) = before.split()[3:5], after.split()[:3]
        for membership in memberships.splitlines():
            number, names, path = membership.split(":", 2)
            if kind == "cgroup2" and number == "0":
                own = _below(Path(point), root, path)
                if own is not None and (folder := _roomy(own, Path(point))) is not None:
                    return (Place(folder, 2, CONTROLLERS),)
            elif kind == "cgroup" and number != "0" and set(names.split(",")) & set(options.split(",")):
                own = _below(Path(point), root, path)
                ours = tuple(name for name in CONTROLLERS if name in names.split(","))
                if own is not None and ours and os.access(own, os.W_OK):
                    first.append(Place(own, 1, ours))
    places = {place.folder: place for place in first}.values()
    return tuple(sorted(places, key=lambda place: CONTROLLERS.index(place.controllers[0])))


def _below(point: Path, root: str, path: str) -> Path | None:
    """The folder of a group, where its hierarchy is mounted at `point` from `root` on."""
    if ".." in path or not Path(path).is_relative_to(root):
        return None
    return point / Path(path).relative_to(root)


def _roomy(own: Path, point: Path) -> Path | None:
    """The folder in which groups of version 2 with limits can be made and joined from `own`: itself, or the one above."""
    above = [own.parent] if own != point and _read(own / "memory.max") in ("", "max") else []
    for folder in [own, *above]:
        enabled = _read(folder / "cgroup.subtree_control").split()
        # To move a process takes the right to write to the group above both.
        if set(CONTROLLERS) <= set(enabled) and all(os.access(p, os.W_OK) for p in (folder, folder / "cgroup.procs")):
            return folder
    return None


def _limits(place: Place, memory_bytes: int, processes: int) -> Iterator[tuple[str, str | int]]:
    """Yields the files of a group and what is written to them. One that a kernel lacks is left out, as those of swap."""
    if "memory" in place.controllers and place.version == 1:
        yield from (("memory.limit_in_bytes", memory_bytes), ("memory.memsw.limit_in_bytes", memory_bytes))
    elif "memory" in place.controllers:
        yield from (("memory.max", memory_bytes), ("memory.swap.max", 0), ("memory.oom.group", 1))
    if "pids" in place.controllers:
        yield "pids.max", processes


def _kill(folder: Path) -> None:
    """Kills the members of a group."""
    if _write(folder / "cgroup.kill", "1"):
        return
    # Version 1, or Linux before 5.14. Without the limit a program could start processes faster than we read their numbers.
    _write(folder / "pids.max", "0")
    end = time.monotonic() + END_S
    while (members := _read(folder / "cgroup.procs").split()) and time.monotonic() < end:
        for member in members:
            try:
                os.kill(int(member), signal.SIGKILL)
            except ProcessLookupError:
                continue  # it has ended
        time.sleep(_RETRY_S)


def _remove(folder: Path) -> None:
    """Kills the members of a group and of those in it, and removes them all."""
    try:
        inside = [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return  # it is gone
    for each in inside:
        _remove(each)
    _kill(folder)
    end = time.monotonic() + END_S
    while True:
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            # A process that is dead is a member until somebody has waited for it.
            if time.monotonic() > end:
                return
        time.sleep(_RETRY_S)


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _write(file: Path, text: str) -> bool:
    try:
        file.write_text(text)
    except OSError:
        return False
    return True
