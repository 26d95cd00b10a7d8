"""The actor of Ray that runs one command on a machine of the cluster: the trainer's, or that of a server.

The class travels to the machine by value, and looks for torchtune_ext only there. So a machine that has another version, or
none, can say so. That is why all imports of ours stand in the methods.
"""

import os
import socket
import subprocess
import sys
import threading
import time

SILENT_S = 300.0  # seconds without a question of the driver after which it counts as gone
KEPT = 4 << 20  # bytes of output that wait for the driver; then the command waits, as in front of any full pipe
RAYS_OWN = ("RAY_", "OMP_NUM_THREADS")  # variables that Ray sets for its workers, and not for commands of theirs


class Keeper:
    """Runs one command under a guard. Its methods return what went wrong: an exception of ours may be unknown to the driver."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._ended: int | None = None  # the exit status of the command
        self._output, self._room = bytearray(), threading.Condition()
        self._last_look = time.monotonic()

    def about(self, folder: str, file: str) -> tuple[str, dict[str, str]]:
        """Returns ("ready", facts of this machine and process), or ("refused", {"why": ...}).

        Args:
            folder: the folder that the run is started in.
            file: a file that it reads, seen from there; "" for none.
        """
        try:
            from torchtune_ext.cluster.member import version
        except ImportError as error:
            return "refused", {"why": f"torchtune_ext cannot be imported there ({error})"}
        if not os.path.isfile(os.path.join(folder, file)) if file else not os.path.isdir(folder):
            path = os.path.join(folder, file) if file else folder
            return "refused", {"why": f"{path} is not there: the run needs a folder that all machines see"}
        # Ray has led the output of this process to a file of its session.
        return "ready", {"version": version(), "python": sys.executable, "log": os.readlink("/proc/self/fd/1")}

    def free_port(self, address: str) -> int:
        """Returns a port that nobody listens at now."""
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
            return probe.getsockname()[1]

    def start(self, words: list[str], variables: dict[str, str], folder: str, patience_s: float, log: bool) -> str:
        """Starts `python WORDS`. Returns "", or why it cannot be started.

        Args:
            variables: of the driver's shell and of the run. They replace this machine's of the same name.
            folder: where it is started.
            patience_s: seconds that it has after SIGTERM, if this actor is killed.
            log: whether what it prints goes to the log of this actor, too.
        """
        from torchtune_ext.run.parent import die_with_parent, environment

        # Ray lets an actor live on for a while when the raylet, which has started it, is gone.
        die_with_parent(os.getppid())
        environ = {name: value for name, value in environment().items() if not name.startswith(RAYS_OWN)} | variables
        self._status, theirs = os.pipe()
        guard = [sys.executable, "-P", "-m", "torchtune_ext.cluster.guard", str(patience_s), str(theirs)]
        try:
            self._process = subprocess.Popen(
                [*guard, sys.executable, "-P", *words],
                pass_fds=[theirs],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environ,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            return str(error)
        finally:
            os.close(theirs)
        # The guard goes on without a parent, so that Ray, which kills the children of an actor, leaves it alone.
        self._process.wait()
        self._last_look = time.monotonic()
        self._reader = threading.Thread(target=self._read, args=[log], daemon=True)
        self._reader.start()
        threading.Thread(target=self._watch, daemon=True).start()
        return ""

    def look(self) -> tuple[bytes, int | None]:
        """Returns what the command has printed since the last look, and its exit status once it has ended and all is read."""
        self._last_look = time.monotonic()
        if not self._reader.is_alive() and self._ended is None:
            # A guard that was killed has written no status, and Linux has killed the command.
            self._ended = int(os.read(self._status, 16) or b"137")
        with self._room:
            text = bytes(self._output)
            self._output.clear()
            self._room.notify()
        return text, self._ended

    def tell(self, line: str) -> None:
        """Gives the guard a line; what it takes stands in guard.py."""
        try:
            self._process.stdin.write(f"{line}\n".encode())
        except OSError:
            # It has ended.
            pass

    def _read(self, log: bool) -> None:
        """Runs in a thread: takes what the command prints, until nobody can print any more."""
        while data := os.read(self._process.stdout.fileno(), 1 << 16):
            if log:
                os.write(1, data)
            with self._room:
                self._room.wait_for(lambda: len(self._output) < KEPT)
                self._output += data

    def _watch(self) -> None:
        """Runs in a thread: ends the command when nobody asks for it any more."""
        while self._reader.is_alive():
            if time.monotonic() > self._last_look + SILENT_S:
                self._process.stdin.close()
                return
            time.sleep(1.0)
