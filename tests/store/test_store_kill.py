"""kill -9 at every moment of a commit, then a new process that goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import s3_servers
import store_workers

from art_sky.store import open_store
from art_sky.store.model_store import ModelStore, manifest_name

LAST = 3


def run(url: str, scratch: Path, failpoint: str | None = None, last: int = LAST) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "ART_SKY_FAILPOINT"}
    if failpoint:
        env["ART_SKY_FAILPOINT"] = failpoint
    command = [sys.executable, store_workers.__file__, url, str(scratch), str(last)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def committed(process: subprocess.CompletedProcess[str]) -> list[int]:
    return [int(line.split()[1]) for line in process.stdout.splitlines() if line.startswith("committed")]


def check_whole(url: str, scratch: Path, said: list[int]) -> int:
    """HEAD loads, every step is there once and whole, nothing that was said to be committed is lost."""
    model = ModelStore(open_store(url), "p", "m")
    steps = model.steps()
    assert [s.manifest.step for s in steps] == list(range(len(steps)))
    assert [s.manifest.request for s in steps] == [f"r{n}" for n in range(len(steps))]
    assert said == sorted(set(said)) and len(steps) > (said[-1] if said else -1)
    for n, step in enumerate(steps):
        folder = model.fetch_files(step.manifest, scratch / f"fetched-{n}")
        assert (folder / "trainer/state.json").read_text() == f"trainer/state.json step {n}" * 50
        assert step.key.endswith(manifest_name(step.manifest))
    return len(steps)


@pytest.mark.parametrize(
    ("failpoint", "steps_left"),
    [
        ("after-blobs", 0), ("after-manifest", 0), ("after-head", 1),
        ("after-blobs:3", 2), ("after-manifest:3", 2), ("after-head:3", 3),
    ],
)  # fmt: skip
def test_killed_at_a_failpoint(tmp_path: Path, failpoint: str, steps_left: int) -> None:
    kill_and_resume((tmp_path / "s").as_uri(), tmp_path, failpoint, steps_left)


@pytest.mark.parametrize(
    ("failpoint", "steps_left"), [("after-blobs", 0), ("after-manifest:3", 2), ("after-head:3", 3)]
)
def test_killed_with_the_store_in_a_bucket(seaweedfs: str, tmp_path: Path, failpoint: str, steps_left: int) -> None:
    """The dead process's lease is waited for."""
    kill_and_resume(s3_servers.store_url(seaweedfs, lease_ttl=4), tmp_path, failpoint, steps_left)


def kill_and_resume(url: str, tmp_path: Path, failpoint: str, steps_left: int) -> None:
    killed = run(url, tmp_path / "w", failpoint)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert check_whole(url, tmp_path / "c", committed(killed)) == steps_left
    store = open_store(url)
    manifests = [i.key for i in store.list("p/m/manifests/")]
    assert len(manifests) == steps_left + failpoint.startswith("after-manifest")

    resumed = run(url, tmp_path / "w")
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.startswith("generation 2\n")
    assert check_whole(url, tmp_path / "c", committed(killed) + committed(resumed)) == LAST + 1
    # What was whole but for HEAD is adopted, not made again: no step has two manifests.
    assert len(list(store.list("p/m/manifests/"))) == LAST + 1
    model = ModelStore(store, "p", "m")
    generations = [s.manifest.generation for s in model.steps()]
    assert generations.count(1) == steps_left + failpoint.startswith("after-manifest")
    assert model.head().generation == 2


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """Whatever the process was doing: the moments are those at which it enters system calls of a commit."""
    url = (tmp_path / "s").as_uri()
    code = (
        "import os, runpy, signal, sys\n"
        "left = [int(sys.argv.pop(1))]\n"
        "def tick(event, args):\n"
        "    if event.startswith(('open', 'os.', 'fcntl.')):\n"
        "        left[0] -= 1\n"
        "        if left[0] == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "import art_sky.store.folder, art_sky.store.writer\n"
        "sys.addaudithook(tick)\n"
        "sys.argv.pop(0)\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    said: list[int] = []
    for moment in range(3, 180, 13):  # a commit has about 50 of them
        command = [sys.executable, "-c", code, str(moment), store_workers.__file__, url, str(tmp_path / "w"), "99"]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        assert process.returncode == -signal.SIGKILL, process.stderr
        said += committed(process)
        steps = check_whole(url, tmp_path / "c", said)
    assert steps > 7
    done = run(url, tmp_path / "w", last=steps)
    assert done.returncode == 0, done.stderr
    assert check_whole(url, tmp_path / "c", said + committed(done)) == steps + 1
