"""Finds out which ranks are on which machine, how they reach each other, and whether all see the folders of the run."""

import os
import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.run.errors import Mistake
from torchtune_ext.run.folder import RUN_VARIABLE, SWEEP_VARIABLE, agents_run
from torchtune_ext.sampling.broadcast import own_address
from torchtune_ext.training.collectives import from_main, gathered, rank

# A network file system may show a new file on other machines after a while. NFS keeps what it knows of a folder for 30 s and
# more (acdirmin), but asks anew when the folder is opened, as it is here.
SEEN_S = 10.0
# No packet is sent there: the address is one of those that documents use (RFC 5737). It leads out by the default route.
ELSEWHERE = "192.0.2.1"
# It tells processes that this one starts that GLOO_SOCKET_IFNAME is no setting of the user.
CHOSEN = "TORCHTUNE_EXT_GLOO_SOCKET_IFNAME"


def choose_interface() -> None:
    """Chooses the network interface on which gloo listens, unless the user did so (`GLOO_SOCKET_IFNAME`).

    By itself, gloo listens on the address that the name of the host stands for. If all ranks are on one machine, other
    machines may reach that address; so then it is the loopback interface. If not, the address may be 127.0.1.1, which no other
    machine reaches; so then it is the interface that leads to rank 0's machine.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    first = os.environ.get("MASTER_ADDR", "localhost")
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"] or first in ("localhost", "127.0.0.1", "::1"):
        interface = "lo" if "lo" in [name for _, name in socket.if_nameindex()] else None
    else:
        interface = interface_to(first) or interface_to(ELSEWHERE)
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ[CHOSEN] = interface


def interface_to(host: str) -> str | None:
    """Returns the network interface by which this machine reaches another one, or None if that is the loopback or unknown."""
    try:
        own = own_address(host, 9)
    except OSError:
        return None
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, each in interfaces if name != "lo" and own in {at.address for at in each}), None)


def hosts_of_ranks() -> tuple[str, ...]:
    """Returns the machine of every rank: the name of its host, with the number of its torchrun where hosts share a name. A
    collective."""
    pairs = gathered((socket.gethostname(), os.environ.get("GROUP_RANK", "")))
    names = {host for host, _ in pairs}
    shared = len(set(pairs)) > len(names)
    return tuple(f"{host} (torchrun {group})" if shared else host for host, group in pairs)


def whose(hosts: Sequence[str], ranks: Sequence[int]) -> str:
    """Returns ranks with their machines, for messages: "ranks 8 to 15 on b; rank 16 on c"."""
    texts = []
    for host in dict.fromkeys(hosts[each] for each in ranks):
        mine = [each for each in ranks if hosts[each] == host]
        whole = len(mine) > 2 and mine == list(range(mine[0], mine[-1] + 1))
        numbers = f"{mine[0]} to {mine[-1]}" if whole else ", ".join(map(str, mine))
        texts.append(f"{'ranks' if mine[1:] else 'rank'} {numbers} on {host}")
    return "; ".join(texts)


def require_shared(hosts: Sequence[str], output_dir: str | Path, model_dir: str | Path | None) -> None:
    """Looks whether all ranks see the folder that rank 0 will write, may write there, and have the same weights. A collective.

    Nothing is left behind, also no new folder. Ranks of one machine see the same, and nothing is looked at.

    Raises:
        ValueError: on all ranks, with those that do not.
    """
    if len(set(hosts)) > 1:
        _require_one_run(hosts)
        _require_folder(hosts, Path(output_dir))
        if model_dir is not None:
            _require_model(hosts, Path(model_dir))


def _require_one_run(hosts: Sequence[str]) -> None:
    """Each rank adds the id that an agent of W&B has given to the run to its `output_dir`: it must be the same on all."""
    runs = gathered(agents_run() or "")
    others = [each for each, run in enumerate(runs) if run != runs[0]]
    if others:
        raise Mistake(
            f"{RUN_VARIABLE}={runs[0]} at {whose(hosts, [0])}, but {runs[others[0]]!r} at {whose(hosts, others)}: export "
            f"{SWEEP_VARIABLE} and {RUN_VARIABLE} with the same values on all machines, or unset them on all"
        )


def _require_folder(hosts: Sequence[str], output_dir: Path) -> None:
    place, mark, resolved = from_main(lambda: _marked(output_dir))
    errors = gathered(_sees(Path(place), mark))
    if rank() == 0:
        for each in range(len(hosts)):
            _mark_of(Path(place), mark, each).unlink(missing_ok=True)
    lacking = [each for each, error in enumerate(errors) if error == ""]
    refused = [each for each, error in enumerate(errors) if error]
    if lacking:
        raise Mistake(
            f"output_dir={output_dir}: {whose(hosts, lacking)} cannot see what {whose(hosts, [0])} writes there ({resolved}). "
            "Every rank writes its part of a checkpoint: name a folder that all machines share, by the same path "
            "(docs/several_machines.md)"
        )
    if refused:
        raise Mistake(
            f"output_dir={output_dir}: {whose(hosts, refused)} cannot write there ({errors[refused[0]]}). Every rank writes "
            "its part of a checkpoint: set the rights of the folder, or run as the same user on all machines"
        )


def _marked(output_dir: Path) -> tuple[str, str, str]:
    """Puts a file into `output_dir`, or where that would be made. Returns that folder, the token in the file's name, and where
    the folder is on this machine."""
    place = output_dir
    while not place.exists() and place != place.parent:
        place = place.parent
    mark = secrets.token_hex(4)
    try:
        _mark_of(place, mark, 0).touch()
    except OSError as error:
        raise Mistake(
            f"output_dir={output_dir} cannot be made or written: {error.strerror} ({place}). Set its rights, or choose another "
            "output_dir"
        ) from error
    return str(place), mark, str(place.resolve())


def _mark_of(place: Path, mark: str, number: int) -> Path:
    # A start that goes on in the folder sweeps such a name away, should this process be killed here.
    return place / f".ranks_{mark}.{number}.tmp"


def _sees(place: Path, mark: str) -> str | None:
    """Returns None if this rank sees the mark of rank 0 and can put one of its own beside it, "" if it does not see it, and the
    error if it cannot write."""
    until = time.monotonic() + SEEN_S
    first = _mark_of(place, mark, 0)
    while not _listed(first):
        if time.monotonic() > until:
            return ""
        time.sleep(0.2)
    try:
        _mark_of(place, mark, rank()).touch()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _listed(path: Path) -> bool:
    try:
        return path.name in os.listdir(path.parent)
    except OSError:
        return False


def _require_model(hosts: Sequence[str], model_dir: Path) -> None:
    """Compares the weights that the machines read, which may be copies on disks of their own."""
    first_here = hosts.index(hosts[rank()]) == rank()
    weights = gathered(_weights(model_dir) if first_here else None)
    of_host = {host: weights[hosts.index(host)] for host in dict.fromkeys(hosts)}
    lacking = [each for each, host in enumerate(hosts) if of_host[host] == ""]
    if lacking and len(lacking) < len(hosts):
        raise Mistake(
            f"model_dir={str(model_dir)!r} is not there for {whose(hosts, lacking)}: name a folder that all machines share, or "
            "copy it to the same path on each"
        )
    others = [each for each, host in enumerate(hosts) if of_host[host] != of_host[hosts[0]]]
    if others:
        raise Mistake(
            f"model_dir={str(model_dir)!r} is another model for {whose(hosts, others)} ({of_host[hosts[others[0]]]}) than for "
            f"{whose(hosts, [0])} ({of_host[hosts[0]]}): copy it anew to each machine from one place"
        )


def _weights(model_dir: Path) -> str:
    """Returns what tells the weights in a folder from others, or what is wrong with them; "" if there is no such folder."""
    if not model_dir.is_dir():
        return ""
    try:
        return HFModel(model_dir).fingerprint()
    except (ValueError, OSError) as error:
        return str(error)
