"""The guard decides from its own state and a clock nobody can set; it ends the machine when nothing above it does."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import http.server
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import art_sky
from art_sky.node import guard, records
from art_sky.node.guard import GuardState, Heartbeat, Moment, decide

MAX_AGE, FLUSH = 7200.0, 300.0
LIMITS = records.NodeLimits(idle_minutes=30, max_hours=2, orphan_minutes=15, flush_minutes=5, setup_minutes=20)
CONFIG = records.NodeConfig(
    cluster="artsky-00c0ffee", node="artsky-00c0ffee-1", cloud="aws", price_per_hour=1.5, spot=True,
    store="s3://bucket", limits=LIMITS, wheel="art_sky.whl", version="0.1.0", packages=[], server={},
    billed_from_unix=time.time(),
)  # fmt: skip
STATE = GuardState("/home/u/.art-sky-node", "boot", 1000.0, 0.0, 0.0, MAX_AGE, FLUSH, "aws", "artsky-00c0ffee-1")


def beat(at: float, boot: str = "boot", **fields: object) -> Heartbeat:
    return Heartbeat(boot, at, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "now", "heartbeat", "says"),
    [
        ({}, 1060, beat(1055), None),
        ({}, 1355, beat(1056), None),
        ({}, 1356, beat(1056), "does not beat"),
        ({}, 1599, None, None),
        ({}, 1600, None, "no watchdog came up"),
        # an impossible heartbeat is none
        ({}, 1060, beat(9999), None),
        ({}, 1600, beat(9999), "no watchdog came up"),
        # heartbeats of an earlier boot are none either, however young they look
        ({"silent": 590.0}, 1060, beat(1055, "earlier"), "no watchdog came up"),
        ({"age": MAX_AGE + FLUSH + 719.0}, 1060, beat(1055), None),
        ({"age": MAX_AGE + FLUSH + 720.0}, 1060, beat(1055), "older than its limits"),
        # the end: SkyPilot has 10 minutes, unless there is none
        ({}, 1400, beat(1056, ended=True, ending_boottime=1050.0), None),
        ({}, 1656, beat(1056, ended=True, ending_boottime=1050.0), "was not torn down"),
        ({}, 1060, beat(1056, ended=True, ending_boottime=1050.0, poweroff=True), "asked the guard"),
        ({}, 1060, beat(1056, poweroff=True), None),
        # a flush may take its time, and no more
        ({}, 1949, beat(1945, ending_boottime=1050.0), None),
        ({}, 1950, beat(1945, ending_boottime=1050.0), "flush takes too long"),
        # what was decided stays decided
        ({"reason": "no watchdog came up"}, 1060, beat(1055), "no watchdog came up"),
    ],
)
def test_decision(state: dict[str, object], now: float, heartbeat: Heartbeat | None, says: str | None) -> None:
    after = decide(dataclasses.replace(STATE, **state), Moment("boot", now), heartbeat)
    assert (says in after.reason) if says and after.reason else after.reason == says


GAPS = st.floats(50.0, 170.0)  # between ticks, some of them missed


@given(st.lists(GAPS, min_size=300, max_size=300), st.floats(0, 9.9), st.floats(0, MAX_AGE * 2))
def test_a_machine_is_gone_within_its_bounds_and_never_before(gaps: list[float], late: float, dies: float) -> None:
    """The watchdog beats until `dies`. Ticks come when they come."""
    state, at = dataclasses.replace(STATE, boottime=0.0), 0.0
    for gap in gaps:
        at += gap
        state = decide(state, Moment("boot", at), beat(max(min(at - late, dies), 0.0)))
        if state.reason is not None:
            break
    oldest = MAX_AGE + FLUSH + guard.AGE_MARGIN_SECONDS
    due = min(dies + guard.SILENT_SECONDS, oldest)
    assert due <= at <= due + max(gaps)


@given(st.lists(st.tuples(GAPS, st.booleans(), st.floats(10.0, 90.0)), min_size=30, max_size=60))
def test_a_machine_that_was_rebooted_is_gone_however_often_it_reboots(
    steps: list[tuple[float, bool, float]],
) -> None:
    """No watchdog comes back after the first reboot. A reboot comes right before a tick, the worst moment, and the
    machine takes `down` seconds until its new boot; nothing on it counts these."""
    state, boot, booted = dataclasses.replace(STATE, boottime=0.0), 0, 0.0
    at = uncounted = 0.0
    for n, (gap, reboots, down) in enumerate(steps):
        if n == 0 or reboots:
            at += gap + down
            uncounted += gap + down
            boot, booted = boot + 1, at
        first = 60.0
        at += first if booted == at else gap
        state = decide(state, Moment(f"boot {boot}", at - booted), beat(1.0, "boot 0"))
        if state.reason is not None:
            break
    assert state.reason == "no watchdog came up"
    assert at <= uncounted + guard.NO_WATCHDOG_SECONDS + 170.0


@given(st.floats(0, 2e9), st.floats(0, 2e9), st.floats(0, 1e6))
def test_no_wall_clock_makes_a_new_machine_older_than_it_can_be(unix: float, billed: float, boottime: float) -> None:
    age = guard.first_age(Moment("boot", boottime), unix, billed)
    assert 0 <= age <= boottime + guard.PROVISION_SECONDS
    if 0 <= unix - billed <= boottime:
        assert age == unix - billed


# --- on a machine: files and commands below a root of the test ---


class Machine:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "home" / ".art-sky-node"
        self.folder.mkdir(parents=True)
        self.commands: list[str] = []
        self.fails: Callable[[str], bool] = lambda command: False
        self.configure(CONFIG)

    def configure(self, config: records.NodeConfig) -> None:
        records.write(self.folder / "node.json", config)

    def run(self, command: Sequence[str]) -> bool:
        self.commands.append(" ".join(command))
        return not self.fails(self.commands[-1])

    def arm(self) -> int:
        return guard.arm(self.folder, self.root, self.run)

    def tick(self, at: float | None = None, **options: str) -> int:
        self.commands.clear()
        return guard.tick(self.root, self.run, **options)

    @property
    def state(self) -> GuardState:
        return guard.read_state(self.root / guard.STATE)

    def watchdog(self, **fields: object) -> None:
        now = guard.this_moment()
        values: dict[str, object] = {"boot_id": now.boot_id, "boottime": now.boottime, "pid": 1, "phase": "serving"}
        records.write(self.folder / "watchdog.json", records.WatchdogState(**(values | fields)))  # type: ignore[arg-type]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


OFF = ["systemctl poweroff"]


def test_arming_installs_a_timer_that_survives_a_reboot(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    (machine.folder / "end").touch()
    machine.watchdog(phase="ended")
    assert machine.arm() == 0 and "armed" in capsys.readouterr().out
    assert machine.commands[1] == "systemctl enable --now art-sky-guard.timer"
    timer = (machine.root / guard.UNITS / "art-sky-guard.timer").read_text()
    assert "OnBootSec=1min" in timer and "WantedBy=timers.target" in timer
    service = (machine.root / guard.UNITS / "art-sky-guard.service").read_text()
    assert f"/{guard.LIBRARY} tick" in service
    assert (machine.root / guard.LIBRARY).read_bytes() == Path(guard.__file__).read_bytes()
    assert (machine.state.max_age, machine.state.flush, machine.state.node) == (MAX_AGE, FLUSH, CONFIG.node)
    assert sorted(f.name for f in machine.folder.iterdir()) == ["node.json"]  # nothing of an earlier job
    assert machine.tick() == 0 and machine.commands == []


def test_a_budget_bounds_the_age_and_arming_again_does_not_start_it_anew(machine: Machine) -> None:
    machine.configure(dataclasses.replace(CONFIG, limits=dataclasses.replace(LIMITS, budget=0.75)))
    machine.arm()
    assert machine.state.max_age == 1800.0
    older = dataclasses.replace(machine.state, age=5000.0, silent=500.0)
    guard.write_state(machine.root / guard.STATE, older)
    machine.arm()
    assert 5000.0 <= machine.state.age < 5100.0 and machine.state.silent == 0.0


def test_a_machine_without_systemd_is_not_guarded_and_says_so(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.fails = lambda command: "is-active" in command
    assert machine.arm() == 1 and "use an image with systemd" in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "", "{}", "[1]", '{"limits": {"max_hours": 2}}', "Infinity"])
def test_a_node_json_that_cannot_be_read_ends_the_machine(
    machine: Machine, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is None:
        (machine.folder / "node.json").unlink()
    else:
        (machine.folder / "node.json").write_text(text)
    assert machine.arm() == 1 and "node.json" in capsys.readouterr().err
    assert "systemctl enable --now art-sky-guard.timer" in machine.commands
    assert machine.tick() == 0 and machine.commands == OFF


@pytest.mark.parametrize("limit", ["Infinity", "NaN", "-1", "0", '"x"', "null"])
def test_limits_that_never_end_are_no_limits(machine: Machine, limit: str) -> None:
    machine.arm()
    text = json.dumps(dataclasses.asdict(LIMITS)).replace('"max_hours": 2', f'"max_hours": {limit}')
    (machine.folder / "extend.json").write_text(text)
    machine.tick()
    assert machine.state.max_age == MAX_AGE and machine.state.reason is None


def test_an_extension_counts_from_the_next_tick(machine: Machine) -> None:
    machine.arm()
    guard.write_state(machine.root / guard.STATE, dataclasses.replace(machine.state, age=4e4))
    records.write(machine.folder / "extend.json", dataclasses.replace(LIMITS, max_hours=12))
    machine.watchdog()
    assert machine.tick() == 0 and machine.commands == [] and machine.state.max_age == 43200.0
    (machine.folder / "extend.json").unlink()
    assert machine.tick() == 0 and machine.commands == OFF


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: None,
        lambda text: "",
        lambda text: text[:-9],
        lambda text: "{}",
        lambda text: text.replace('"age"', '"ago"'),
        lambda text: json.dumps(json.loads(text) | {"age": -1}),
        lambda text: json.dumps(json.loads(text) | {"age": float("nan")}),
        lambda text: json.dumps(json.loads(text) | {"silent": "x"}),
    ],
)
def test_a_state_that_cannot_be_read_ends_the_machine(
    machine: Machine, spoil: Callable[[str], str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    machine.arm()
    file = machine.root / guard.STATE
    text = spoil(file.read_text())
    file.unlink() if text is None else file.write_text(text)
    machine.watchdog()
    assert machine.tick() == 0 and machine.commands == OFF
    assert "state cannot be read" in capsys.readouterr().out


def test_a_power_off_that_fails_is_tried_otherwise_and_again_at_each_tick(machine: Machine) -> None:
    machine.arm()
    machine.fails = lambda command: command.startswith("systemctl")
    guard.write_state(machine.root / guard.STATE, dataclasses.replace(machine.state, silent=1e3))
    assert machine.tick() == 0
    assert machine.commands == ["systemctl poweroff", "systemctl poweroff --force", "poweroff -f"]
    machine.watchdog()  # too late
    machine.fails = lambda command: False
    assert machine.tick() == 0 and machine.commands == ["systemctl poweroff --force"]
    machine.fails = lambda command: True
    assert machine.tick() == 1 and machine.commands[0] == "poweroff -f" and len(machine.commands) == 2
    assert machine.tick() == 1 and "sysrq" in machine.commands[0] and machine.state.tries == 4


def test_a_full_disk_does_not_stop_the_guard(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.arm()
    machine.watchdog(boottime=guard.this_moment().boottime - 301)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(guard, "write_state", full)
    assert machine.tick() == 0 and machine.commands == OFF


@given(st.text(max_size=60) | st.sampled_from(['{"boot_id": 1, "boottime": null}', '{"boottime": {}}', "[" * 200000]))
def test_any_watchdog_file_is_read_or_taken_for_none(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "watchdog.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        assert guard.read_heartbeat(Path(folder)) is None


# --- Lambda, where power-off ends no bill ---


@pytest.fixture
def lambda_api() -> Iterator[tuple[str, list[dict[str, object]], dict[str, int]]]:
    calls: list[dict[str, object]] = []
    answers = {"status": 200}
    names = {"a": "artsky-00c0ffee-1-head", "b": "artsky-00c0ffee-11-x-head", "c": "mine", "d": None}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({"data": [{"id": i, "name": n} for i, n in names.items()]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            calls.append({"path": self.path, "key": self.headers["authorization"], **body})
            self._answer({"data": {}})

        def _answer(self, value: object) -> None:
            data = json.dumps(value).encode()
            self.send_response(answers["status"])
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", calls, answers
    server.shutdown()
    server.server_close()


def test_on_lambda_the_provider_is_asked_and_only_for_this_node(
    machine: Machine, lambda_api: tuple[str, list[dict[str, object]], dict[str, int]]
) -> None:
    api, calls, answers = lambda_api
    machine.configure(dataclasses.replace(CONFIG, cloud="lambda"))
    machine.arm()
    guard.write_state(machine.root / guard.STATE, dataclasses.replace(machine.state, silent=1e3))
    keys = machine.folder.parent / ".lambda_cloud" / "lambda_keys"
    keys.parent.mkdir()
    keys.write_text("api_key = secret-key\n")
    answers["status"] = 500
    assert machine.tick(lambda_api=api) == 1 and calls == []
    assert machine.commands == []  # powered off it could not try again
    answers["status"] = 200
    assert machine.tick(lambda_api=api) == 0
    assert calls == [{"path": "/instance-operations/terminate", "key": "Bearer secret-key", "instance_ids": ["a"]}]
    keys.unlink()
    assert machine.tick(lambda_api=api) == 0 and machine.commands and len(calls) == 1


# --- as a file ---


def test_the_copy_is_made_from_within_a_wheel_too(tmp_path: Path) -> None:
    package = Path(art_sky.__file__).parent
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as wheel:
        for file in (package / "__init__.py", *(package / "node").glob("*.py")):
            wheel.write(file, f"art_sky/{file.relative_to(package)}")
    code = (
        "import runpy, sys, hashlib; g = runpy.run_module('art_sky.node.guard', run_name='guard', alter_sys=True); "
        "print(hashlib.sha256(g['_own_source']()).hexdigest(), 'w.whl' in g['__file__'])"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(tmp_path / "w.whl")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [hashlib.sha256(Path(guard.__file__).read_bytes()).hexdigest(), "True"], done.stderr


def test_only_the_installed_copy_ticks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert guard.main(["tick"]) == 2 and "run `guard arm FOLDER`" in capsys.readouterr().err
    assert guard.main(["arm"]) == 2 and guard.main([]) == 2
    copy = tmp_path / "guard.py"
    copy.write_bytes(Path(guard.__file__).read_bytes())
    found = runpy.run_path(str(copy))  # needs nothing of the package
    assert found["main"](["tick"]) == 2


def test_everything_on_a_node_but_the_ledger_is_python_3_9() -> None:
    package = Path(art_sky.__file__).parent
    for file in (package / "__init__.py", *(package / "node").glob("*.py")):
        ast.parse(file.read_text(), feature_version=(3, 9))
    code = (
        "import sys\nfor m in 'autostop beat clock credentials guard install ledger metadata receive records rules "
        "server_process task watchdog'.split(): __import__('art_sky.node.' + m)\n"
        "print([m for m in ('pydantic', 'httpx', 'boto3', 'art_sky.errors', 'art_sky.store') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.stdout.strip() == "[]", done.stderr
