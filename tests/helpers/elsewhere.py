"""A simulated machine whose host name resolves to a network address, and its listening sockets.

`python -m helpers.elsewhere` with `PYTHONPATH=tests` has these commands:

enter COMMAND ...   runs COMMAND of this program there, or exits with status 77 if that is not permitted
group               prints the listeners of a default torch process group, as JSON
engine FOLDER       prints the listeners of a running engine, as JSON
"""

import ctypes
import errno
import fcntl
import ipaddress
import json
import os
import socket
import stat
import struct
import sys
import tempfile
from pathlib import Path

ADDRESS, NAME = "10.9.9.9", "elsewhere"
NOT_PERMITTED = 77  # exit status
NO_NAMESPACES = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENOSPC, errno.EINVAL, errno.ENOTTY, errno.EOPNOTSUPP)
NEW_USER, NEW_MOUNTS, NEW_HOSTNAME, NEW_NETWORK = 0x10000000, 0x20000, 0x4000000, 0x40000000
MS_BIND = 0x1000
SIOCSIFFLAGS, SIOCSIFADDR, IFF_UP = 0x8914, 0x8916, 1
LISTEN = "0A"  # state of a TCP socket
ACCEPTS = "00010000"  # flag of a unix socket


def enter(hosts: Path) -> None:
    """Move this process to its own network, with loopback and ADDRESS, and with the host name NAME. It needs only the
    rights of a user namespace, which the next `exec` drops. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()

    def checked(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    checked(libc.unshare(NEW_USER | NEW_MOUNTS | NEW_HOSTNAME | NEW_NETWORK))
    for file, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        Path("/proc/self", file).write_text(text)
    hosts.write_text(f"127.0.0.1 localhost\n{ADDRESS} {NAME}\n")
    checked(libc.mount(bytes(hosts), b"/etc/hosts", None, MS_BIND, None))
    socket.sethostname(NAME)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        up = struct.pack("16sh14x", b"lo", IFF_UP)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, up)
        address = struct.pack("16sHH4s8x", b"lo:1", socket.AF_INET, 0, socket.inet_aton(ADDRESS))
        fcntl.ioctl(any_socket, SIOCSIFADDR, address)


def listeners() -> list[str]:
    """Return the addresses of all listening TCP sockets in this network."""
    addresses = []
    for file in ("tcp", "tcp6"):
        for line in Path("/proc/net", file).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == LISTEN:
                words = bytes.fromhex(local.split(":")[0])  # 32 bits each, in the machine's order of bytes
                parts = [words[i : i + 4][:: -1 if sys.byteorder == "little" else 1] for i in range(0, len(words), 4)]
                addresses.append(str(ipaddress.ip_address(b"".join(parts))))
    return addresses


def socket_folders(pids: list[int]) -> list[tuple[str, int, int]]:
    """Return (folder, mode, owner) for each unix socket in the file system on which these processes listen."""
    links = [str(link.readlink()) for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    paths = [row[7] for row in rows if len(row) == 8 and row[3] == ACCEPTS and f"socket:[{row[6]}]" in links]
    folders = [Path(path).parent for path in paths]
    return [(str(folder), stat.S_IMODE(folder.stat().st_mode), folder.stat().st_uid) for folder in folders]


def group() -> dict:
    """Return the listeners of a default torch process group."""
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        addresses = listeners()
        dist.destroy_process_group()
    return {"tcp": addresses}


def engine(folder: str) -> dict:
    """Return the listeners of an engine after a weight sync and a request."""
    from helpers import tiny_model
    from torchtune_ext.sampling.engine import Engine, EngineConfig, SamplingConfig

    os.umask(0)
    model = tiny_model.build(0)
    config = EngineConfig(dtype="float32", max_model_len=256, kv_cache_bytes=32 << 20)
    with Engine(tiny_model.save(model, Path(folder, "model")), config, folder) as engine:
        engine.start()
        engine.wait_ready()
        engine.publish(model.named_parameters(), 1)
        engine.sample([[1, 2, 3]], 2, SamplingConfig(max_tokens=4))
        everybody = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and ours(path)]
        return {"tcp": listeners(), "unix": socket_folders(everybody)}


def ours(process: Path) -> bool:
    """Whether a process is in this network namespace."""
    try:
        return (process / "ns/net").readlink() == Path("/proc/self/ns/net").readlink()
    except OSError:
        return False


def main(command: str, *rest: str) -> None:
    if command == "enter":
        with tempfile.TemporaryDirectory() as folder:  # the mount survives the removal of the file
            try:
                enter(Path(folder, "hosts"))
            except OSError as error:
                if error.errno not in NO_NAMESPACES:
                    raise
                print(f"a network of its own is not permitted here: {error}", file=sys.stderr)
                sys.exit(NOT_PERMITTED)
        os.execv(sys.executable, [sys.executable, "-m", "helpers.elsewhere", *rest])
    result = {"group": group, "engine": engine}[command](*rest)
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
