"""Which machines `art-sky gc --clouds` takes for orphans, and that it ends no others."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_store import run

from art_sky.controller.provider import Machine
from art_sky.controller.registry import Registry, registry_file
from art_sky.controller.rented import LaunchRequest, Node, RentedCluster
from art_sky.node.records import LedgerEntry, ledger_key
from art_sky.store import open_store

MACHINES: list[Machine] = []
ENDED: list[str] = []


class Clouds:
    """All machines that there are, and which were ended."""

    def list(self) -> list[Machine]:
        return MACHINES

    def end(self, node: str) -> None:
        ENDED.append(node)


@pytest.fixture(autouse=True)
def clouds(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ART_SKY_PROVIDER", f"{__name__}:Clouds")
    MACHINES.clear()
    ENDED.clear()


def machine(node: str, until: float | None = None, **fields: object) -> None:
    labels = {} if until is None else {"art-sky": "1", "art-sky-until": str(int(until))}
    MACHINES.append(Machine(node, "running", "aws", instance=f"i-{node}", labels=labels, **fields))  # type: ignore[arg-type]


def recorded(node: str, state: str) -> None:
    registry = Registry(registry_file())
    offer = {"cloud": "aws", "region": "r", "instance_type": "t", "accelerators": {}, "spot": False, "price": 1.0}
    cluster = RentedCluster(
        name=node, id=node.rpartition("-")[0], wanted="up", created=1.0, request=LaunchRequest(name=node, store="s3://b"),
        plan=[], port=1, nodes=[Node(name=node, state=state, offer=offer, since=1.0, billed_from=1.0)],  # type: ignore[arg-type]
    )  # fmt: skip
    registry.add(cluster)
    registry.close()


def entered(folder: Path, node: str, **fields: object) -> None:
    cluster = node.rpartition("-")[0]
    entry = LedgerEntry(cluster, node, "i", "aws", "r", "t", False, 1.0, 1.0, time.time())
    entry = dataclasses.replace(entry, **fields)  # type: ignore[arg-type]
    open_store(str(folder)).put(ledger_key(cluster, node), json.dumps(dataclasses.asdict(entry)).encode())


def verdicts(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, tuple[bool, str]]:
    capsys.readouterr()
    assert run("gc", "--clouds", "--json", *options) == 0
    found = json.loads(capsys.readouterr().out)["machines"]
    return {m["name"]: (m["orphan"], m["why"]) for m in found}


def test_the_registry_confirms(capsys: pytest.CaptureFixture[str]) -> None:
    for node, state in (("artsky-a-1", "gone"), ("artsky-b-1", "up")):
        machine(node)
        recorded(node, state)
    machine("artsky-c-1")
    found = verdicts(capsys)
    assert {name: orphan for name, (orphan, _) in found.items()} == {
        "artsky-a-1": True, "artsky-b-1": False, "artsky-c-1": False,
    }  # fmt: skip
    assert "only its name" in found["artsky-c-1"][1] and ENDED == []
    verdicts(capsys, "--delete")
    assert ENDED == ["artsky-a-1"]


@pytest.mark.parametrize(
    ("label", "entry", "orphan", "why"),
    [
        (-660, None, True, "shows no extension"),
        (+60, None, False, "not over"),
        (-660, lambda now: {"until_unix": now + 3600}, False, "at work"),
        (-660, lambda now: {"until_unix": now - 630}, True, "limits are over"),
        # A node whose clock is 5 minutes behind: it is in its last flush.
        (-240, lambda now: {"until_unix": now - 240, "seen_unix": now - 300}, False, "at work"),
        (-240, None, False, "not over"),
        (+60, lambda now: {"closed_unix": now}, True, "closed"),
        (+9000, lambda now: {"seen_unix": now - 7200}, True, "written nothing"),
        (+9000, lambda now: {}, False, "at work"),
        (None, None, False, "only its name"),
    ],
)
def test_the_ledger_in_the_store_confirms(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    label: float | None,
    entry: Callable[[float], dict[str, float]] | None,
    orphan: bool,
    why: str,
) -> None:
    now = time.time()
    machine("artsky-a-1", None if label is None else now + label)
    if entry is not None:
        entered(tmp_path / "store", "artsky-a-1", **entry(now))
    found = verdicts(capsys, "--store", str(tmp_path / "store"))["artsky-a-1"]
    assert found[0] is orphan and why in found[1]


def test_without_the_store_a_label_alone_ends_nothing_and_the_user_may_pick(
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine("artsky-a-1", time.time() - 660)
    machine("artsky-b-1")
    assert not any(orphan for orphan, _ in verdicts(capsys, "--delete").values()) and ENDED == []
    assert run("gc", "--clouds", "--end", "artsky-b-1") == 0 and ENDED == ["artsky-b-1"]
    assert run("gc", "--clouds", "--end", "somebody-else") == 1 and ENDED == ["artsky-b-1"]
    assert "no machine somebody-else" in capsys.readouterr().err
    assert run("gc", "--end", "artsky-b-1") == 2


def test_a_registry_that_cannot_be_read_confirms_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    machine("artsky-a-1")
    registry_file().parent.mkdir(parents=True)
    registry_file().write_bytes(b"nonsense " * 1000)
    assert run("gc", "--clouds", "--delete") == 0 and ENDED == []
    captured = capsys.readouterr()
    assert "nothing was ended" in captured.err and "artsky-a-1" in captured.out
