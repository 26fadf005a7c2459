"""`art-sky launch` for rented machines: the plan that is shown, what is refused, what reaches the controller."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import pytest
from cli_store import run

from art_sky.cli.launch import SECTIONS, SERVER
from art_sky.cli.launch import command as launch_command
from art_sky.controller import launching
from art_sky.controller.clouds import sky_catalog
from art_sky.controller.plan import Plan
from art_sky.controller.provider import Offer
from art_sky.controller.registry import Registry, registry_file
from art_sky.controller.rented import LaunchRequest, RentedCluster

pytestmark = pytest.mark.usefixtures("here")
SNAPSHOTS = Path(__file__).with_name("plan_tables.txt")
STORE = ["--store", "s3://bucket/agent"]
OFFERS = [
    Offer("lambda", "us-west-1", "gpu_1x_h100_pcie", {"H100": 1}, False, 2.49),
    Offer("aws", "us-east-1", "p5.4xlarge", {"H100": 1}, False, 6.88),
    Offer("aws", "us-west-2", "p5.4xlarge", {"H100": 1}, False, 6.88),
]


@pytest.fixture(autouse=True)
def offers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sky_catalog, "offers", lambda wanted, clouds: list(OFFERS))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[LaunchRequest, Plan, dict[str, str]]]:
    """What was handed to the controller, which brings everything up at once."""
    calls: list[tuple[LaunchRequest, Plan, dict[str, str]]] = []

    def launch(request: LaunchRequest, plan: Plan, told: Any, *, store_env: dict[str, str]) -> dict[str, Any]:
        calls.append((request, plan, store_env))
        told({"n": 1, "time": 1.0, "text": "artsky-00c0ffee-1: provisioning"})
        return {
            "name": request.name, "base_url": "http://127.0.0.1:4321", "token_file": "/t/token",
            "store": request.store, "price_per_hour": 6.88, "worst_case": 22.29,
            "node": {"phases": {"provisioning": 24.0, "installing": 9.0, "ready": 71.0}},
        }  # fmt: skip

    monkeypatch.setattr(launching, "launch_rented", launch)
    return calls


def test_a_dry_run_shows_what_it_would_cost_and_what_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["launch", "--gpu", "H100", "--cloud", "aws,lambda", "--budget", "20", "--dry-run", *STORE]
    assert run(*arguments) == 0
    out = capsys.readouterr().out
    assert "p5.4xlarge" in out and "WAGL" in out
    assert "refused" in out and "--allow-cloud-key-on-node" in out
    # 20 dollars, then the flush of 5 minutes and the guard's 15 at 6.88 an hour
    assert "At most $22.29" in out and "at $20 or 24 hours" in out
    assert run(*arguments, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert [c["offer"]["cloud"] for c in plan["candidates"]] == ["lambda", "aws", "aws"]
    assert plan["worst_case_dollars"] == pytest.approx(20 + 6.88 / 3, abs=1e-3)


def test_a_launch_asks_first_and_tells_the_phases(
    launched: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["launch", "night", "--gpu", "H100", "--cloud", "aws", "--max-hours", "2", "--spot", *STORE]
    monkeypatch.setattr("click.confirm", lambda *a, **k: (_ for _ in ()).throw(SystemExit(1)))
    assert run(*arguments) == 1 and launched == []
    capsys.readouterr()
    assert run(*arguments, "--yes") == 0
    ((request, plan, credential),) = launched
    assert request.name == "night" and request.spot == "prefer" and request.limits.max_hours == 2
    assert request.gpus == ["H100"] and request.clouds == ["aws"] and credential == {}
    assert [c.offer.cloud for c in plan.usable] == ["aws", "aws"]
    out, err = capsys.readouterr()
    assert "http://127.0.0.1:4321" in out and "1m 11s: provisioning 24s, installing 9s" in out
    assert "artsky-00c0ffee-1: provisioning" in err and "p5.4xlarge" in err
    assert run(*arguments, "--yes", "--json") == 0
    assert json.loads(capsys.readouterr().out)["base_url"] == "http://127.0.0.1:4321"


def test_help_has_every_option_in_one_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("launch", "--help") == 0
    out = capsys.readouterr().out
    options = {str(p.name): p for p in launch_command.params if isinstance(p, click.Option)}
    assert {name for names in SECTIONS.values() for name in names} <= set(options)
    shown = [line.split()[0].rstrip(",") for line in out.splitlines() if line.startswith("  -")]
    assert sorted(shown) == sorted([*(option.opts[0] for option in options.values()), "-h"])
    assert [line for line in out.splitlines() if line.rstrip(":") in (*SECTIONS, SERVER)] == [
        f"{title}:" for title in (*SECTIONS, SERVER)
    ]


WIDE = [
    Offer("lambda", "us-west-1", "gpu_1x_h100_pcie", {"H100": 1}, False, 2.49),
    Offer("gcp", "northamerica-northeast1", "a2-ultragpu-1g", {"A100-80GB": 1}, True, 2.522),
    Offer("azure", "westeurope", "Standard_NC24ads_A100_v4", {"A100-80GB": 1}, False, 3.673),
    Offer("aws", "us-east-1", "p5.4xlarge", {"H100": 1}, False, 6.88),
    Offer("aws", "ap-northeast-1", "p4d.24xlarge", {"A100": 8}, True, 13.1),
]


def test_the_plan_reads_at_every_width(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As in plan_tables.txt, which is written anew by `ART_SKY_SNAPSHOTS=write`; look at the difference."""
    monkeypatch.setattr(sky_catalog, "offers", lambda wanted, clouds: list(WIDE))
    shown = ""
    for width in (80, 100, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        assert run("launch", "--gpu", "H100", "--cloud", "aws", "--budget", "20", "--dry-run", *STORE) == 0
        out = capsys.readouterr().out
        shown += "\n".join([f"--- {width} columns", *(line.rstrip() for line in out.splitlines()), ""])
        assert max(map(len, out.splitlines())) <= width
    if os.environ.get("ART_SKY_SNAPSHOTS") == "write":
        SNAPSHOTS.write_text(shown)
    assert shown == SNAPSHOTS.read_text()


H100 = ["--gpu", "H100", "--cloud", "aws"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (H100, "needs a store that outlives it: --store s3://"),
        ([*H100, "--store", "runs"], "needs a store that outlives it: --store s3://"),
        ([*H100, "--store", "file:///runs"], "needs a store that outlives it: --store s3://"),
        ([*H100, "--store", "s3://bucket/p?profile=lab"], "leave it out, and give --store-profile"),
        ([*H100, "--spot", "--spot-only", *STORE], "give --spot or --spot-only"),
        ([*H100, "--image-id", "ami-1", "--image-id", "us-west-2=ami-2", *STORE], "--image-id REGION=ID once for each"),
        (["--image-id", "ami-1"], "--image-id is for rented machines"),
        (["--budget", "20"], "--budget is for rented machines"),
        (["--cloud", "local,aws"], "--cloud local goes with no other cloud"),
        ([*H100, "--budget", "0.5", *STORE], "does not pay for 15 minutes"),
        ([*H100, "--max-price", "1", *STORE], "costs at most $1.00 an hour; the cheapest is gpu_1x_h100_pcie"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert run("launch", *arguments) != 0
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_credential_for_the_store_goes_to_the_controller_and_nowhere_else(
    launched: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end = (datetime.now(UTC) + timedelta(hours=6)).isoformat()
    lines = ["export AWS_ACCESS_KEY_ID=ASIA1", "export AWS_SECRET_ACCESS_KEY=s3cret", "AWS_SESSION_TOKEN=t0ken",
             f"AWS_CREDENTIAL_EXPIRATION={end}"]  # fmt: skip
    (tmp_path / "key").write_text("\n".join(lines))
    arguments = ["launch", "--gpu", "H100", "--cloud", "aws", "--store-credential", "key", "--yes", *STORE]
    assert run(*arguments, "--max-hours", "4") == 0
    assert launched[0][2] == {
        "AWS_ACCESS_KEY_ID": "ASIA1", "AWS_SECRET_ACCESS_KEY": "s3cret", "AWS_SESSION_TOKEN": "t0ken",
        "AWS_CREDENTIAL_EXPIRATION": end,
    }  # fmt: skip
    assert "s3cret" not in "".join(capsys.readouterr()) + repr(launched[0][:2])
    assert launched[0][0].store_credential == str((tmp_path / "key").resolve()), "where it is looked for again"
    assert run(*arguments, "--max-hours", "8") == 1
    assert "ends in 6.0 hours" in (err := capsys.readouterr().err) and "--max-hours 5.5 or less" in err
    for text, message in (("s3cret", "line 1"), ("AWS_SECRET_ACCESS_KEY=s3cret", "no AWS_ACCESS_KEY_ID"),
                          ("AWS_ACCESS_KEY_ID=A\nODD=s3cret", "ODD")):  # fmt: skip
        (tmp_path / "key").write_text(text)
        assert run(*arguments) == 1
        assert message in (err := capsys.readouterr().err) and "s3cret" not in err


def test_a_profile_of_this_computer_gives_the_credential(
    launched: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    (tmp_path / "config").write_text("[profile runs]\naws_access_key_id = AKIA1\naws_secret_access_key = s3cret\n")
    arguments = ["launch", *H100, "--yes", *STORE]
    assert run(*arguments, "--store-profile", "runs") == 0
    ((request, plan, credential),) = launched
    assert credential == {"AWS_ACCESS_KEY_ID": "AKIA1", "AWS_SECRET_ACCESS_KEY": "s3cret"}
    assert request.store_profile == "runs" and request.store_credential is None
    assert "s3cret" not in "".join(capsys.readouterr()) + repr((request, plan))
    assert run(*arguments, "--store-profile", "runz") == 1 and "(there: runs)" in capsys.readouterr().err
    (tmp_path / "key").write_text("AWS_ACCESS_KEY_ID=a\nAWS_SECRET_ACCESS_KEY=s\n")
    assert run(*arguments, "--store-profile", "runs", "--store-credential", "key") == 2
    assert "not both" in capsys.readouterr().err


def test_a_name_of_a_rented_cluster_is_not_taken_by_a_local_one(capsys: pytest.CaptureFixture[str]) -> None:
    registry = Registry(registry_file())
    request = LaunchRequest(name="night", store="s3://bucket/p")
    up = RentedCluster(name="night", id="artsky-1", wanted="up", created=1.0, request=request, plan=[], port=1)
    registry.add(up)
    registry.close()
    assert run("launch", "night") == 1
    assert "a rented cluster 'night' is up; use it, end it with `art-sky down night`" in capsys.readouterr().err
