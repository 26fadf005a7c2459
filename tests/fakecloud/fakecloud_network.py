"""Network namespaces: the cloud's, which has a bridge and no uplink, and the laptop's, a plug in that bridge.

Standard library only. A namespace belongs to a thread: what a thread creates after entering one lives there.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

RUN = Path("/run/fakecloud")  # one folder a simulated cloud; short, for the Unix sockets below it
GATEWAY = "10.77.0.1"  # the bridge: the cloud's API, and a route that leads nowhere
LAPTOP = "10.77.255.2"
BRIDGE = "br0"
_libc = ctypes.CDLL(None, use_errno=True)


def cloud_space(name: str) -> Path:
    return Path(f"/run/netns/fakecloud-{name}")


def laptop_space(name: str) -> Path:
    return Path(f"/run/netns/fakecloud-{name}-laptop")


def create(name: str) -> None:
    """Both namespaces of a new cloud. Nothing in them reaches this machine's network, nor it them."""
    cloud, laptop = cloud_space(name).name, laptop_space(name).name
    ip("netns", "add", cloud)
    ip("netns", "add", laptop)
    ip("-n", cloud, "link", "set", "lo", "up")
    ip("-n", laptop, "link", "set", "lo", "up")
    ip("-n", cloud, "link", "add", BRIDGE, "type", "bridge")
    ip("-n", cloud, "addr", "add", f"{GATEWAY}/16", "dev", BRIDGE)
    ip("-n", cloud, "link", "set", BRIDGE, "up")
    ip("-n", cloud, "link", "add", "laptop", "type", "veth", "peer", "name", "eth0", "netns", laptop)
    ip("-n", cloud, "link", "set", "laptop", "master", BRIDGE, "up")
    ip("-n", laptop, "addr", "add", f"{LAPTOP}/16", "dev", "eth0")
    ip("-n", laptop, "link", "set", "eth0", "up")


def user_hash(name: str) -> str:
    """SkyPilot's id of the user of a cloud's laptop."""
    return name * 2


def remove(name: str) -> None:
    """Kills every process in the two namespaces and removes them; nothing happens where there is nothing."""
    for space in (laptop_space(name), cloud_space(name)):
        if space.exists():
            kill_inside(space)
            ip("netns", "del", space.name, check=False)
    shutil.rmtree(f"/tmp/sky_ssh_{user_hash(name)}", ignore_errors=True)


def processes(space: Path) -> list[int]:
    """Ids of the processes whose network is this namespace, but never the caller's."""
    wanted = (space.stat().st_dev, space.stat().st_ino)
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with suppress(OSError):
                net = (folder / "ns/net").stat()
                if (net.st_dev, net.st_ino) == wanted:
                    found.append(int(folder.name))
    return found


def kill_inside(space: Path) -> None:
    """SIGKILL to every process of the namespace, until none is left."""
    end = time.monotonic() + 10
    while (found := processes(space)) and time.monotonic() < end:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


@contextmanager
def inside(space: Path) -> Iterator[None]:
    """Sockets that this thread creates, and processes and threads that it starts, are in the namespace."""
    back = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        target = os.open(space, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(target)
        finally:
            os.close(target)
        try:
            yield
        finally:
            _enter(back)
    finally:
        os.close(back)


def ip(*words: str, check: bool = True) -> None:
    """The `ip` command. Raises RuntimeError with what it printed."""
    run = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if check and run.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {run.stderr.strip()}")


def _enter(space: int) -> None:
    clone_newnet = 0x40000000
    if _libc.setns(space, clone_newnet):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
