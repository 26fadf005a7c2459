"""What the store tests run in processes of their own."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from art_sky.errors import PreconditionFailed
from art_sky.store import open_store
from art_sky.store.model_store import ModelStore


def create_race(url: str, begin: float, names: list[str]) -> list[str]:
    """Threads that create the same key at once; returns the winners."""
    store = open_store(url)

    def attempt(name: str) -> str | None:
        time.sleep(max(0.0, begin - time.time()))
        try:
            store.create("race/key", name.encode() * 1000)
        except PreconditionFailed:
            return None
        return name

    with ThreadPoolExecutor(len(names)) as pool:
        return [winner for winner in pool.map(attempt, names) if winner]


def count_up(url: str, threads: int, times: int) -> int:
    """Each thread adds 1 to the counter `times` times by compare-and-swap; returns how many swaps it lost."""
    store = open_store(url)

    def work(_: int) -> int:
        lost = done = 0
        while done < times:
            found = store.get("counter")
            try:
                store.swap("counter", str(int(found.data) + 1).encode(), found.etag)
                done += 1
            except PreconditionFailed:
                lost += 1
        return lost

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(work, range(threads)))


def make_files(folder: Path, text: str) -> dict[str, Path]:
    """The files of a step, with content that tells them apart."""
    files = {}
    for name in ("adapter/adapter_model.safetensors", "trainer/state.json"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name} {text}" * 50)
        files[name] = path
    return files


def commit_steps(url: str, scratch: str, last: int) -> None:
    """Goes on from HEAD until step `last`, printing each step that is committed; request i makes step i."""
    model = ModelStore(open_store(url), "p", "m")
    with model.open_writer("worker", wait_seconds=10) as writer:
        print("generation", writer.generation, flush=True)
        while (step := writer.head.step + 1 if writer.head else 0) <= last:
            manifest = writer.adopt(f"r{step}")
            if manifest is None:
                files = make_files(Path(scratch) / f"{step}", f"step {step}")
                manifest = writer.commit(step=step, request=f"r{step}", files=files, updates=1)
            print("committed", manifest.step, flush=True)


if __name__ == "__main__":
    commit_steps(sys.argv[1], sys.argv[2], int(sys.argv[3]))
