"""The controller as a process: machines are sshds on loopback. Started when needed, killed, found again."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_cloud import FakeWorld
from local_sshd import MISSING
from ssh_cloud import SshCloud

from art_sky.config import home
from art_sky.controller import daemon
from art_sky.controller.control import ControlClient
from art_sky.controller.processes import identity
from art_sky.controller.provider import Wanted
from art_sky.controller.registry import Registry
from art_sky.controller.rented import LaunchRequest
from art_sky.controller.secrets import token_file
from art_sky.errors import Conflict, CorruptObject, InvalidInput, LaunchFailed, NotFound, VersionMismatch

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
FOURTH = {"AWS_ACCESS_KEY_ID": "fourth"}
PLAN = [dataclasses.asdict(o) for o in SshCloud.offers(Wanted())]


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "cloud"
    folder.mkdir()
    monkeypatch.setenv("ART_SKY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ART_SKY_TEST_CLOUD", str(folder))
    monkeypatch.setenv("ART_SKY_PROVIDER", "ssh_cloud:provider")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    yield folder
    pid = controller_pid()
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    for file in folder.glob("artsky-*.json"):
        SshCloud.end(file.stem)


@pytest.fixture
def control(cloud: Path) -> ControlClient:
    return ControlClient()


def controller_pid() -> int | None:
    try:
        pid = int(json.loads((home() / "controller" / "control.json").read_text())["pid"])
        return pid if identity(pid) is not None else None
    except (OSError, ValueError):
        return None


def request(tmp_path: Path, **fields: Any) -> LaunchRequest:
    return LaunchRequest(**{"name": "run", "store": f"file://{tmp_path / 'store'}", **fields})


def wait(condition: Callable[[], Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, (home() / "controller" / "controller.log").read_text()
        time.sleep(0.05)


def ask(view: dict[str, Any], token: str) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=60) as client:
        return client.get(f"{view['base_url']}/who", headers={"Authorization": f"Bearer {token}"})


def up(control: ControlClient, tmp_path: Path, **fields: Any) -> dict[str, Any]:
    view = control.launch(request(tmp_path, **fields), PLAN, hf_token="hf-secret")
    return control.watch(view["id"], "up", lambda e: None, owner=True)


def test_launch_use_kill_and_down(control: ControlClient, cloud: Path, tmp_path: Path) -> None:
    told: list[str] = []
    begun = control.launch(request(tmp_path), PLAN, hf_token="hf-secret")
    view = control.watch(begun["id"], "up", lambda e: told.append(e["text"]), owner=True)
    assert view["state"] == "up" and "asking for a machine" in told[1], told
    token = token_file("run").read_text()
    assert token_file("run").stat().st_mode & 0o077 == 0
    reply = ask(view, token)
    assert reply.json()["node"] == view["node"]["name"] and ask(view, "wrong").status_code == 401
    received = json.loads((cloud / view["node"]["name"] / ".art-sky-node" / "received-secrets").read_text())
    assert (received["token"], received["hf_token"]) == (token, "hf-secret")
    for where in (home() / "controller").rglob("*"):
        if where.is_file() and not where.name.endswith(".whl"):
            assert token.encode() not in where.read_bytes() and b"hf-secret" not in where.read_bytes(), where

    # The same launch again is what is there; another is refused with what differs.
    assert control.launch(request(tmp_path), PLAN)["id"] == view["id"]
    with pytest.raises(Conflict, match=r"cluster 'run' is up and differs: gpus is \[\], not \['H100'\]"):
        control.launch(request(tmp_path, gpus=["H100"]), PLAN)

    # kill -9: the next command starts another controller, same address, same token, same machine.
    pid = controller_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait(lambda: controller_pid() is None)
    again = control.status()[0]
    assert controller_pid() not in (None, pid) and again["base_url"] == view["base_url"]
    assert ask(view, token).json()["node"] == view["node"]["name"]
    wait(lambda: control.status()[0]["idle_seconds"] == 7.0)

    extended = control.extend("run", 2.0, 0.0)
    assert extended["told"] is True and extended["extended_hours"] == 2.0
    limits = json.loads((cloud / view["node"]["name"] / ".art-sky-node" / "received-extend").read_text())
    assert limits["max_hours"] == 26.0

    control.down("run")
    ended = control.watch(view["id"], "gone", lambda e: told.append(e["text"]))
    assert ended["state"] == "down" and ended["ended"] == "`art-sky down` or `sky down`"
    assert list(cloud.glob("*.json")) == []
    assert any("all is in the store" in text for text in told)

    # A new run of the name has the same address and token.
    second = up(control, tmp_path)
    assert second["base_url"] == view["base_url"] and token_file("run").read_text() == token
    assert second["id"] != view["id"]


def test_a_vanished_machine_is_replaced_behind_the_same_address(
    control: ControlClient, cloud: Path, tmp_path: Path
) -> None:
    view = up(control, tmp_path)
    token = token_file("run").read_text()
    wait(lambda: control.status()[0]["models"] == ["p/agent"])
    SshCloud.end(view["node"]["name"])
    wait(lambda: control.status()[0]["state"] != "up")
    reply = ask(view, token)  # held until the next one is up
    assert reply.json()["node"] == f"{view['id']}-2"


def test_a_fresh_credential_reaches_a_node_that_serves(control: ControlClient, cloud: Path, tmp_path: Path) -> None:
    file, keys = tmp_path / "key", {"AWS_ACCESS_KEY_ID": "first", "AWS_SECRET_ACCESS_KEY": "s3cret"}

    def received() -> str:
        folder = cloud / view["node"]["name"] / ".art-sky-node"
        found: str = json.loads((folder / "received-secrets").read_text())["store_env"]["AWS_ACCESS_KEY_ID"]
        return found

    launched = control.launch(request(tmp_path, store_credential=str(file)), PLAN, store_env=keys)
    view = control.watch(launched["id"], "up", lambda e: None, owner=True)
    assert received() == "first"
    # Written by whoever renews it.
    file.write_text("AWS_ACCESS_KEY_ID=second\nAWS_SECRET_ACCESS_KEY=s3cret\n")
    wait(lambda: received() == "second")
    assert control.status()[0]["store_credential"] == {"expires": None, "problem": None}
    file.unlink()
    # By hand, as `art-sky extend --store-credential` does.
    assert control.extend("run", 0.0, 0.0, {**keys, "AWS_ACCESS_KEY_ID": "third"})["told"] is True
    assert received() == "third"
    # With the same launch again.
    again = control.launch(request(tmp_path, store_credential=str(file)), PLAN, store_env={**keys, **FOURTH})
    assert again["id"] == view["id"]
    wait(lambda: received() == "fourth")
    for where in (home() / "controller").rglob("*"):
        if where.is_file() and not where.name.endswith(".whl"):
            assert b"s3cret" not in where.read_bytes(), where
    for secrets in (home() / "clusters").rglob("secrets.json"):
        assert secrets.stat().st_mode & 0o077 == 0


def test_a_machine_with_a_role_takes_no_credential(control: ControlClient, tmp_path: Path) -> None:
    up(control, tmp_path)
    with pytest.raises(InvalidInput, match="reaches the store by its role"):
        control.extend("run", 0.0, 0.0, {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s"})


def test_a_launch_whose_owner_is_killed_leaves_nothing(control: ControlClient, cloud: Path, tmp_path: Path) -> None:
    (cloud / "script").write_text("slow")
    begun = control.launch(request(tmp_path), PLAN)
    program = (
        "from art_sky.controller.control import ControlClient\n"
        f"ControlClient().watch({begun['id']!r}, 'up', lambda e: print(e, flush=True), owner=True)"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    owner.stdout.readline()
    wait(lambda: list(cloud.glob("artsky-*.json")))
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait(lambda: control.status()[0]["wanted"] == "down")
    wait(lambda: list(cloud.glob("artsky-*.json")) == [])
    (cloud / "go").touch()
    ended = control.watch(begun["id"], "gone", lambda e: None)
    assert ended["state"] == "down" and list(cloud.glob("artsky-*.json")) == []


def test_a_controller_killed_during_a_launch_is_followed_by_one_that_goes_on(
    control: ControlClient, cloud: Path, tmp_path: Path
) -> None:
    (cloud / "script").write_text("slow")
    begun = control.launch(request(tmp_path), PLAN)
    found: list[dict[str, Any]] = []
    watching = threading.Thread(
        target=lambda: found.append(control.watch(begun["id"], "up", lambda e: None, owner=True))
    )
    watching.start()
    wait(lambda: list(cloud.glob("artsky-*.json")))
    pid = controller_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    watching.join(90)
    assert found and found[0]["state"] == "up" and found[0]["nodes"] == 2
    assert [f.stem for f in cloud.glob("artsky-*.json")] == [f"{begun['id']}-2"]


def test_no_capacity_is_the_launch_s_error(control: ControlClient, cloud: Path, tmp_path: Path) -> None:
    (cloud / "script").write_text("none")
    begun = control.launch(request(tmp_path), PLAN)
    with pytest.raises(LaunchFailed, match=r"no candidate could be rented .*us-east-1 has none"):
        control.watch(begun["id"], "up", lambda e: None, owner=True)


def test_many_callers_start_one_controller(control: ControlClient) -> None:
    results: list[list[dict[str, Any]]] = []
    threads = [threading.Thread(target=lambda: results.append(control.status())) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[]] * 6
    log = (home() / "controller" / "controller.log").read_text()
    assert log.count("controller of art-sky") == 1
    folder = home() / "controller"
    sockets = Path(json.loads((folder / "control.json").read_text())["socket"]).parent
    assert folder.stat().st_mode & 0o077 == 0 and sockets.stat().st_mode & 0o077 == 0


def test_a_second_controller_leaves_everything_to_the_first(control: ControlClient, tmp_path: Path) -> None:
    view, pid = up(control, tmp_path), controller_pid()
    second = subprocess.run([sys.executable, "-m", "art_sky.controller"], capture_output=True, text=True, timeout=60)
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert controller_pid() == pid and control.status()[0]["node"]["name"] == view["node"]["name"]
    assert ask(view, token_file("run").read_text()).status_code == 200


def test_what_is_asked_wrongly_is_told(control: ControlClient, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no rented cluster 'nobody'"):
        control.down("nobody")
    with pytest.raises(InvalidInput, match="more than 0"):
        control.extend("nobody", 0, 0)
    with pytest.raises(InvalidInput, match="no offer"):
        control.launch(request(tmp_path), [])


def test_another_release_is_refused_with_the_mend(control: ControlClient, monkeypatch: pytest.MonkeyPatch) -> None:
    control.status()
    monkeypatch.setattr("art_sky.controller.control.__version__", "9.9.9")
    with pytest.raises(VersionMismatch, match=f"run `kill {controller_pid()}` and call again"):
        control.status()


def test_a_registry_that_cannot_be_read_starts_no_controller(control: ControlClient) -> None:
    file = home() / "controller" / "registry.sqlite"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"nonsense " * 1000)
    with pytest.raises(Exception, match="nothing was ended") as e:
        control.status()
    assert not isinstance(e.value, CorruptObject) or "gc --clouds" in e.value.message


async def test_a_registry_that_is_locked_for_a_while_ends_no_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the limits of a machine nor its end depend on whoever has the file open."""
    monkeypatch.setenv("ART_SKY_HOME", str(tmp_path))
    monkeypatch.setattr(daemon, "AFTER_ERROR_SECONDS", 0.05)
    world = FakeWorld(tmp_path / "registry.sqlite")
    world.provider.script = ["hang"]
    id = world.launch()
    world.run(id, lambda c: c.node is not None and c.node.state == "provisioning")
    world.registry.close()
    registry = Registry(tmp_path / "registry.sqlite", busy_seconds=0.05)
    registry.update(id, lambda c: c.model_copy(update={"wanted": "down"}))
    running = asyncio.create_task(daemon.Daemon(tmp_path, registry, world.provider).run())
    other = sqlite3.connect(tmp_path / "registry.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    await asyncio.sleep(1.0)
    assert not running.done() and world.provider.ends == []
    asked = await asyncio.to_thread(ControlClient(tmp_path, start=False).status)
    assert asked[0]["name"] == "run", "what only reads is answered meanwhile"
    other.execute("ROLLBACK")
    async with asyncio.timeout(30):
        while not world.provider.ends:
            await asyncio.sleep(0.02)
    await asyncio.to_thread(ControlClient(tmp_path, start=False).stop)
    await running
    registry.close()
