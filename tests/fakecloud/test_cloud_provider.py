"""Our provider with the real SkyPilot: a node's life, and what clouds do instead."""

from __future__ import annotations

import http.server
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cloud_harness import CPU_OFFER, Progress, order, provider, ssh, wait
from fakecloud_session import LAPTOP_KEY, LAPTOP_SECRET, FakeCloud

from art_sky.controller.clouds.skypilot import SkyPilotProvider
from art_sky.controller.provider import Machine
from art_sky.errors import CloudError, LaunchFailed, NoCapacity, NoCredentials, NoQuota, ProviderUnavailable

pytestmark = [pytest.mark.cloud, pytest.mark.timeout(900)]

# Where people keep keys, and what SkyPilot would copy of them; each holds the word PLANTED.
KEYS = {
    ".cloudflare/r2.credentials": "[r2]\naws_access_key_id = R2PLANTED\naws_secret_access_key = R2SECRETPLANTED\n",
    ".cloudflare/accountid": "R2ACCOUNTPLANTED",
    ".cache/huggingface/token": "hf_PLANTED",
    ".lambda_cloud/lambda_keys": "api_key = LAMBDAPLANTED\n",
    ".runpod/config.toml": '[default]\napi_key = "RUNPODPLANTED"\n',
    ".kube/config": "apiVersion: v1\nkind: Config\nusers: [{name: PLANTED, user: {token: PLANTED}}]\n",
    ".config/gcloud/credentials.db": "GCPPLANTED",
    ".config/gcloud/application_default_credentials.json": '{"type": "authorized_user", "client_id": "PLANTED", '
    '"client_secret": "PLANTED", "refresh_token": "PLANTED"}',
}


@pytest.fixture
def sky(fakecloud: FakeCloud, tmp_path: Path) -> Iterator[SkyPilotProvider]:
    yield provider(fakecloud, tmp_path)
    fakecloud.clear_faults()


def live(cloud: FakeCloud, node: str) -> list[str]:
    return [i.id for i in cloud.instances(live=True) if i.tags.get("art-sky-node") == node]


def test_a_node_from_launch_to_its_end(fakecloud: FakeCloud, sky: SkyPilotProvider, tmp_path: Path) -> None:
    for path, text in KEYS.items():
        (fakecloud.home / path).parent.mkdir(parents=True, exist_ok=True)
        (fakecloud.home / path).write_text(text)
    assert sky.check() == {"aws": None}
    node = "artsky-00000001-1"
    asked, progress = order(tmp_path, "artsky-00000001", CPU_OFFER), Progress()
    machine = sky.launch(asked, progress)
    print("\nphases begin after", progress.phases, "s; launched after", round(time.monotonic() - progress.began, 1))
    assert list(progress.phases) == ["provision", "runtime", "files", "job"]
    assert machine.seen == "running" and machine.labels.items() >= asked.labels.items()
    (instance,) = (i for i in fakecloud.instances(live=True) if i.id == machine.instance)
    assert instance.shutdown_behavior == "terminate" and instance.type == "m6i.large"

    assert sky.find(node) == machine
    assert ssh(fakecloud, machine, "hostname").stdout.startswith("ip-10-77-")
    said: list[str] = []

    def log() -> str:
        said.clear()
        sky.logs(node, False, said.append)
        return "".join(said)

    wait("the guard and the watchdog", lambda: "guard: armed" in (text := log()) and "on aws, $0.10/h" in text, 120)
    # SkyPilot handed both to cloud-init: ours, and the one of the user's own settings.
    assert "art-sky-first-boot" in fakecloud.on_host(machine.instance, ["systemctl", "list-timers"]).stdout
    assert fakecloud.on_host(machine.instance, ["cat", "/var/own-command"]).stdout == "ran\n"
    assert fakecloud.ports(machine.instance) == [22]
    own = Path(machine.key_file).read_text().splitlines()[3]  # of SkyPilot's SSH key
    for secret in (LAPTOP_KEY, LAPTOP_SECRET, "PLANTED", own):
        assert fakecloud.grep_disk(machine.instance, secret) == [], secret
    assert [(m.node, m.seen) for m in sky.list() if m.node == node] == [(node, "running")]

    began = time.monotonic()
    sky.end(node)
    wait("the end", lambda: sky.find(node).seen == "absent", 120)
    print("ended within", round(time.monotonic() - began, 1), "s")
    assert not live(fakecloud, node)
    sky.end(node)  # once more does no harm
    with pytest.raises(CloudError, match="not launched from this computer"):
        sky.end("artsky-00000001-9")


@pytest.mark.parametrize(
    ("code", "kind"), [("InsufficientInstanceCapacity", NoCapacity), ("VcpuLimitExceeded", NoQuota)]
)
def test_a_refusal_of_the_cloud_is_typed_at_once_and_leaves_nothing(
    fakecloud: FakeCloud, sky: SkyPilotProvider, tmp_path: Path, code: str, kind: type[CloudError]
) -> None:
    fakecloud.capacity_error("m6i.large", "us-east-1", code)
    before, began = len(fakecloud.instances()), time.monotonic()
    with pytest.raises(kind, match=code):
        sky.launch(order(tmp_path, "artsky-00000002", CPU_OFFER), Progress())
    print("\nrefused after", round(time.monotonic() - began, 1), "s")
    assert len(fakecloud.instances()) == before  # and no other type or region was tried
    assert sky.find("artsky-00000002-1").seen == "absent"


def test_keys_that_are_refused_are_named(fakecloud: FakeCloud, sky: SkyPilotProvider, tmp_path: Path) -> None:
    asked = order(tmp_path, "artsky-00000003", CPU_OFFER)
    fakecloud.expire_credentials(LAPTOP_KEY)
    with pytest.raises(NoCredentials, match="ExpiredToken"):
        sky.launch(asked, Progress())
    with pytest.raises(NoCredentials, match="ExpiredToken"):
        sky.find("artsky-00000003-1")


@pytest.mark.slow
def test_a_machine_that_was_made_though_the_cloud_said_no(
    fakecloud: FakeCloud, sky: SkyPilotProvider, tmp_path: Path
) -> None:
    """SkyPilot makes another one: the first is ended by its label, and the second is the node."""
    node = "artsky-00000004-1"
    fakecloud.error_but_created()
    machine = sky.launch(order(tmp_path, "artsky-00000004", CPU_OFFER), Progress())
    assert live(fakecloud, node) == [machine.instance]
    assert ssh(fakecloud, machine, "hostname").stdout.startswith("ip-10-77-")
    fakecloud.fail_terminate(2)
    began = time.monotonic()

    def gone() -> bool:
        try:
            sky.end(node)
        except CloudError as e:
            print(e)
        return sky.find(node).seen == "absent"

    wait("the end, with two failures", gone, 180)
    print("\nended within", round(time.monotonic() - began, 1), "s although two terminations failed")
    assert not live(fakecloud, node)


def test_a_skypilot_server_of_another_version_is_refused_and_left_alone(fakecloud: FakeCloud, tmp_path: Path) -> None:
    with fakecloud.inside():
        server = http.server.HTTPServer(("127.0.0.1", 0), OldServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sky = provider(fakecloud, tmp_path, SKYPILOT_API_SERVER_LOCAL_PORT=str(server.server_port))
    try:
        with pytest.raises(ProviderUnavailable, match=r"another version.*`sky api stop`"):
            sky.check()
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_skypilots_server_dies_in_a_launch(fakecloud: FakeCloud, sky: SkyPilotProvider, tmp_path: Path) -> None:
    node = "artsky-00000005-1"
    try:
        failure = in_launch(fakecloud, sky, tmp_path, "artsky-00000005", lambda: kill_sky_server(fakecloud))
        assert isinstance(failure, ProviderUnavailable | LaunchFailed), failure
        assert live(fakecloud, node)  # a machine without anybody who knows it
        sky.end(node)  # starts a server of its own
        wait("the end", lambda: sky.find(node).seen == "absent", 180)
        assert not live(fakecloud, node)
    finally:
        fakecloud.kill_laptop()  # what the dead server left keeps the next one from starting


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["provision", "runtime"])
def test_end_in_the_middle_of_a_launch_leaves_nothing(
    fakecloud: FakeCloud, sky: SkyPilotProvider, tmp_path: Path, phase: str
) -> None:
    cluster = {"provision": "artsky-00000006", "runtime": "artsky-00000007"}[phase]
    node, began = f"{cluster}-1", [0.0]

    def end() -> None:
        began[0] = time.monotonic()
        sky.end(node)

    failure = in_launch(fakecloud, sky, tmp_path, cluster, end, phase)
    assert isinstance(failure, LaunchFailed)
    wait("the end", lambda: sky.find(node).seen == "absent", 180)
    print("\nended within", round(time.monotonic() - began[0], 1), "s")
    time.sleep(5)  # nothing that SkyPilot still does makes one
    assert not live(fakecloud, node)


class OldServer(http.server.BaseHTTPRequestHandler):
    """Answers like SkyPilot's server before it told its version in headers."""

    def do_GET(self) -> None:
        body = b'{"status": "healthy", "api_version": "1", "version": "0.9.0", "commit": "c"}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def in_launch(
    cloud: FakeCloud, sky: SkyPilotProvider, folder: Path, cluster: str, act: object, phase: str = "runtime"
) -> Exception | Machine:
    """Launches, calls `act` when `phase` begins and a machine is there; how the launch ended."""
    progress, ended = Progress(), []
    asked = order(folder, cluster, CPU_OFFER)

    def launch() -> None:
        try:
            ended.append(sky.launch(asked, progress))
        except CloudError as e:
            ended.append(e)

    thread = threading.Thread(target=launch)
    thread.start()
    wait(phase, lambda: phase in progress.phases, 120)
    act()  # type: ignore[operator]
    thread.join(180)
    assert ended, "the launch goes on"
    return ended[0]


def kill_sky_server(cloud: FakeCloud) -> None:
    for pid in cloud.laptop_processes():
        command = Path(f"/proc/{pid}/cmdline").read_bytes() if Path(f"/proc/{pid}").exists() else b""
        if any(word in command for word in (b"sky.server", b"SkyPilot", b"multiprocessing")):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
