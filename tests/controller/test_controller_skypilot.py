"""The driver of SkyPilot, with a stand-in for the process that imports it (tests/fakecloud runs the real one)."""

from __future__ import annotations

import json
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from art_sky.config import Limits
from art_sky.controller.clouds.skypilot import SkyPilotProvider, key_policy, phase_of, task_config
from art_sky.controller.order import make_order
from art_sky.controller.provider import Machine, NodeOrder
from art_sky.controller.rented import LaunchRequest, Node, RentedCluster
from art_sky.errors import CloudError, LaunchFailed, NoCapacity, NoCredentials, ProviderUnavailable
from art_sky.node import records

OFFER = {
    "cloud": "aws", "region": "us-east-1", "instance_type": "g6.xlarge", "accelerators": {"L4": 1}, "spot": True,
    "price": 0.28,
}  # fmt: skip


def order(tmp_path: Path, **request: object) -> NodeOrder:
    asked = LaunchRequest.parse(
        {"name": "agent", "store": "s3://bucket/p", "limits": Limits(max_hours=2), "server": {"port": 0}, **request}
    )
    node = Node(name="artsky-00c0ffee-1", state="intended", offer=OFFER, since=0, billed_from=1000.0)
    cluster = RentedCluster(
        name="agent", id="artsky-00c0ffee", wanted="up", created=0, request=asked, plan=[OFFER], port=1, nodes=[node]
    )
    limits = records.NodeLimits(30, 2, 15, 5, 20, 10.0)
    return make_order(cluster, node, limits, tmp_path / "wheels")


def provider(tmp_path: Path, script: str, **deadlines: float) -> SkyPilotProvider:
    """Whose worker runs `script` with `call` and `say`."""
    head = "import json, os, sys, time\ncall = json.load(sys.stdin)\ndef say(**e): print(json.dumps(e), flush=True)\n"
    worker = tmp_path / "worker.py"
    worker.write_text(head + textwrap.dedent(script))
    return SkyPilotProvider(
        tmp_path / "controller", worker=[sys.executable, str(worker)], deadlines={"launch": 30, **deadlines}
    )


def test_a_launch_hands_on_progress_and_returns_the_machine(tmp_path: Path) -> None:
    cloud = provider(
        tmp_path,
        """
        config = json.load(open(os.environ["SKYPILOT_PROJECT_CONFIG"]))
        say(event="request", id="r-1")
        say(event="log", text="Launching on AWS us-east-1")
        say(event="log", text=json.dumps(config["aws"]))
        machine = {"node": call["node"], "seen": "running", "cloud": "aws", "instance": "i-1", "odd": 1}
        say(event="result", value=machine)
        """,
    )
    heard: list[tuple[str, str]] = []
    machine = cloud.launch(order(tmp_path), lambda phase, text: heard.append((phase, text)))
    assert machine == Machine("artsky-00c0ffee-1", "running", "aws", instance="i-1")
    assert heard == [
        ("provision", "Launching on AWS us-east-1"),
        ("provision", '{"remote_identity": "SERVICE_ACCOUNT"}'),
    ]
    kept = json.loads((tmp_path / "controller/orders/artsky-00c0ffee-1/order.json").read_text())
    assert kept == {"cloud": "aws", "region": "us-east-1", "request": "r-1"}
    assert list((tmp_path / "controller/configs").iterdir()) == []


def test_what_is_asked_for_is_on_disk_before_the_first_call(tmp_path: Path) -> None:
    folder = tmp_path / "controller/orders/artsky-00c0ffee-1"
    script = f"say(event='result', value={{'node': open('{folder}/order.json').read(), 'seen': 'absent', 'cloud': ''}})"
    assert "us-east-1" in provider(tmp_path, script).launch(order(tmp_path), lambda *_: None).node


@pytest.mark.parametrize(
    ("code", "kind"),
    [("no_capacity", NoCapacity), ("no_credentials", NoCredentials), ("launch_failed", LaunchFailed)],
)
def test_errors_of_the_worker_are_raised_typed(tmp_path: Path, code: str, kind: type[CloudError]) -> None:
    cloud = provider(tmp_path, f"say(event='error', code='{code}', message='none left; try more')")
    with pytest.raises(kind, match="none left; try more"):
        cloud.launch(order(tmp_path), lambda *_: None)


def test_a_worker_that_dies_or_hangs_is_told_and_ended(tmp_path: Path) -> None:
    with pytest.raises(LaunchFailed, match="ended without a word"):
        provider(tmp_path, "os.kill(os.getpid(), 9)").launch(order(tmp_path), lambda *_: None)
    cloud = provider(tmp_path, "time.sleep(60)", find=0.3)
    with pytest.raises(ProviderUnavailable, match=r"took over 0\.3 s"):
        cloud.find("artsky-00c0ffee-1")


def test_end_kills_a_launch_under_way_and_cancels_its_request(tmp_path: Path) -> None:
    cloud = provider(
        tmp_path,
        """
        if call["call"] == "launch":
            say(event="request", id="r-7")
            say(event="log", text="Launching on")
            time.sleep(60)
        open("%s", "w").write(json.dumps(call))
        say(event="result", value=None)
        """
        % (tmp_path / "ended.json"),
    )
    begun, failures = threading.Event(), []

    def launch() -> None:
        try:
            cloud.launch(order(tmp_path), lambda *_: begun.set())
        except LaunchFailed as e:
            failures.append(e)

    thread = threading.Thread(target=launch)
    thread.start()
    assert begun.wait(20)
    cloud.end("artsky-00c0ffee-1")
    thread.join(20)
    assert len(failures) == 1
    ended = json.loads((tmp_path / "ended.json").read_text())
    assert ended == {
        "call": "end", "node": "artsky-00c0ffee-1", "cloud": "aws", "region": "us-east-1", "request": "r-7"
    }  # fmt: skip


def test_a_node_of_another_computer_is_not_guessed_at(tmp_path: Path) -> None:
    with pytest.raises(CloudError, match="was not launched from this computer"):
        provider(tmp_path, "").find("artsky-ffffffff-1")


def test_a_node_of_another_computer_is_ended_where_a_cloud_says_it_is(tmp_path: Path) -> None:
    """As `art-sky gc` does with what store or user confirm."""
    cloud = provider(
        tmp_path,
        """
        machine = {"node": "artsky-ffffffff-1", "seen": "running", "cloud": "aws", "region": "eu-west-1"}
        answers = {"check": {"aws": None}, "machines": [machine], "end": None}
        open("%s", "a").write(json.dumps(call) + "\\n")
        say(event="result", value=answers[call["call"]])
        """
        % (tmp_path / "calls"),
    )
    cloud.end("artsky-ffffffff-1")
    ended = json.loads((tmp_path / "calls").read_text().splitlines()[-1])
    assert ended == {
        "call": "end", "node": "artsky-ffffffff-1", "cloud": "aws", "region": "eu-west-1", "request": None,
    }  # fmt: skip
    with pytest.raises(CloudError, match="was not launched from this computer"):
        cloud.end("artsky-ffffffff-2")


def test_no_cloud_is_an_error_with_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(NoCredentials, match="sky check"):
        provider(tmp_path, "say(event='result', value={})").check()


def test_no_key_of_this_computer_goes_along() -> None:
    policy = key_policy("aws", None)
    assert policy.pop("aws") == {"remote_identity": "SERVICE_ACCOUNT"}
    assert {"gcp", "azure", "kubernetes"} <= set(policy)
    assert {p["remote_identity"] for p in policy.values()} == {"NO_UPLOAD"}
    assert key_policy("aws", "art-sky-node")["aws"] == {"remote_identity": "art-sky-node"}
    # SkyPilot has no such setting for Lambda: its key is deleted by the setup, unless it must stay there.
    assert "lambda" not in key_policy("lambda", None)


def test_the_task_is_the_file_of_the_repository_with_what_the_order_fixes(tmp_path: Path) -> None:
    wanted = order(tmp_path, image_id="ami-1", disk_gib=200)
    task = task_config(wanted, tmp_path / "node.json")
    resources = task["resources"]
    assert resources["infra"] == "aws/us-east-1" and resources["use_spot"] is True
    assert resources["accelerators"] == {"L4": 1} and resources["image_id"] == "ami-1"
    by_region = order(tmp_path, image_id={"us-east-1": "ami-2", "us-west-2": "ami-3"})
    assert task_config(by_region, tmp_path / "node.json")["resources"]["image_id"] == "ami-2"
    assert resources["autostop"] == {"idle_minutes": 1, "down": True, "wait_for": "jobs"}
    # 2 hours, the flush of 5 minutes and the guard's 15, after the first billed moment
    assert resources["labels"] == {
        "art-sky": "1", "art-sky-id": "artsky-00c0ffee", "art-sky-node": "artsky-00c0ffee-1",
        "art-sky-until": str(1000 + 7200 + 20 * 60),
    }  # fmt: skip
    assert set(task["file_mounts"].values()) == {str(tmp_path / "node.json"), wanted.wheel}
    assert "envs" not in task and "secrets" not in task


def test_the_order_holds_no_secret(tmp_path: Path) -> None:
    text = repr(order(tmp_path)) + json.dumps(task_config(order(tmp_path), tmp_path / "node.json"))
    assert "token" not in text.replace("art_sky", "").lower().replace("the tokens", "")


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("⚙︎ Launching on AWS us-east-1 (us-east-1a).", "provision"),
        ("└── Job submitted, ID: 1", "job"),
        ("x", ""),
    ],
)
def test_lines_of_the_log_name_their_phase(line: str, phase: str) -> None:
    assert phase_of(line) == phase


def test_a_node_is_ordered_what_its_engine_needs(tmp_path: Path) -> None:
    assert order(tmp_path).config.packages == ["art-sky[local,s3]"]
    for option in ({"quantization": "nf4"}, {"optimizer": "adamw_8bit"}):
        assert order(tmp_path, server={"trainer": option}).config.packages == ["art-sky[local,s3,bnb]"]
    assert order(tmp_path).config.vllm_packages == []
    vllm = order(tmp_path, server={"engine": {"kind": "vllm"}}).config.vllm_packages
    assert len(vllm) == 1 and vllm[0].startswith("vllm==")
