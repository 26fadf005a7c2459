"""What the way to a node costs: p50 and p99 of a small GET and a 64 KiB POST, each way in turn, on loopback.

    python benchmarks/tunnel.py [--rounds 500]

`direct` is the server's own port, `tunnel` the Unix socket of the controller's ssh, `address` the stable address in
front of it (what agents use), `ssh -N` a plain forward for contrast. The sshd is one of its own. Client, server and
controller are processes of their own, as they are in use. One JSON line a case; milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "controller"))
from local_sshd import MISSING, LocalSshd

from art_sky.controller.address import Address
from art_sky.controller.provider import Machine
from art_sky.controller.ssh import ssh_command
from art_sky.controller.ssh_link import UnixConnection
from art_sky.controller.tunnel import Tunnel

WARM_UP = 30
STALL_MS = 30  # delayed acknowledgements make 40
BODY = b"x" * 65536
BEAT = """import json, sys
for line in sys.stdin:
    print(json.dumps({"boot_id": "b", "boottime": 1.0, "pid": 1, "phase": "serving", "server_url": sys.argv[1]}),
          flush=True)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500)
    rounds: int = parser.parse_args().rounds
    if MISSING is not None:
        print(MISSING, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="art-sky-") as scratch:
        folder = Path(scratch)
        sshd = LocalSshd(folder / "sshd")
        server, port = _child(_serve)
        controller, address = _child(_control, sshd.machine, folder, port)
        plain_port = _free_port()
        forward = ["-N", "-L", f"127.0.0.1:{plain_port}:127.0.0.1:{port}"]
        plain = subprocess.Popen(ssh_command(sshd.machine, folder / "hosts", *forward))
        try:
            _wait(plain_port)
            _measure(
                {
                    "direct": _tcp(port),
                    "tunnel": UnixConnection(folder / "s", 30),
                    "address": _tcp(address),
                    "ssh -N": _tcp(plain_port),
                },
                rounds,
            )
        finally:
            for process in (plain, controller, server):
                process.kill()
            sshd.stop()
    return 0


def _measure(ways: dict[str, http.client.HTTPConnection], rounds: int) -> None:
    cases = {"GET": ("GET", "/", None), "POST 64 KiB": ("POST", "/", BODY)}
    for case, request in cases.items():
        times: dict[str, list[float]] = {way: [] for way in ways}
        for n in range(rounds + WARM_UP):
            # In turn, so that what else the machine does falls on all alike.
            for way, connection in ways.items():
                began = time.perf_counter()
                connection.request(*request)
                connection.getresponse().read()
                if n >= WARM_UP:
                    times[way].append((time.perf_counter() - began) * 1000)
        cuts = {way: statistics.quantiles(taken, n=100) for way, taken in times.items()}
        stalls = {way: sum(t > STALL_MS for t in taken) for way, taken in times.items()}
        for name, cut in (("p50", 49), ("p99", 98)):
            figures = {way: round(cuts[way][cut], 3) for way in ways}
            ours = figures.pop("address")
            line = {
                "bench": "tunnel",
                "case": f"{case} {name} ms",
                "ours": ours,
                "peers": figures,
                "ratio": {"ssh -N": round(figures["ssh -N"] / ours, 2)},
                "notes": f"ours is the stable address, {ours - figures['direct']:.3f} ms above direct; "
                f"of {rounds} over {STALL_MS} ms: {stalls}",
            }
            print(json.dumps(line), flush=True)


def _serve(ready: Connection) -> None:
    """Answers each request with 100 bytes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                return writer.close()
            length = next((int(h[15:]) for h in head.lower().split(b"\r\n") if h.startswith(b"content-length:")), 0)
            await reader.readexactly(length)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b"y" * 100)

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=1 << 20)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def _control(ready: Connection, machine: Machine, folder: Path, port: int) -> None:
    """The controller's part: tunnel and address."""

    async def run() -> None:
        (folder / "beat.py").write_text(BEAT)
        beat = f"exec {sys.executable} {folder / 'beat.py'} http://127.0.0.1:{port}"
        tunnel = Tunnel(machine, folder / "s", folder / "hosts", beat=beat)
        while tunnel.status.state != "open" or not tunnel.socket.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        address = Address("benchmark", 0, tunnel.socket)
        await address.start()
        address.open()
        ready.send(address.port)
        await asyncio.Event().wait()

    asyncio.run(run())


def _child(work: Callable[..., None], *arguments: object) -> tuple[multiprocessing.Process, int]:
    """A process of its own, and the port that it said."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, *arguments), daemon=True)
    process.start()
    if not ours.poll(60):
        raise TimeoutError(f"{work.__name__} was not ready within 60 s")
    return process, ours.recv()  # type: ignore[return-value]


def _tcp(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=30)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(port: int) -> None:
    for _ in range(400):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError(f"nothing listens on port {port}")


if __name__ == "__main__":
    sys.exit(main())
