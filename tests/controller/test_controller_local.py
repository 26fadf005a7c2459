"""The local cloud against a stand-in for the server: launch, observe, end, and everything that goes wrong."""

from __future__ import annotations

import _thread
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from art_sky.config import ServerConfig
from art_sky.controller import api, processes
from art_sky.controller.cloud import CLUSTER_TRANSITIONS, Cluster, LaunchConfig
from art_sky.controller.clouds.local import LocalCloud
from art_sky.errors import ArtSkyError, Conflict, CorruptObject, InvalidConfig, InvalidInput, InvalidName, NotFound

FAKE = (sys.executable, str(Path(__file__).with_name("fake_server.py")))


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[LocalCloud]:
    made = LocalCloud(tmp_path / "clusters", server=FAKE, start_seconds=20, flush_seconds=5, term_seconds=1)
    yield made
    for cluster in made.list():
        if (pid := cluster.details.get("pid")) is not None:
            processes.end_group(pid, cluster.details["identity"], 0.1)


def config(cloud: LocalCloud, name: str = "local", *, port: int = 0) -> LaunchConfig:
    server = ServerConfig(state_dir=str(cloud.folder(name) / "state"), port=port, idle_minutes=60)
    return LaunchConfig(name=name, server=server)


def quiet(_: str) -> None:
    pass


def pid_of(cluster: Cluster) -> int:
    return int(cluster.details["pid"])


def processes_naming(folder: Path) -> list[int]:
    """Live processes with this folder on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if str(folder) in (entry / "cmdline").read_text() and processes.identity(int(entry.name)):
                    found.append(int(entry.name))
            except (OSError, ValueError):
                continue
    return found


def test_launch_status_down(cloud: LocalCloud) -> None:
    told: list[str] = []
    cluster = cloud.launch(config(cloud), told.append)
    assert cluster.state == "up" and cluster.base_url is not None
    assert "started the server" in told[0]
    assert cloud.list() == [cluster] == [cloud.get("local")]
    for private in (
        Path(cluster.token_file),
        cloud.folder("local") / "config.json",
        cloud.folder("local") / "cluster.json",
    ):
        assert private.stat().st_mode & 0o777 == 0o600
    status = api.status(cluster)
    assert status.models[0].step == 3 and status.idle_limit_seconds == 3600
    assert os.getsid(pid_of(cluster)) == pid_of(cluster), "a Ctrl-C in the launching terminal must not reach it"

    ended = cloud.down("local")
    assert ended.state == "down"
    assert processes.identity(pid_of(cluster)) is None
    assert cloud.down("local") == ended, "ending what is down changes nothing"
    assert cloud.launch(config(cloud), quiet).state == "up", "the name is free again"


def test_a_name_that_is_up_is_refused_with_the_way_to_reach_it(cloud: LocalCloud) -> None:
    cluster = cloud.launch(config(cloud), quiet)
    with pytest.raises(Conflict, match=r"already up at http://127\.0\.0\.1:\d+ .*art-sky down local"):
        cloud.launch(config(cloud), quiet)
    assert cloud.get("local") == cluster
    other = cloud.launch(config(cloud, "other"), quiet)
    assert [c.name for c in cloud.list()] == ["local", "other"] and other.base_url != cluster.base_url


def test_a_server_that_dies_tells_why(cloud: LocalCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SERVER", "dies")
    with pytest.raises(ArtSkyError, match=r"ended with code 1 .*something is wrong; mend it"):
        cloud.launch(config(cloud), quiet)
    assert cloud.get("local").state == "failed"
    assert cloud.down("local").state == "down"


def test_a_silent_server_is_ended(tmp_path: Path, cloud: LocalCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SERVER", "silent")
    hasty = LocalCloud(tmp_path / "clusters", server=FAKE, start_seconds=0.3, term_seconds=1)
    with pytest.raises(ArtSkyError, match="did not answer within 0 s"):
        hasty.launch(config(cloud), quiet)
    assert processes_naming(cloud.folder("local")) == []


def test_ctrl_c_leaves_no_process(cloud: LocalCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SERVER", "silent")
    with pytest.raises(KeyboardInterrupt):
        cloud.launch(config(cloud), lambda _: _thread.interrupt_main())
    assert processes_naming(cloud.folder("local")) == []
    assert cloud.get("local").state == "failed"


def test_ctrl_c_between_birth_and_note_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = False
    with pytest.raises(KeyboardInterrupt), processes.interrupts_held():
        signal.raise_signal(signal.SIGINT)
        noted = True
    assert noted


def test_a_deaf_server_is_killed_with_its_children(cloud: LocalCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SERVER", "deaf")
    cluster = cloud.launch(config(cloud), quiet)
    child = int((cloud.folder("local") / "state" / "child.pid").read_text())
    who = processes.identity(child)
    assert cloud.down("local").state == "down"
    assert processes.identity(pid_of(cluster)) is None
    assert processes.wait_end(child, who, 5)


def test_a_killed_server_and_a_reused_process_id_are_down(cloud: LocalCloud) -> None:
    cluster = cloud.launch(config(cloud), quiet)
    record = cloud.folder("local") / "cluster.json"
    text = record.read_text()
    # The same id, but another process: this one.
    forged = json.loads(text)
    forged["details"]["pid"] = os.getpid()
    record.write_text(json.dumps(forged))
    assert cloud.get("local").state == "down"
    assert cloud.down("local").state == "down", "and this process was not harmed"
    record.write_text(text)
    os.kill(pid_of(cluster), signal.SIGKILL)
    assert processes.wait_end(pid_of(cluster), cluster.details["identity"], 5)
    assert cloud.get("local").state == "down"
    assert cloud.launch(config(cloud), quiet).state == "up"


def test_a_launch_that_was_killed_is_seen_for_what_it_left(cloud: LocalCloud) -> None:
    cluster = cloud.launch(config(cloud), quiet)
    record = cloud.folder("local") / "cluster.json"
    half = cluster.model_copy(update={"state": "starting", "base_url": None})
    record.write_text(half.model_dump_json())
    assert cloud.get("local") == cluster, "the server came up meanwhile"
    record.write_text(half.model_copy(update={"details": {}}).model_dump_json())
    assert cloud.get("local").state == "failed"
    record.write_text(half.model_dump_json())
    assert cloud.down("local").state == "down"
    assert processes.identity(pid_of(cluster)) is None


def test_two_launches_of_a_name_at_once(cloud: LocalCloud) -> None:
    def again(_: str) -> None:
        with pytest.raises(Conflict, match="another launch of cluster 'local' is under way"):
            cloud.launch(config(cloud), quiet)

    assert cloud.launch(config(cloud), again).state == "up"


def test_down_during_a_launch_ends_it(cloud: LocalCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SERVER", "silent")
    with pytest.raises(ArtSkyError, match="before it answered"):
        cloud.launch(config(cloud), lambda _: void(cloud.down("local")))
    assert cloud.get("local").state == "down"
    assert processes_naming(cloud.folder("local")) == []


def void(_: object) -> None:
    pass


def test_a_port_in_use_is_one_clear_line(cloud: LocalCloud) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Conflict, match=f"^port {port} is in use; give another with --port"):
            cloud.launch(config(cloud, port=port), quiet)
    assert cloud.list() == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_home_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o500)
    cloud = LocalCloud(tmp_path / "home" / "clusters", server=FAKE)
    with pytest.raises(InvalidInput, match="set ART_SKY_HOME"):
        cloud.launch(config(cloud), quiet)


def test_a_home_that_is_a_file_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    cloud = LocalCloud(tmp_path / "home" / "clusters", server=FAKE)
    with pytest.raises(InvalidInput, match=r"cannot write .*; set ART_SKY_HOME"):
        cloud.launch(config(cloud), quiet)


def test_a_full_disk_is_one_clear_line(cloud: LocalCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: LocalCloud, cluster: Cluster) -> None:
        raise OSError(28, "No space left on device", "cluster.json")

    monkeypatch.setattr(LocalCloud, "_write", full)
    with pytest.raises(ArtSkyError, match=r"no space left for cluster.json; free some"):
        cloud.launch(config(cloud), quiet)


def test_names(cloud: LocalCloud) -> None:
    for bad in ("../up", "a/b", "", "x" * 300, "a b"):
        with pytest.raises(InvalidName):
            cloud.folder(bad)
    cloud.launch(config(cloud, "night-run"), quiet)
    with pytest.raises(NotFound, match="did you mean 'night-run'"):
        cloud.down("nihgt-run")


def test_another_state_folder_is_refused(cloud: LocalCloud, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="state_dir"):
        cloud.launch(LaunchConfig(name="local", server=ServerConfig(state_dir=str(tmp_path))), quiet)


def test_a_broken_record_is_an_error_not_an_absence(tmp_path: Path) -> None:
    cloud = LocalCloud(tmp_path, server=FAKE)
    cloud.folder("local").mkdir(parents=True)
    (cloud.folder("local") / "cluster.json").write_text("{")
    with pytest.raises(CorruptObject, match="cannot be read"):
        cloud.get("local")


def test_every_move_is_in_the_table(monkeypatch: pytest.MonkeyPatch, cloud: LocalCloud) -> None:
    seen: list[tuple[str, str]] = []
    last: dict[str, str] = {}
    write: Callable[[LocalCloud, Cluster], None] = LocalCloud._write

    def watch(self: LocalCloud, cluster: Cluster) -> None:
        if cluster.name in last and last[cluster.name] != cluster.state:
            seen.append((last[cluster.name], cluster.state))
        last[cluster.name] = cluster.state
        write(self, cluster)

    monkeypatch.setattr(LocalCloud, "_write", watch)
    cloud.launch(config(cloud), quiet)
    cloud.down("local")
    assert seen == [("starting", "up"), ("up", "down")]
    assert all(after in CLUSTER_TRANSITIONS[before] for before, after in seen)  # type: ignore[index]


def test_identity_of_the_dead_and_of_zombies() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    who = processes.identity(process.pid)
    assert who is not None and who == processes.identity(process.pid)
    assert process.stdin is not None
    process.stdin.close()
    assert processes.wait_end(process.pid, who, 5), "it has ended, although nobody has reaped it"
    process.wait()
    assert processes.identity(process.pid) is None
