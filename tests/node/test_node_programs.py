"""The small programs of a node: receive, beat, install, autostop, ledger."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_harness import Node

from art_sky.errors import StoreError
from art_sky.node import autostop, install, ledger, receive, records
from art_sky.node.autostop import Autostop
from art_sky.node.metadata import Instance
from art_sky.store import open_store
from art_sky.store.folder import FolderStore


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path / "home" / ".art-sky-node")
    yield node
    node.close()


def run(node: Node, program: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"art_sky.node.{program}", *arguments]
    environment = {**os.environ, "HOME": str(node.folder.parent)}
    return subprocess.run(command, input=stdin, env=environment, capture_output=True, text=True, timeout=30)


# --- receive ---


def test_secrets_come_by_stdin_into_a_file_of_mode_0600(node: Node) -> None:
    secrets = records.Secrets(token="the-token", store_env={"AWS_REGION": "eu-west-1"})
    done = run(node, "receive", "secrets", stdin=json.dumps(dataclasses.asdict(secrets)))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    file = node.folder / "secrets.json"
    assert records.read(file, records.Secrets) == secrets and stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "cannot be read as Secrets"),
        ('{"token": "the-token", "other', "cannot be read as Secrets"),
        ('{"token": " "}', "no token"),
        ('{"token": "the-token", "store_env": {"AWS_ACCESS_KEY_ID": "AKIA"}}', "one half"),
        ('{"token": "the-token", "store_env": {"LD_PRELOAD": "x"}}', "holds LD_PRELOAD; known are AWS_ACCESS_KEY_ID"),
        ('{"token": "the-token", "hf_token": "two\\nlines"}', "not one line"),
    ],
)
def test_what_is_no_secrets_changes_nothing_and_is_not_repeated(node: Node, text: str, says: str) -> None:
    done = run(node, "receive", "secrets", stdin=text)
    assert done.returncode == 1 and says in done.stderr and "the-token" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (node.folder / "secrets.json").exists()


def test_limits_are_checked_before_they_replace_others(node: Node) -> None:
    longer = dataclasses.replace(node.config.limits, max_hours=200)
    assert run(node, "receive", "extend", stdin=json.dumps(dataclasses.asdict(longer))).returncode == 0
    assert records.read(node.folder / "extend.json", records.NodeLimits) == longer
    endless = json.dumps(dataclasses.asdict(longer)).replace("200", "Infinity")
    refused = run(node, "receive", "extend", stdin=endless)
    assert refused.returncode == 1 and "max_hours" in refused.stderr
    assert records.read(node.folder / "extend.json", records.NodeLimits) == longer
    assert run(node, "receive", "nothing").returncode == 2


def test_the_hook_waits_for_the_flush_and_never_for_a_dead_watchdog(node: Node) -> None:
    clock = node.clock
    assert receive.wait_until_ended(node.folder, clock) == "no watchdog runs here"
    node.control(working=True).send_secrets().start().serving()
    (node.folder / "end").touch()
    assert receive.wait_until_ended(node.folder, clock) == "the watchdog has ended: `art-sky down` or `sky down`"
    assert node.ended().ending == "asked"
    old = records.WatchdogState(boot_id="boot", boottime=clock.now().boottime - 61, pid=1, phase="serving")
    records.write(node.folder / "watchdog.json", old)
    assert "does not beat" in receive.wait_until_ended(node.folder, clock)
    done = run(node, "receive", "flush")
    assert done.returncode == 0 and "does not beat" in done.stdout and (node.folder / "end").exists()


# --- beat ---


def test_beats_touch_the_file_answer_with_the_state_and_end_with_stdin(node: Node) -> None:
    command = [sys.executable, "-m", "art_sky.node.beat"]
    environment = {**os.environ, "HOME": str(node.folder.parent)}
    beat = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, bufsize=1
    )
    assert beat.stdin is not None and beat.stdout is not None
    beat.stdin.write("\n")
    assert json.loads(beat.stdout.readline()) == {}
    file = node.folder / "beat"
    before = file.stat().st_mtime_ns
    records.write(node.folder / "watchdog.json", records.WatchdogState("b", 1.0, 2, "serving"))
    time.sleep(0.02)
    beat.stdin.write("\n")
    assert json.loads(beat.stdout.readline())["phase"] == "serving"
    assert file.stat().st_mtime_ns > before
    beat.stdin.close()
    assert beat.wait(10) == 0


# --- install ---


def wheel(folder: Path, requires: str = "") -> Path:
    """A wheel that installs one module and may require something."""
    file = folder / "tiny_node_wheel-1.0-py3-none-any.whl"
    info = "tiny_node_wheel-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("tiny_node_wheel.py", "HERE = 1\n")
        needs = f"Requires-Dist: {requires}\n" if requires else ""
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-node-wheel\nVersion: 1.0\n{needs}")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        names = ("tiny_node_wheel.py", f"{info}/METADATA", f"{info}/WHEEL")
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in (*names, f"{info}/RECORD")))
    return file


def test_an_image_that_has_everything_is_used_as_it_is(node: Node) -> None:
    file = wheel(node.folder, "pydantic>=2")
    config = dataclasses.replace(node.config, wheel=file.name, packages=["httpx"], vllm_packages=["httpx"])
    found = install.install(node.folder, config, Path("/nowhere"))
    assert found == install.Python(sys.executable, str(node.folder / "site"), sys.executable)
    code = "import tiny_node_wheel; print(tiny_node_wheel.__file__)"
    done = subprocess.run(
        [found.executable, "-c", code], env={"PYTHONPATH": str(found.path)}, capture_output=True, text=True
    )
    assert done.stdout.startswith(str(node.folder / "site"))


@pytest.mark.parametrize(("requires", "packages"), [("no-such-package-here", []), ("", ["httpx==0.0.1"])])
def test_an_image_that_lacks_something_is_not_used(node: Node, requires: str, packages: list[str]) -> None:
    file = wheel(node.folder, requires)
    assert not install.has_all(Path(sys.executable), [str(file), *packages])
    assert not install.has_all(Path("/nowhere/python"), [str(file)])


def test_a_virtual_environment_is_made_once(
    node: Node, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = wheel(node.folder)
    config = dataclasses.replace(node.config, wheel=file.name)
    nothing = (Path("/nowhere"), Path("/nowhere/python"))
    config = dataclasses.replace(config, vllm_packages=[str(file)])
    found = install.install(node.folder, config, *nothing)
    assert found.vllm == str(node.folder / "vllm/bin/python") and Path(found.vllm).exists()  # its own environment
    code = "import tiny_node_wheel; print(tiny_node_wheel.__file__)"
    done = subprocess.run([found.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith(str(node.folder / "venv")), done.stderr
    capfd.readouterr()
    assert install.install(node.folder, config, *nothing) == found
    assert "installed before" in capfd.readouterr().out
    # Another list of packages is another environment; one that fails leaves no marker.
    commands: list[str] = []

    def fails(command: list[str]) -> None:
        commands.append(command[0])
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(install, "run", fails)
    with pytest.raises(subprocess.CalledProcessError):
        install.install(node.folder, dataclasses.replace(config, packages=["other"]), *nothing)
    assert commands  # uv where there is one, then venv and pip
    assert not (node.folder / "venv" / "installed.json").exists()


def test_an_installation_that_fails_is_one_line_and_leaves_no_python(node: Node) -> None:
    (node.folder / "python.json").unlink()
    assert run(node, "install", str(node.folder)).returncode == 1  # no wheel
    assert not (node.folder / "python.json").exists()


# --- SkyPilot's autodown ---

# SkyPilot's own modules on a node, as autostop_lib.py and psutil look to the check. `boot` is the machine's boot time.
SKYLET = """
import enum, pathlib, pickle, types
HERE = pathlib.Path(__file__).parent
class AutostopWaitFor(enum.Enum):
    JOBS_AND_SSH = 'jobs_and_ssh'
    JOBS = 'jobs'
def get_autostop_config():
    try:
        return types.SimpleNamespace(**eval((HERE / 'setting').read_text(), {'AutostopWaitFor': AutostopWaitFor}))
    except FileNotFoundError:
        wait_for = AutostopWaitFor.JOBS_AND_SSH
        return types.SimpleNamespace(autostop_idle_minutes=-1, boot_time=-1, wait_for=wait_for, down=False)
def set_autostop(idle_minutes, backend, wait_for, down):
    assert backend == 'cloudvmray'
    if not (HERE / 'broken').exists():
        import psutil
        values = f"boot_time={psutil.boot_time()}, wait_for={wait_for}, down={down}"
        (HERE / 'setting').write_text(f'dict(autostop_idle_minutes={idle_minutes}, {values})')
"""


def check(tool: Autostop, node: Node, takes: float = 0.0) -> None:
    """One whole check, the next one a minute later."""
    tool.step()
    node.clock.skipped += takes
    deadline = time.monotonic() + 20
    while tool._child is not None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
        tool.step()
    node.clock.skipped += 60


@pytest.fixture
def skylet(tmp_path: Path) -> Path:
    folder = tmp_path / "lib" / "sky" / "skylet"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    (folder / "autostop_lib.py").write_text(SKYLET)
    (folder.parent.parent / "psutil.py").write_text(
        "import pathlib\ndef boot_time(): return float(pathlib.Path(__file__).with_name('boot').read_text())\n"
    )
    (folder.parent.parent / "boot").write_text("100.0")
    python = tmp_path / "sky-python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder.parent.parent} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def test_a_lost_autodown_is_armed_again(tmp_path: Path, skylet: Path, capfd: pytest.CaptureFixture[str]) -> None:
    node = Node(tmp_path / "node", factor=1.0)
    tool = Autostop(node.clock, skylet)
    setting = tmp_path / "lib" / "sky" / "skylet" / "setting"
    check(tool, node)
    assert "armed again" in capfd.readouterr().out and "boot_time=100.0" in setting.read_text()
    assert "wait_for=AutostopWaitFor.JOBS, down=True" in setting.read_text()
    check(tool, node)
    assert capfd.readouterr().out == "" and tool.failures == 0
    (tmp_path / "lib" / "boot").write_text("3700.0")  # the wall clock was stepped
    check(tool, node)
    assert "armed again" in capfd.readouterr().out and "boot_time=3700.0" in setting.read_text()
    setting.write_text(setting.read_text().replace("JOBS", "JOBS_AND_SSH"))  # a shell would keep the bill running
    check(tool, node)
    assert "AutostopWaitFor.JOBS," in setting.read_text()


def test_an_autodown_that_cannot_be_armed_counts(tmp_path: Path, skylet: Path) -> None:
    node = Node(tmp_path / "node", factor=1.0)
    (tmp_path / "lib" / "sky" / "skylet" / "broken").touch()
    tool = Autostop(node.clock, skylet)
    check(tool, node)
    check(tool, node)
    assert tool.failures == 2
    (tmp_path / "lib" / "sky" / "skylet" / "broken").unlink()
    check(tool, node)
    assert tool.failures == 0
    hanging = tmp_path / "hanging"
    hanging.write_text("#!/bin/sh\nsleep 1000 & wait\n")
    hanging.chmod(0o755)
    tool = Autostop(node.clock, hanging)
    check(tool, node, takes=51.0)
    assert tool.failures == 1
    tool = Autostop(node.clock, tmp_path / "nothing")
    check(tool, node)
    assert tool.failures == 1


def test_a_node_whose_autodown_is_lost_ends_through_the_guard(tmp_path: Path, skylet: Path) -> None:
    node = Node(tmp_path / "node", factor=200.0).control(working=True).send_secrets()
    (tmp_path / "lib" / "sky" / "skylet" / "broken").touch()
    node.autostop = Autostop(node.clock, skylet)
    state = node.start().ended()
    assert state.ending == "autostop" and state.poweroff


def test_skypilot_s_python_is_found_where_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKY_RUNTIME_DIR", str(tmp_path))
    assert autostop.skypilot_python() is None
    usual = tmp_path / "skypilot-runtime" / "bin" / "python"
    usual.parent.mkdir(parents=True)
    usual.touch()
    assert autostop.skypilot_python() == usual
    (tmp_path / ".sky").mkdir()
    (tmp_path / "other").touch()
    (tmp_path / ".sky" / "python_path").write_text(f"{tmp_path / 'other'}\n")
    assert autostop.skypilot_python() == tmp_path / "other"


# --- ledger ---

INSTANCE = Instance("i-1", "us-east-1", "p5.4xlarge")


def stored_entry(node: Node) -> records.LedgerEntry:
    key = records.ledger_key(node.config.cluster, node.config.node)
    return records.parse(open_store(node.config.store).get(key).data.decode(), records.LedgerEntry, key)


def test_the_ledger_is_kept_through_failures_of_the_store_until_it_is_closed(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(node.config.store)
    waits: list[float] = []
    fails = [StoreError("no access; mend it"), None, None, StoreError("gone; mend it"), None]

    def connect() -> FolderStore:
        failure = fails.pop(0)
        if failure is not None:
            raise failure
        return store  # type: ignore[return-value]

    def closed(seconds: float) -> bool:
        waits.append(seconds)
        if len(waits) == 2:
            now = node.clock.now()
            state = records.WatchdogState(now.boot_id, now.boottime, 1, "ended", ending="idle", age_seconds=3600.0)
            records.write(node.folder / "watchdog.json", state)
        return len(waits) == 4

    ledger.keep(node.folder, node.config, INSTANCE, connect, closed)  # type: ignore[arg-type]
    assert waits == [60.0] * 4
    assert "no access" in capsys.readouterr().out
    entry = stored_entry(node)
    assert (entry.instance, entry.reason, entry.closed_unix) == ("i-1", "idle", None)
    assert entry.until_unix == pytest.approx(entry.seen_unix + 99 * 3600 + 120)


def test_the_latest_end_follows_the_budget_and_its_extension(node: Node) -> None:
    config = dataclasses.replace(node.config, limits=dataclasses.replace(node.config.limits, budget=5.0))
    state = records.WatchdogState("b", 1.0, 1, "serving", age_seconds=3600.0, spent=2.0)
    records.write(node.folder / "watchdog.json", state)
    assert ledger.entry(node.folder, config, INSTANCE, 1e9).until_unix == 1e9 + 1.5 * 3600 + 120
    records.write(node.folder / "extend.json", dataclasses.replace(config.limits, budget=8.0))
    assert ledger.entry(node.folder, config, INSTANCE, 1e9).until_unix == 1e9 + 3 * 3600 + 120


def test_the_program_writes_at_once_and_once_more_when_its_stdin_closes(node: Node) -> None:
    records.write(node.folder / "watchdog.json", records.WatchdogState("b", 1.0, 1, "ended", ending="budget"))
    records.write(node.folder / "node.json", dataclasses.replace(node.config, cloud="lambda"))
    assert run(node, "ledger", str(node.folder)).returncode == 0
    assert stored_entry(node).reason == "budget"
