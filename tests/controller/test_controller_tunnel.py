"""The tunnel through a real sshd on loopback: beats, forwarding, breaks, strangers at the same address."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_cloud import state
from local_sshd import MISSING, LocalSshd

from art_sky.controller import ssh
from art_sky.controller import tunnel as module
from art_sky.controller.provider import Machine
from art_sky.controller.ssh import send, ssh_command
from art_sky.controller.tunnel import Tunnel
from art_sky.controller.wheel import make_wheel
from art_sky.errors import ServerUnreachable

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

BEAT = """
import os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
for line in sys.stdin:
    with (folder / "beats").open("a") as f:
        f.write(f"{os.getpid()}\\n")
    file = folder / "watchdog.json"
    print(" ".join(file.read_text().split()) if file.exists() else "{}", flush=True)
(folder / "ended").touch()
"""


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[LocalSshd]:
    made = LocalSshd(tmp_path / "sshd")
    yield made
    made.stop()


class Node:
    """The folder of a node, its beat program, and a server that says which one it is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "beat.py").write_text(BEAT)
        self.beat = f"exec {sys.executable} {folder / 'beat.py'} {folder}"
        self._server: asyncio.Server | None = None

    @property
    def beats(self) -> list[str]:
        file = self.folder / "beats"
        return file.read_text().split() if file.exists() else []

    async def serve(self, text: str) -> None:
        """Another server, at another port, as after a restart."""
        await self.close()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(text)}\r\nconnection: close\r\n\r\n{text}".encode())
            writer.close()

        self._server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.say(server_url=f"http://127.0.0.1:{port}")

    def say(self, **fields: Any) -> None:
        scratch = self.folder / "new"
        scratch.write_text(json.dumps(vars(state("serving", **fields))))
        scratch.replace(self.folder / "watchdog.json")

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def kill(self) -> None:
        """Beat programs that are left, also stopped ones: a test that fails must not leave them behind."""
        for pid in set(self.beats):
            command = Path(f"/proc/{pid}/cmdline")
            if command.exists() and str(self.folder / "beat.py").encode() in command.read_bytes():
                os.kill(int(pid), signal.SIGKILL)


@pytest.fixture
async def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    monkeypatch.setattr(module, "QUICK_SECONDS", 0.05)
    monkeypatch.setattr(module, "FIRST_WAIT", 0.05)
    made = Node(tmp_path / "node")
    yield made
    await made.close()
    made.kill()


@pytest.fixture
async def tunnel(sshd: LocalSshd, node: Node, tmp_path: Path) -> AsyncIterator[Tunnel]:
    made = Tunnel(sshd.machine, tmp_path / "s", tmp_path / "hosts", beat=node.beat, beat_seconds=0.05)
    yield made
    await made.close()


async def until(condition: Callable[[], object], seconds: float = 30) -> None:
    try:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError("the condition did not come true") from None


async def ask(socket: Path) -> str:
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(socket)), timeout=10) as client:
        return (await client.get("http://127.0.0.1/")).text


async def test_beats_reach_the_node_and_its_state_comes_back(tunnel: Tunnel, node: Node) -> None:
    await until(lambda: tunnel.status.state == "open")
    assert tunnel.watchdog is None, "the node had nothing to say yet"
    node.say(spent=1.5)
    await until(lambda: tunnel.watchdog is not None)
    assert tunnel.watchdog and tunnel.watchdog.spent == 1.5
    before = len(node.beats)
    await until(lambda: len(node.beats) > before + 3)
    assert len(set(node.beats)) == 1, "one session for all beats"


async def test_the_server_is_reached_through_a_private_socket_wherever_it_listens(tunnel: Tunnel, node: Node) -> None:
    await node.serve("first")
    await until(lambda: tunnel.status.state == "open" and tunnel.socket.exists())
    assert await ask(tunnel.socket) == "first"
    assert tunnel.socket.stat().st_mode & 0o077 == 0
    await node.serve("second")
    await until(lambda: len(set(node.beats)) == 3)
    await until(lambda: tunnel.status.state == "open" and tunnel.socket.exists())
    assert await ask(tunnel.socket) == "second"


async def test_a_broken_connection_is_opened_again(tunnel: Tunnel, node: Node, sshd: LocalSshd) -> None:
    await node.serve("hello")
    await until(lambda: tunnel.status.state == "open" and tunnel.socket.exists())
    sshd.stop()
    await until(lambda: tunnel.status.state == "connecting")
    assert tunnel.status.problem and "tunnel is down" in tunnel.status.problem
    sshd.start()
    await until(lambda: tunnel.status.state == "open")
    assert await ask(tunnel.socket) == "hello"


async def test_another_machine_at_the_same_address_gets_nothing(
    tunnel: Tunnel, node: Node, sshd: LocalSshd, tmp_path: Path
) -> None:
    await until(lambda: tunnel.status.state == "open")
    sshd.new_host_key()
    await until(lambda: tunnel.status.state == "refused")
    beats = len(node.beats)
    assert tunnel.status.problem and "another SSH host key than i-1 had" in tunnel.status.problem
    assert "ssh-keygen -R i-1" in tunnel.status.problem
    with pytest.raises(ServerUnreachable):
        send(sshd.machine, tmp_path / "hosts", "secrets", "the token")
    await asyncio.sleep(0.3)
    assert len(node.beats) == beats


async def test_a_new_instance_at_a_known_address_is_taken(sshd: LocalSshd, node: Node, tmp_path: Path) -> None:
    for instance in ("i-1", "i-2"):
        facts = {**vars(sshd.machine), "instance": instance}
        made = Tunnel(Machine(**facts), tmp_path / "s", tmp_path / "hosts", beat=node.beat, beat_seconds=0.05)
        await until(lambda: made.status.state == "open")  # noqa: B023
        await made.close()
        sshd.new_host_key()
    assert (tmp_path / "hosts").read_text().count("ssh-ed25519") == 2


async def test_an_ssh_that_hangs_is_ended(tunnel: Tunnel, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await until(lambda: tunnel.status.state == "open")
    monkeypatch.setattr(module, "SILENT_SECONDS", 4.0)
    stopped = node.beats[-1]
    os.kill(int(stopped), signal.SIGSTOP)
    await until(lambda: node.beats[-1] != stopped)


def test_ssh_ends_with_a_controller_that_is_killed(sshd: LocalSshd, tmp_path: Path) -> None:
    """kill -9 leaves it no time to close anything: the pipe does."""
    folder = tmp_path / "node"
    folder.mkdir()
    (folder / "beat.py").write_text(BEAT)
    program = textwrap.dedent(f"""
        import asyncio
        from pathlib import Path
        from art_sky.controller.provider import Machine
        from art_sky.controller.tunnel import Tunnel
        async def main():
            tunnel = Tunnel(Machine(**{vars(sshd.machine)!r}), Path({str(tmp_path / "s")!r}),
                            Path({str(tmp_path / "hosts")!r}), beat_seconds=0.05,
                            beat={f"exec {sys.executable} {folder / 'beat.py'} {folder}"!r})
            await asyncio.sleep(600)
        asyncio.run(main())
    """)
    controller = subprocess.Popen([sys.executable, "-c", program])
    try:
        wait(lambda: (folder / "beats").exists())
    finally:
        controller.kill()
        controller.wait()
    wait(lambda: (folder / "ended").exists())
    wait(lambda: sshd.sessions() == [])


def wait(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_ssh_takes_nothing_of_the_user_s_own_configuration(sshd: LocalSshd, tmp_path: Path) -> None:
    argv = ssh_command(sshd.machine, tmp_path / "hosts")
    assert argv[:3] == ["ssh", "-F", "none"] and argv[-1].endswith("@127.0.0.1")
    for wanted in ("HostKeyAlias=i-1", "ForwardAgent=no", "ForwardX11=no", "ServerAliveInterval=5",
                   "ServerAliveCountMax=3", "ExitOnForwardFailure=yes", "BatchMode=yes"):  # fmt: skip
        assert wanted in argv


def test_a_node_s_log_is_asked_for_by_its_own_program(tmp_path: Path) -> None:
    make_wheel(tmp_path / "home" / ".art-sky-node")
    sshd = LocalSshd(tmp_path / "sshd", tmp_path / "home")
    try:
        with pytest.raises(ServerUnreachable, match="did not answer"):
            ssh.ask(sshd.machine, tmp_path / "hosts", "logs", "show")
        (tmp_path / "home" / ".art-sky-node" / "logs").mkdir()
        (tmp_path / "home" / ".art-sky-node" / "logs" / "node.log").write_text("no such package\n")
        assert ssh.ask(sshd.machine, tmp_path / "hosts", "logs", "show") == "no such package\n"
    finally:
        sshd.stop()
