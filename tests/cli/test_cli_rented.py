"""status, extend, ssh, logs, down, connect and SkyPilotBackend on a rented machine: an sshd on loopback."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_store import run

import art_sky
from art_sky.cli.rented import rented_clusters
from art_sky.config import home
from art_sky.controller.control import ControlClient
from art_sky.errors import InvalidConfig, NotFound, ServerUnreachable
from art_sky.node import logs as node_logs
from art_sky.node import records
from art_sky.store import open_store

CONTROLLER_TESTS = str(Path(__file__).parents[1] / "controller")
sys.path.insert(0, CONTROLLER_TESTS)
from local_sshd import MISSING  # noqa: E402
from ssh_cloud import SshCloud  # noqa: E402

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.fixture
def cloud(tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "cloud"
    folder.mkdir()
    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.setenv("ART_SKY_TEST_CLOUD", str(folder))
    monkeypatch.setenv("ART_SKY_PROVIDER", "ssh_cloud:provider")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([CONTROLLER_TESTS, os.environ.get("PYTHONPATH", "")]))
    yield folder
    control = home() / "controller" / "control.json"
    if control.exists():
        os.kill(json.loads(control.read_text())["pid"], signal.SIGKILL)
    for file in folder.glob("artsky-*.json"):
        SshCloud.end(file.stem)


def launch(tmp_path: Path, **options: object) -> art_sky.SkyPilotBackend:
    return asyncio.run(
        art_sky.SkyPilotBackend.initialize_cluster(
            cluster_name="run",
            store=f"file://{tmp_path / 'store'}",
            clouds=["aws"],
            **options,  # type: ignore[arg-type]
        )
    )


def test_commands_on_a_rented_cluster(cloud: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status") == 0 and not (home() / "controller").exists(), "nothing rented: no controller"
    backend = launch(tmp_path, budget=5.0, max_hours=3)
    again = art_sky.connect("run")
    assert again.inference() == backend.inference()

    end = time.monotonic() + 30
    out = ""
    while "7s of 30m" not in out or "lease of" not in out:
        assert time.monotonic() < end, out
        capsys.readouterr()
        assert run("status") == 0
        out = capsys.readouterr().out
    lease = "lease of p/agent: server node pid 7, generation 2: for 1m 01s"
    for wanted in ("g5.xlarge, aws us-east-1", "1.00", "$3.33", "2h 59m", backend.inference()[0][:-3], "held", lease):
        assert wanted in out, out
    capsys.readouterr()
    assert run("status", "--json") == 0
    view = json.loads(capsys.readouterr().out)["rented"][0]
    assert (view["state"], view["price_per_hour"], view["worst_case"]) == ("up", 1.0, pytest.approx(3.33, abs=0.01))
    assert 0 < view["spent"] < 0.1 and view["idle_seconds"] == 7 and 10000 < view["seconds_left"] < 10800
    held = {"owner": "server node pid 7", "generation": 2, "age_seconds": 61.0, "problem": None}
    assert view["leases"] == {"p/agent": held}

    assert run("extend", "run", "--hours", "2") == 0
    assert "may go on for 4h 59m" in capsys.readouterr().out
    assert run("extend", "run") == 2 and run("extend", "nobody", "--hours", "1") == 1
    assert "no rented cluster 'nobody'" in capsys.readouterr().err

    command = [sys.executable, "-m", "art_sky.cli.main", "ssh", "run", "echo", "it's", "$HOME here"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout == "it's $HOME here\n"

    assert run("logs", "run") == 0
    out = capsys.readouterr().out
    assert "controller: " in out and "ready after" in out and f"the log of {view['node']['name']}" in out

    assert run("down", "run") == 0
    captured = capsys.readouterr()
    assert "Cluster run is down (`art-sky down` or `sky down`); it cost $0.0" in captured.out
    assert "all is in the store" in captured.err
    assert list(cloud.glob("*.json")) == []
    assert run("down", "run") == 0 and run("down", "nobody") == 1
    capsys.readouterr()
    ControlClient(start=False).stop()
    assert run("status") == 0 and "No cluster is up" in capsys.readouterr().out
    assert run("status", "--all") == 0 and "run" in capsys.readouterr().out
    with pytest.raises(ServerUnreachable):
        ControlClient(start=False).status()  # for what is over no controller is started
    with pytest.raises(NotFound, match="there is no cluster 'run'"):
        art_sky.connect("run")


def test_the_logs_of_a_machine_that_is_gone(cloud: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launch(tmp_path)
    (view,) = rented_clusters()
    node = f"{view['id']}-1"
    assert run("logs", "run") == 0 and f"the log of {node}" in capsys.readouterr().out, "from the machine itself"
    assert run("logs", "run", "--node", "1") == 1 and f"{node} left no log in file://" in capsys.readouterr().err
    assert run("logs", "run", "--node", "2") == 1 and "has had 1 machines" in capsys.readouterr().err

    # As the node does, in the middle of its life and at its end.
    folder = cloud / node / ".art-sky-node"
    (folder / "logs").mkdir()
    (folder / "state" / "logs").mkdir(parents=True)
    (folder / "logs" / "node.log").write_text("installed\nserves\n")
    (folder / "state" / "logs" / "engine.log").write_text("loaded")
    records.write(folder / "secrets.json", records.Secrets(token="the-token"), 0o600)
    limits = records.NodeLimits(1, 1, 1, 1, 1)
    config = records.NodeConfig(
        view["id"], node, "aws", 1.0, False, view["store"], limits, "w", "v", [], {}, billed_from_unix=0.0
    )

    def push() -> None:
        assert node_logs.keep(folder, config, lambda: open_store(config.store), lambda _: True)

    push()
    assert run("logs", "run", "--node", "1") == 0 and "serves" in capsys.readouterr().out
    with (folder / "logs" / "node.log").open("a") as file:
        file.write("ended after 1.00 h\n")
    push()
    assert run("down", "run") == 0
    capsys.readouterr()
    assert run("logs", "run", "-n", "2") == 0
    out, err = capsys.readouterr()
    assert out.endswith("==> engine.log <==\nloaded\n==> node.log <==\nserves\nended after 1.00 h\n")
    assert f"The logs of {node} as of 20" in err and str(home() / "logs" / node) in err
    assert run("logs", "other", "--node", "1") == 1 and "no rented cluster 'other'" in capsys.readouterr().err


def test_async_with_ends_the_cluster_that_it_launched(cloud: Path, tmp_path: Path) -> None:
    async def main() -> None:
        backend = await art_sky.SkyPilotBackend.initialize_cluster(
            cluster_name="run", store=f"file://{tmp_path / 'store'}", clouds=["aws"]
        )
        async with backend:
            async with art_sky.connect("run"):
                pass
            assert list(cloud.glob("artsky-*.json")), "who connects to a cluster does not end it"

    asyncio.run(main())
    assert list(cloud.glob("artsky-*.json")) == []


def test_a_cancelled_launch_leaves_nothing(cloud: Path, tmp_path: Path) -> None:
    (cloud / "script").write_text("slow")

    async def main() -> None:
        launching = asyncio.create_task(
            art_sky.SkyPilotBackend.initialize_cluster(
                cluster_name="run", store=f"file://{tmp_path / 'store'}", clouds=["aws"]
            )
        )
        while not list(cloud.glob("artsky-*.json")):
            await asyncio.sleep(0.02)
        launching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await launching

    asyncio.run(main())
    (cloud / "go").touch()
    assert list(cloud.glob("artsky-*.json")) == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"resources": object()}, "give gpu="),
        ({"env_path": ".env"}, "no environment is copied"),
        ({"gpus": ["H100"]}, "gpus"),
        ({"budget": -1}, "budget"),
    ],
)
def test_options_that_mean_something_else_are_refused(
    cloud: Path, tmp_path: Path, options: dict[str, object], told: str
) -> None:
    with pytest.raises(InvalidConfig, match=told):
        launch(tmp_path, **options)
