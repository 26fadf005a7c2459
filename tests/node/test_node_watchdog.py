"""The watchdog with real processes: each way in which a node ends."""

from __future__ import annotations

import dataclasses
import http.server
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node_harness import SECRETS, Node, alive

from art_sky.node import credentials, guard, records
from art_sky.node.metadata import Metadata
from art_sky.node.watchdog import HUNG_SECONDS, RESERVE_BYTES

JOB = {"project": "p", "name": "m", "request_id": "r1", "state": "running"}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(**changes: Any) -> Node:
        nodes.append(Node(tmp_path / f"node{len(nodes)}", **changes))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


def test_an_idle_node_ends_and_says_why(make: Callable[..., Node], capfd: pytest.CaptureFixture[str]) -> None:
    node = make(limits={"idle_minutes": 1}).control(working=True).send_secrets().start()
    pid = node.serving()
    time.sleep(1.0)  # 100 s of work
    assert node.seen().phase == "serving" and node.seen().idle_seconds < 60
    node.control(working=False)
    state = node.ended()
    assert (state.ending, state.not_flushed, state.server_starts) == ("idle", [], 1)
    assert not alive(pid)
    assert "all is in the store" in capfd.readouterr().out.splitlines()[-1]
    assert (node.folder / "ledger-began").exists()
    assert json.loads((node.folder / "ledger-ended").read_text())["ending"] == "idle"
    assert state.poweroff  # nothing of SkyPilot here: the guard does the rest


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"budget": 0.1}, "budget"), ({"max_hours": 0.05}, "max_hours"), ({"budget": 0.0}, "budget")],
)
def test_money_and_age_end_a_busy_node(make: Callable[..., Node], limits: dict[str, float], reason: str) -> None:
    node = make(limits=limits).control(working=True).send_secrets().start()
    state = node.ended()
    assert state.ending == reason
    assert state.age_seconds / 3600 * 2.0 == pytest.approx(state.spent)
    if limits.get("budget") != 0.0:
        assert 180 <= state.age_seconds <= 180 + 120  # 3 minutes, and at most the flush


def test_steps_of_the_wall_clock_change_nothing(make: Callable[..., Node]) -> None:
    node = make(limits={"max_hours": 0.1}).control(working=True).send_secrets().start()
    node.serving()
    for skew in (86400.0, -86400.0, 0.0):
        node.clock.skew = skew
        time.sleep(0.2)
    assert node.seen().phase == "serving" and node.seen().age_seconds < 360
    assert 360 <= node.ended().age_seconds <= 480


def test_a_watchdog_that_comes_back_goes_on_counting(make: Callable[..., Node]) -> None:
    node = make(limits={"max_hours": 1})
    before = node.clock.now()
    old = records.WatchdogState(boot_id="an earlier boot", boottime=9e9, pid=1, phase="serving", age_seconds=3000.0)
    records.write(node.folder / "watchdog.json", old)
    node.clock.skew = -1e6
    node.start()
    assert node.until(lambda s: s.boot_id == "boot").age_seconds >= 3000 + before.boottime
    node.watchdog.stopped = True
    node.ended()
    later = make(limits={"max_hours": 1})
    counted = guard.GuardState(str(later.folder), "boot", 50.0, 4000.0, 0.0, 1.0, 1.0, "aws", "n")
    guard.write_state(later.guard_state, counted)
    assert later.start().ended().ending == "max_hours"


def test_an_extension_takes_effect_and_a_broken_one_does_not(make: Callable[..., Node]) -> None:
    node = make(limits={"max_hours": 0.05}).control(working=True).send_secrets()
    (node.folder / "extend.json").write_text('{"max_hours": NaN}')
    node.start().serving()
    longer = dataclasses.replace(node.config.limits, max_hours=0.1)
    records.write(node.folder / "extend.json", longer)
    assert node.ended().age_seconds >= 360


def test_a_node_without_its_controller_finishes_its_jobs_and_ends(make: Callable[..., Node]) -> None:
    node = make(limits={"orphan_minutes": 1}).control(working=True, jobs=[JOB]).send_secrets().start()
    node.serving()
    for _ in range(6):  # the controller beats while nothing is done
        (node.folder / "beat").touch()
        time.sleep(0.2)
    node.control(working=False, jobs=[JOB])  # the job waits, say for its trainer's restart
    time.sleep(1.0)
    assert node.seen().phase == "serving"
    node.control(working=False, jobs=[{**JOB, "state": "committed"}])
    assert node.ended().ending == "orphan"


def test_beats_keep_a_node_that_waits_for_its_controller(make: Callable[..., Node]) -> None:
    node = make(factor=50.0, limits={"orphan_minutes": 1}).send_secrets().start()
    node.serving()
    for _ in range(20):
        (node.folder / "beat").touch()
        time.sleep(0.1)
    assert node.seen().phase == "serving"
    assert node.ended().ending == "orphan"


def test_a_job_that_does_not_move_keeps_no_node(make: Callable[..., Node]) -> None:
    node = make(limits={"idle_minutes": 0.5, "flush_minutes": 0.5})
    node.control(working=False, finishes=False, jobs=[JOB]).send_secrets().start()
    state = node.ended()
    assert (state.ending, state.not_flushed) == ("idle", ["p/m r1"])
    assert float((node.state / "drained").read_text()) == pytest.approx(20, abs=1)  # a third is left for its own end


def test_a_hung_server_is_replaced_and_idleness_goes_on(make: Callable[..., Node]) -> None:
    node = make(factor=50.0, limits={"idle_minutes": 30}).send_secrets().start()
    pid = node.serving()
    idle = node.seen().idle_seconds
    os.kill(pid, signal.SIGSTOP)
    node.until(lambda s: s.phase == "starting")
    assert not alive(pid)
    assert node.serving() != pid
    state = node.until(lambda s: s.idle_seconds > idle + HUNG_SECONDS)
    assert state.server_starts >= 2 and state.server_url is not None


@pytest.mark.parametrize("served", [True, False])
def test_a_server_that_keeps_failing_ends_the_node(make: Callable[..., Node], served: bool) -> None:
    node = make().control(exits=not served, jobs=[JOB]).send_secrets().start()
    if served:
        pid = node.serving()
        time.sleep(0.2)
        node.control(exits=True, jobs=[JOB])
        os.kill(pid, signal.SIGKILL)
    state = node.ended()
    assert state.ending == ("server" if served else "health")
    assert state.server_starts == 4
    assert state.not_flushed == (["p/m r1"] if served else [])


def test_a_server_that_never_answers_is_given_up(make: Callable[..., Node]) -> None:
    node = make(limits={"setup_minutes": 1}).send_secrets()
    (node.folder / "python").write_text("#!/bin/sh\nexec sleep 100\n")
    began = time.monotonic()
    assert node.start().ended().ending == "health"
    assert time.monotonic() - began < 10


def test_a_setup_that_hangs_or_fails_ends_the_node_with_all_it_started(make: Callable[..., Node]) -> None:
    node = make(limits={"setup_minutes": 1})
    node.install = f"sleep 1000 & echo $! > {node.folder}/child; wait"
    state = node.start().ended()
    assert state.ending == "setup"
    assert not alive(int((node.folder / "child").read_text()))
    failed = make()
    failed.install = "exit 1"
    assert failed.start().ended().ending == "setup"


def test_a_node_without_a_readable_node_json_ends(make: Callable[..., Node]) -> None:
    node = make()
    (node.folder / "node.json").write_text("{}")
    assert node.start().ended().ending == "setup"


def test_secrets_that_never_come_end_the_node(make: Callable[..., Node]) -> None:
    node = make(factor=400.0)
    (node.folder / "secrets.json").write_text('{"token": ""}')
    state = node.start().ended()
    assert state.ending == "secrets" and state.age_seconds >= 600


def test_a_failure_of_the_watchdog_itself_ends_the_server_and_is_told(
    make: Callable[..., Node], capfd: pytest.CaptureFixture[str]
) -> None:
    node = make().control(jobs=[JOB]).send_secrets().start()
    pid = node.serving()
    node.until(lambda s: (node.folder / "ledger-began").exists())

    def broken(now: float) -> None:
        raise RuntimeError("a defect")

    node.watchdog._serving = broken  # type: ignore[method-assign]
    state = node.ended()
    assert (state.ending, state.not_flushed) == ("watchdog", ["p/m r1"])
    assert not alive(pid) and "a defect" in capfd.readouterr().err


def test_a_full_disk_stops_the_heartbeat_only(make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the machine ends then is the guard's decision."""
    node = make(limits={"idle_minutes": 1}).send_secrets().start()
    node.serving()
    write = records.write_whole

    def full(path: Path, *arguments: Any) -> None:
        if path.name == "watchdog.json" and full.on:  # type: ignore[attr-defined]
            raise OSError(28, "No space left on device")
        write(path, *arguments)

    full.on = True  # type: ignore[attr-defined]
    monkeypatch.setattr(records, "write_whole", full)
    before = node.seen()
    time.sleep(0.3)
    assert node.seen() == before
    full.on = False  # type: ignore[attr-defined]
    assert node.ended().ending == "idle"


def test_a_disk_that_stays_full_ends_the_node_in_order(
    make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before the guard would end the machine without a flush; what was put aside makes room for the last words."""
    node = make().control(working=True, jobs=[JOB]).send_secrets().start()
    node.serving()
    reserve, write = node.folder / "reserve", records.write_whole
    assert reserve.stat().st_blocks * 512 >= RESERVE_BYTES

    def full(path: Path, *arguments: Any) -> None:
        if reserve.exists():
            raise OSError(28, "No space left on device")
        write(path, *arguments)

    monkeypatch.setattr(records, "write_whole", full)
    before = node.seen()
    state = node.ended()
    assert (state.ending, state.not_flushed) == ("disk", []) and (node.state / "drained").exists()
    assert state.ending_boottime is not None and not reserve.exists()
    assert state.ending_boottime - before.boottime < guard.SILENT_SECONDS / 2
    assert "disk is full, --disk asks for a larger one; all is in the store" in capfd.readouterr().out


def test_a_full_disk_keeps_no_program_from_its_next_start(
    make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": "secret"}
    node = make().send_secrets(dataclasses.replace(SECRETS, store_env=store, hf_token="hf")).start()
    pid = node.serving()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(credentials, "write_whole", full)
    os.kill(pid, signal.SIGKILL)
    node.until(lambda s: s.server_starts == 2 and s.phase == "serving")


@pytest.mark.parametrize("skew", [300.0, -300.0])
def test_a_clock_that_is_minutes_off_moves_the_end_by_no_more(make: Callable[..., Node], skew: float) -> None:
    """Between the laptop, whose time of the launch the node was told, and the node."""
    node = make(factor=200.0, limits={"max_hours": 0.2}).control(working=True)
    node.clock.skew = skew
    node.send_secrets().start()
    began = node.clock.now().boottime
    state = node.ended()
    assert state.ending == "max_hours" and state.ending_boottime is not None
    assert 720 - 300 - 30 <= state.ending_boottime - began <= 720 + 30


# --- asked ---


def test_a_node_that_is_asked_to_end_finishes_accepted_jobs(make: Callable[..., Node]) -> None:
    node = make().control(working=True, finishes=False, jobs=[JOB]).send_secrets().start()
    node.serving()
    (node.folder / "end").touch()
    node.until(lambda s: s.phase == "flushing")
    assert node.seen().ending == "asked" and node.seen().ending_boottime is not None
    node.control(finishes=True, jobs=[])
    pid = json.loads((node.state / "server.json").read_text())["pid"]
    os.kill(pid, signal.SIGTERM)  # as the server's own end after its last job
    assert node.ended().not_flushed == []
    assert float((node.state / "drained").read_text()) == 90  # 2 minutes less 30 s


def test_a_flush_has_a_deadline_and_names_what_is_lost(
    make: Callable[..., Node], capfd: pytest.CaptureFixture[str]
) -> None:
    node = make(factor=20.0, limits={"flush_minutes": 1})
    pid = node.control(finishes=False, jobs=[JOB]).send_secrets().start().serving()
    time.sleep(0.5)
    os.kill(pid, signal.SIGSTOP)  # not even SIGTERM is answered
    node.watchdog.stopped = True
    state = node.ended()
    assert (state.ending, state.not_flushed) == ("stopped", ["p/m r1"])
    assert state.ending_boottime is not None
    assert state.boottime - state.ending_boottime < 60 + 60  # the second that a socket gets here is 20 s of its clock
    assert not alive(pid) and capfd.readouterr().out.splitlines()[-1].endswith("not flushed: p/m r1")


@pytest.mark.parametrize("way", ["logs-fail", "logs-hang"])
def test_a_log_that_was_not_pushed_is_named(
    make: Callable[..., Node], capfd: pytest.CaptureFixture[str], way: str
) -> None:
    node = make().control(working=True).send_secrets()
    (node.folder / way).touch()
    node.start().serving()
    node.watchdog.stopped = True
    state = node.ended()
    assert (state.ending, state.not_flushed) == ("stopped", ["the end of its log"])
    assert state.ending_boottime is not None
    assert state.boottime - state.ending_boottime < 60 + 60
    assert capfd.readouterr().out.splitlines()[-1] == "art-sky: not flushed: the end of its log"


# --- secrets ---


def test_no_secret_is_in_an_environment_or_readable_by_others(make: Callable[..., Node]) -> None:
    store = {
        "AWS_ACCESS_KEY_ID": "AKIATHEKEY",
        "AWS_SECRET_ACCESS_KEY": "the-secret-key",
        "AWS_CREDENTIAL_EXPIRATION": "2026-12-01T00:00:00Z",
        "AWS_REGION": "eu-west-1",
    }
    secrets = records.Secrets(token="the-token", store_env=store, hf_token="the-hf-token")
    node = make()
    python = {"executable": str(node.folder / "python"), "path": None, "vllm": "/opt/vllm/python"}
    records.write_whole(node.folder / "python.json", json.dumps(python))
    pid = node.send_secrets(secrets).start().serving()
    environment = json.loads((node.state / "environment.json").read_text())
    everything = json.dumps(environment) + Path(f"/proc/{pid}/cmdline").read_text()
    for secret in ("AKIATHEKEY", "the-secret-key", "the-token", "the-hf-token"):
        assert secret not in everything
        for file in node.folder.rglob("*"):
            if file.is_file() and secret in file.read_text():
                assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert environment["ART_SKY_VLLM_PYTHON"] == "/opt/vllm/python"
    assert environment["AWS_REGION"] == "eu-west-1" and "PYTHONPATH" not in environment
    assert Path(environment["HF_TOKEN_PATH"]).read_text() == "the-hf-token"
    # A fresh credential reaches the running server through the file.
    fresh = dataclasses.replace(secrets, store_env={**store, "AWS_SECRET_ACCESS_KEY": "a-fresh-one"})
    node.send_secrets(fresh)
    credential = node.folder / "store-credential.json"
    deadline = time.monotonic() + 10
    while json.loads(credential.read_text())["SecretAccessKey"] != "a-fresh-one":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    # In the last flush too.
    node.control(finishes=False, jobs=[JOB])
    node.watchdog.stopped = True
    node.until(lambda s: s.phase == "flushing")
    node.send_secrets(dataclasses.replace(secrets, store_env={**store, "AWS_SECRET_ACCESS_KEY": "the-last-one"}))
    while json.loads(credential.read_text())["SecretAccessKey"] != "the-last-one":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_boto3_finds_the_credential_and_its_expiry(tmp_path: Path) -> None:
    import botocore.session

    from art_sky.node.credentials import environment

    store = {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_SESSION_TOKEN": "session"}
    expiring = {**store, "AWS_CREDENTIAL_EXPIRATION": "2099-01-01T00:00:00Z"}
    folder = tmp_path / "with a space"
    folder.mkdir()
    for given, refreshed in ((store, False), (expiring, True)):
        secrets = dataclasses.replace(SECRETS, store_env=given)
        with pytest.MonkeyPatch.context() as patch:
            for name in [n for n in os.environ if n.startswith("AWS_")]:
                patch.delenv(name)
            for name, value in environment(secrets, folder, {}).items():
                patch.setenv(name, value)
            found = botocore.session.Session().get_credentials()
            assert (found.access_key, found.secret_key, found.token) == ("AKIA", "secret", "session")
            assert hasattr(found, "refresh_needed") is refreshed


# --- preemption ---


class Cloud:
    """A metadata service."""

    def __init__(self) -> None:
        self.answers: dict[str, str] = {}
        cloud = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                self._answer("aws-token" if self.headers["X-aws-ec2-metadata-token-ttl-seconds"] else None)

            def do_GET(self) -> None:
                known = (
                    self.headers["X-aws-ec2-metadata-token"] == "aws-token"
                    or self.headers["Metadata-Flavor"] == "Google"
                    or self.headers["Metadata"] == "true"
                )
                self._answer(cloud.answers.get(self.path.partition("?")[0]) if known else None)

            def _answer(self, text: str | None) -> None:
                self.send_response(200 if text is not None else 404)
                self.send_header("content-length", str(len(text or "")))
                self.end_headers()
                self.wfile.write((text or "").encode())

            def log_message(self, *_: object) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def metadata(self, node: Node) -> Metadata:
        return Metadata(node.config.cloud, node.clock, ("127.0.0.1", self.server.server_port))


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    cloud = Cloud()
    yield cloud
    cloud.server.shutdown()
    cloud.server.server_close()


AZURE = {"Events": [{"EventType": "Reboot"}, {"EventType": "Preempt", "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT"}]}


@pytest.mark.parametrize(
    ("name", "path", "quiet", "notice", "at"),
    [
        ("aws", "/latest/meta-data/spot/instance-action", None,
         '{"action": "terminate", "time": "2017-09-18T08:22:00Z"}', 1505722920.0),
        ("gcp", "/computeMetadata/v1/instance/preempted", "FALSE", "TRUE", None),
        ("azure", "/metadata/scheduledevents", '{"Events": [{"EventType": "Reboot"}]}',
         json.dumps(AZURE), 1474309787.0),
    ],
)  # fmt: skip
def test_a_notice_ends_a_spot_node_in_the_time_there_is(
    make: Callable[..., Node], cloud: Cloud, name: str, path: str, quiet: str | None, notice: str, at: float | None
) -> None:
    node = make(cloud=name, spot=True, limits={"flush_minutes": 30})
    node.metadata = cloud.metadata(node)
    if quiet is not None:
        cloud.answers[path] = quiet
    node.control(working=True, finishes=False, jobs=[JOB]).send_secrets().start()
    node.serving()
    time.sleep(0.2)
    assert node.seen().phase == "serving"
    cloud.answers[path] = notice
    state = node.ended()
    assert state.ending == "preempted"
    assert at is None or state.preemption_unix == at
    assert float((node.state / "drained").read_text()) <= 60  # not the 30 minutes


def test_advice_is_no_notice_and_a_machine_on_demand_is_not_asked(
    make: Callable[..., Node], cloud: Cloud, capfd: pytest.CaptureFixture[str]
) -> None:
    node = make(spot=True)
    node.metadata = cloud.metadata(node)
    cloud.answers["/latest/meta-data/events/recommendations/rebalance"] = '{"noticeTime": "2020-10-27T08:22:00Z"}'
    node.send_secrets().start().serving()
    node.until(lambda s: "likelier" in capfd.readouterr().out)
    assert node.seen().phase == "serving"
    cloud.answers["/latest/meta-data/spot/instance-action"] = '{"time": "x"}'
    assert node.ended().preemption_unix == pytest.approx(time.time() + 120, abs=30)
    on_demand = make(spot=False, limits={"idle_minutes": 0.2})
    on_demand.metadata = cloud.metadata(on_demand)
    assert on_demand.send_secrets().start().ended().ending == "idle"


def test_instances_are_known_by_their_metadata(make: Callable[..., Node], cloud: Cloud) -> None:
    for name, answers, expected in [
        ("aws", {"/latest/dynamic/instance-identity/document":
                 '{"instanceId": "i-1", "region": "us-east-1", "instanceType": "p5.4xlarge"}'},
         ("i-1", "us-east-1", "p5.4xlarge")),
        ("gcp", {"/computeMetadata/v1/instance/id": "123",
                 "/computeMetadata/v1/instance/zone": "projects/1/zones/us-central1-a",
                 "/computeMetadata/v1/instance/machine-type": "projects/1/machineTypes/a3-highgpu-1g"},
         ("123", "us-central1", "a3-highgpu-1g")),
        ("azure", {"/metadata/instance/compute": '{"vmId": "v", "location": "eastus", "vmSize": "S"}'},
         ("v", "eastus", "S")),
        ("aws", {"/latest/dynamic/instance-identity/document": "not json"}, ("", "", "")),
    ]:  # fmt: skip
        cloud.answers = answers
        found = cloud.metadata(make(cloud=name)).instance()
        assert (found.id, found.region, found.type) == expected


# --- the process itself ---


def test_the_watchdog_s_death_ends_the_server_and_its_successor_counts_on(tmp_path: Path) -> None:
    """As on a node: `python3 -m art_sky.node.watchdog` in a home folder, killed, then asked by SIGTERM."""
    home = tmp_path / "home"
    node = Node(home / ".art-sky-node", factor=1.0)
    records.write(node.folder / "node.json", dataclasses.replace(node.config, billed_from_unix=time.time() - 50))
    # In place of the installation: what it finds done is not done again.
    (node.folder / "w.whl").write_bytes(b"")
    venv = node.folder / "venv"
    venv.mkdir()
    (venv / "bin").mkdir()
    (venv / "bin" / "python").symlink_to(node.folder / "python")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    packages = [str(node.folder / "w.whl"), "--constraint", str(node.folder / "constraints.txt")]
    (venv / "installed.json").write_text(json.dumps({"version": empty, "packages": packages}))
    node.send_secrets()
    command = [sys.executable, "-m", "art_sky.node.watchdog"]
    environment = {**os.environ, "HOME": str(home)}
    first = subprocess.Popen(command, env=environment)
    pid = node.serving()
    first.kill()
    first.wait()
    deadline = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    second = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    state = node.until(lambda s: s.pid == second.pid and s.phase == "serving")
    assert 50 <= state.age_seconds < 120
    for child in Path(f"/proc/{second.pid}/task/{second.pid}/children").read_text().split():
        if Path(f"/proc/{child}/comm").read_text() == "tee\n":
            os.kill(int(child), signal.SIGTERM)  # SkyPilot may end a job's processes in any order
    second.send_signal(signal.SIGTERM)
    output, _ = second.communicate(timeout=30)
    assert second.returncode == 0 and output.splitlines()[-1].endswith(
        "told to stop, by SkyPilot or by its machine; all is in the store"
    )
    log = (node.folder / "logs" / "node.log").read_text()
    assert log.endswith(output) and log.count("on aws, $2.00/h") == 2  # of both, and all that was said
