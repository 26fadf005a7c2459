"""The copy of a node's logs in the store."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_harness import SECRETS, Node

from art_sky.errors import StoreError
from art_sky.node import logs, records
from art_sky.store import open_store
from art_sky.store.packs import pull_folder
from art_sky.store.protocol import Store


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "node", factor=20.0).send_secrets()
    (made.folder / "logs").mkdir()
    (made.state / "logs").mkdir()
    write(made, "logs/node.log", "installed\n", 1)
    write(made, "state/logs/engine.log", "loaded\n", 2)
    write(made, "state/logs/trainer.log", "trained\n", 3)
    (made.state / "token").write_text("the-token")
    yield made
    made.close()


def write(node: Node, name: str, text: str, age: float = 9) -> None:
    (node.folder / name).write_text(text)
    os.utime(node.folder / name, (age, age))


def collected(node: Node, tmp_path: Path) -> dict[str, str]:
    target = tmp_path / "collected"
    target.mkdir()
    logs.collect(node.folder, target)
    return {file.name: file.read_text() for file in target.iterdir()}


def stored(node: Node, tmp_path: Path) -> dict[str, str]:
    target = tmp_path / "pulled"
    pull_folder(open_store(node.config.store), "_clusters/artsky-00c0ffee/logs/artsky-00c0ffee-1", target)
    return {file.name: file.read_text() for file in target.iterdir()}


def test_only_logs_are_taken_and_no_secret(node: Node, tmp_path: Path) -> None:
    key = {"AWS_ACCESS_KEY_ID": "AKIA1", "AWS_SECRET_ACCESS_KEY": "s3cr3t", "AWS_REGION": "us-east-1"}
    node.send_secrets(records.Secrets(token="the-token", store_env=key, hf_token="hf_1"))
    write(node, "logs/node.log", "the-token AKIA1 s3cr3t hf_1 us-east-1\n")
    assert collected(node, tmp_path) == {
        "node.log": "*** *** *** *** us-east-1\n",
        "engine.log": "loaded\n",
        "trainer.log": "trained\n",
    }


def test_the_log_is_shown_before_secrets_have_come(node: Node) -> None:
    """What the controller asks for where the installation failed."""
    environment = {**os.environ, "HOME": str(node.folder.parent)}
    home = node.folder.rename(node.folder.with_name(".art-sky-node"))
    write_log = (home / "logs" / "node.log").write_text
    write_log("the-token no such package\n")
    command = [sys.executable, "-m", "art_sky.node.logs", "show"]
    assert subprocess.run(command, env=environment, capture_output=True, text=True).stdout == "*** no such package\n"
    (home / "secrets.json").unlink()
    write_log("no such package\n")
    assert subprocess.run(command, env=environment, capture_output=True, text=True).stdout == "no such package\n"
    home.rename(node.folder)


def test_the_newest_is_kept(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_FILE_BYTES", 40)
    monkeypatch.setattr(logs, "MAX_BYTES", 60)
    write(node, "logs/node.log", "".join(f"line {n:03}\n" for n in range(100)), 9)
    note = "[the lines before these were not kept]\n"
    found = collected(node, tmp_path)
    assert found["node.log"] == f"{note}line 097\nline 098\nline 099\n"
    # What was written longest ago makes room.
    assert found == {"node.log": found["node.log"], "trainer.log": note, "engine.log": note}


def test_a_secret_that_is_cut_in_two_is_not_kept(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_FILE_BYTES", 30)
    assert len(SECRETS.token) == 9
    for left in range(1, 9):  # characters of the token at the start of what is read; no line ends
        write(node, "logs/node.log", "x" * 50 + SECRETS.token + "y" * (30 - left))
        folder = tmp_path / str(left)
        folder.mkdir()
        text = collected(node, folder)["node.log"].splitlines()[-1]
        assert set(text) == {"y"} and len(text) == 21


def test_pushes_go_on_through_failures_of_the_store(
    node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = [False, True, False, False]
    waits: list[float] = []

    def connect() -> Store:
        if fails.pop(0):
            raise StoreError("no access; mend it")
        return open_store(node.config.store)

    def closed(seconds: float) -> bool:
        waits.append(seconds)
        if len(waits) == 1:
            assert stored(node, tmp_path)["node.log"] == "installed\n"
            write(node, "logs/node.log", "installed\nserved\n")
        return len(waits) == 3

    assert logs.keep(node.folder, node.config, connect, closed)
    assert waits == [600.0, 60.0, 600.0] and "no access" in capsys.readouterr().out
    assert stored(node, tmp_path) == {
        "node.log": "installed\nserved\n",
        "engine.log": "loaded\n",
        "trainer.log": "trained\n",
    }


def test_the_last_push_decides(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    (node.folder / "secrets.json").unlink()  # what must be hidden is not known
    assert not logs.keep(node.folder, node.config, lambda: open_store(node.config.store), lambda _: True)
    assert capsys.readouterr().out.count("could not be pushed") == 2
    assert not (node.folder / "store").exists()


def test_a_node_leaves_its_log_in_the_store(node: Node, tmp_path: Path) -> None:
    """The real program beside the watchdog."""
    fake = (node.folder / "python").read_text()
    real = f'#!/bin/sh\ncase $2 in art_sky.node.logs) exec {sys.executable} "$@";; esac\n'
    (node.folder / "python").write_text(fake.replace("#!/bin/sh\n", real))
    node.control(working=True).start().serving()
    write(node, "logs/node.log", "installed\nthe last words\n")
    node.watchdog.stopped = True
    state = node.ended()
    assert (state.ending, state.not_flushed) == ("stopped", [])
    assert stored(node, tmp_path)["node.log"] == "installed\nthe last words\n"


def test_output_goes_on_and_is_kept(tmp_path: Path) -> None:
    code = f"""
import pathlib, subprocess, sys
from art_sky.node.output import also_in
with also_in(pathlib.Path({str(tmp_path)!r}, "logs", "node.log")):
    print("one")
    subprocess.run(["sh", "-c", "echo two; echo three >&2"])
    sys.stderr.write("four")
print("five")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert "five" in done.stdout and done.stderr == ""
    kept = (tmp_path / "logs" / "node.log").read_text()
    assert sorted(kept.replace("four", "four\n").split()) == ["four", "one", "three", "two"]
    assert done.stdout == kept + "five\n"
