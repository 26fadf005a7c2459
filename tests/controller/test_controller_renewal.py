"""The credential for the store ends while a cluster runs: found anew, sent to the node, or missed in time."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from fake_cloud import FakeWorld

from art_sky.cli.rented import notes
from art_sky.controller.renewal import RENEW_SECONDS
from art_sky.controller.rented import LaunchRequest, Node
from art_sky.controller.store_credential import expires, from_profile, from_source
from art_sky.controller.views import cluster_view
from art_sky.errors import CorruptObject, InvalidConfig
from art_sky.store.s3_location import parse_location

HOUR = 3600.0


@pytest.fixture
def world(tmp_path: Path) -> FakeWorld:
    return FakeWorld(tmp_path / "registry.sqlite", max_hours=24, idle_minutes=30)


def credential(world: FakeWorld, key: str, hours: float | None = None) -> dict[str, str]:
    """One that ends so many hours from now."""
    made = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": "s"}
    if hours is None:
        return made
    end = datetime.fromtimestamp(world.clock.time, UTC) + timedelta(hours=hours)
    return {**made, "AWS_CREDENTIAL_EXPIRATION": end.isoformat()}


def launched(world: FakeWorld, hours: float | None, **source: str) -> tuple[str, Node]:
    world.credentials.kept = credential(world, "first", hours)
    id = world.launch(**source)
    node = world.up(id).node
    assert node is not None and sent(world, node) == 1
    return id, node


def sent(world: FakeWorld, node: Node) -> int:
    return world.provider.machines[node.name].secrets


def hours_pass(world: FakeWorld, id: str, hours: float) -> None:
    end = world.clock.time + hours * HOUR
    while world.clock.time < end:
        world.clock.time += min(world.reconciler.step(id) or 60.0, end - world.clock.time)


def shown(world: FakeWorld, id: str, node: Node) -> str:
    view = cluster_view(world.registry.get(id), None, None, world.clock.time)
    held = {"held_requests": 0, "store_credential": world.reconciler.seen.credential(node)}
    with patch("art_sky.cli.rented.time.time", world.clock.now):
        return "\n".join(notes({**view, **held}))


def test_a_profile_is_asked_in_time_and_the_node_is_sent_what_it_gives(world: FakeWorld) -> None:
    id, node = launched(world, 4.0, store_profile="lab")
    hours_pass(world, id, 3.4)
    assert world.credentials.asked == 0 and sent(world, node) <= 2, "a profile may make a new one each time"
    before = sent(world, node)
    world.credentials.source = fresh = credential(world, "second", 8.0)
    hours_pass(world, id, 0.2)
    assert world.credentials.asked == 1 and world.credentials.kept == fresh and sent(world, node) == before + 1
    assert world.reconciler.seen.credential(node) == {"expires": expires(fresh), "problem": None}
    assert any("a fresh credential for the store, ends in 4" in text for text in world.texts(id))
    hours_pass(world, id, 2.0)
    assert world.credentials.asked == 1 and sent(world, node) == before + 1


@pytest.mark.parametrize(
    ("source", "error", "says"),
    [
        ({"store_profile": "lab"}, None, "the profile has no fresh one; renew it, as by `aws sso login --profile lab`"),
        ({"store_profile": "lab"}, "the token ended; renew it", "the token ended; renew it, and it is sent"),
        ({"store_credential": "/keys/lab"}, None, "write a fresh one into /keys/lab, and it is sent to the machine"),
        ({}, None, "| art-sky extend run --store-credential -`"),
    ],
)
def test_what_is_missing_is_told_in_time_with_the_next_step(
    world: FakeWorld, source: dict[str, str], error: str | None, says: str
) -> None:
    id, node = launched(world, 2.0, **source)
    world.credentials.source = InvalidConfig(error) if error else world.credentials.kept
    hours_pass(world, id, 1.4)
    assert "by a credential that ends in 3" in shown(world, id, node) and says not in shown(world, id, node)
    hours_pass(world, id, 0.2)
    (line,) = (line for line in shown(world, id, node).splitlines() if "nothing can be written" in line)
    assert says in line and "the store's credential ends in 2" in line
    hours_pass(world, id, 1.0)
    assert "by a credential that has ended" in shown(world, id, node)
    told = [text for text in world.texts(id) if "nothing can be written" in text]
    assert len(told) == 1, "once in the log, in the status as long as it holds"
    # Late is not too late.
    world.credentials.source = fresh = credential(world, "second", 8.0)
    if not source:
        world.credentials.kept = fresh  # by hand
    before = sent(world, node)
    hours_pass(world, id, 0.1)
    assert sent(world, node) == before + 1 and "nothing can be written" not in shown(world, id, node)
    assert world.registry.get(id).node == node, "the machine goes on"


def test_a_node_that_ends_before_its_credential_misses_nothing(tmp_path: Path) -> None:
    world = FakeWorld(tmp_path / "registry.sqlite", max_hours=1.9)
    id, node = launched(world, 2.0)
    hours_pass(world, id, 1.7)
    assert "nothing can be written" not in shown(world, id, node)


def test_what_does_not_reach_the_node_is_sent_again(world: FakeWorld) -> None:
    id, node = launched(world, 1.0)
    world.link.cut = True
    world.credentials.kept = credential(world, "second", 9.0)
    hours_pass(world, id, 0.1)
    assert not world.reconciler.seen.has_credential(node, world.credentials.kept)
    world.link.cut = False
    world.up(id)
    hours_pass(world, id, 0.1)
    assert world.reconciler.seen.has_credential(node, world.credentials.kept) and sent(world, node) == 2


def test_another_controller_sends_what_the_one_before_it_may_not_have(world: FakeWorld) -> None:
    id, node = launched(world, 9.0)
    world.credentials.kept = credential(world, "second", 9.0)
    world.start()
    hours_pass(world, id, 0.2)
    assert world.reconciler.seen.has_credential(node, world.credentials.kept) and sent(world, node) == 2


def test_a_replacement_begins_with_a_fresh_one(world: FakeWorld) -> None:
    id, node = launched(world, 3.0, store_profile="lab")
    world.clock.time += 5 * HOUR  # the laptop slept
    world.credentials.source = fresh = credential(world, "second", 8.0)
    world.provider.vanish(node.name)
    cluster = world.run(id, lambda c: len(c.nodes) == 2 and c.nodes[1].state == "up")
    assert cluster.node is not None and world.reconciler.seen.has_credential(cluster.node, fresh)
    assert sent(world, cluster.node) == 1


def test_a_source_that_hangs_holds_nobody_up(world: FakeWorld) -> None:
    world.credentials.kept = credential(world, "first", 0.4)
    id = world.launch(store_profile="lab")
    world.run(id, lambda c: c.node is not None and c.node.state == "connecting")
    world.provider.script = ["hang"]
    began = world.clock.time
    node = world.up(id).node
    assert node is not None and sent(world, node) == 1 and 25 < world.clock.time - began < 60
    hours_pass(world, id, 1.0)
    assert world.credentials.asked == 0 and len(world.calls.hanging) == 1, "one question at a time"
    assert "nothing can be written" in shown(world, id, node)


def test_a_refused_credential_is_looked_for_anew_before_its_time(world: FakeWorld) -> None:
    """The server cannot renew its lease: somebody has taken the credential back."""
    from art_sky.schemas import LeaseStatus

    id, node = launched(world, 9.0, store_profile="lab")
    held = LeaseStatus(owner="server", generation=1, age_seconds=60.0)
    world.link.served, world.link.leases = ["p/a"], {"p/a": held}
    hours_pass(world, id, 0.2)
    assert world.credentials.asked == 0
    world.link.leases = {"p/a": held.model_copy(update={"problem": "the lease could not be renewed for 40 s"})}
    world.credentials.source = fresh = credential(world, "second", 18.0)
    hours_pass(world, id, 0.1)
    assert world.reconciler.seen.has_credential(node, fresh)


def test_a_machine_with_a_role_has_nothing_of_this(world: FakeWorld) -> None:
    id = world.launch()
    node = world.up(id).node
    assert node is not None
    hours_pass(world, id, 1.0)
    assert world.reconciler.seen.credential(node) is None and sent(world, node) == 1
    assert "credential" not in shown(world, id, node)


def test_secrets_that_cannot_be_read_end_no_watch(world: FakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    id, _ = launched(world, 9.0)

    def broken(*_: Any) -> dict[str, str]:
        raise CorruptObject("the secrets cannot be read; launch it again")

    monkeypatch.setattr(world.credentials, "current", broken)
    world.provider.own_end = False
    world.over(id, seconds=26 * HOUR)
    assert world.provider.alive() == []


# --- where it comes from ---


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The AWS settings of this computer, to be written."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "OTHER")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "other")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return tmp_path / "config"


def process(tmp_path: Path, hours: float) -> str:
    """A profile's settings whose program prints a credential."""
    end = (datetime.now(UTC) + timedelta(hours=hours)).isoformat()
    keys = {"Version": 1, "AccessKeyId": "ASIA1", "SecretAccessKey": "s", "SessionToken": "t", "Expiration": end}
    (tmp_path / "program.py").write_text(f"print({json.dumps(json.dumps(keys))})")
    return f"credential_process = {sys.executable} {tmp_path / 'program.py'}\n"


def test_a_profile_gives_its_own_keys_region_and_endpoint(profiles: Path, tmp_path: Path) -> None:
    profiles.write_text(
        "[profile r2]\naws_access_key_id = R2\naws_secret_access_key = s\nregion = auto\nendpoint_url = https://r2\n"
        f"[profile sso]\n{process(tmp_path, 2)}"
    )
    assert from_profile("r2") == {
        "AWS_ACCESS_KEY_ID": "R2", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "auto",
        "AWS_ENDPOINT_URL_S3": "https://r2",
    }  # fmt: skip
    found = from_profile("sso")
    assert (found["AWS_ACCESS_KEY_ID"], found["AWS_SESSION_TOKEN"]) == ("ASIA1", "t")
    end = expires(found)
    assert end is not None and 1.9 * HOUR < end - datetime.now(UTC).timestamp() < 2.1 * HOUR


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("[profile other]\nregion = x\n", r"no profile 'lab' .*\(there: other\)"),
        ("[profile lab]\nregion = x\n", "gives no credential; renew it, as by `aws sso login --profile lab`"),
        ("[profile lab]\ncredential_process = false\n", "gives no credential .*aws sso login"),
        ("expired", "still expired.*aws sso login"),
    ],
)
def test_a_profile_without_a_credential_is_one_line(profiles: Path, tmp_path: Path, settings: str, says: str) -> None:
    profiles.write_text(f"[profile lab]\n{process(tmp_path, -1)}" if settings == "expired" else settings)
    with pytest.raises(InvalidConfig, match=says) as e:
        from_profile("lab")
    assert "\n" not in e.value.message


def test_a_file_is_read_anew_each_time(tmp_path: Path) -> None:
    request = LaunchRequest(name="run", store="s3://runs/p", store_credential=str(tmp_path / "key"))
    with pytest.raises(InvalidConfig, match=r"key cannot be read .*; `aws configure export-credentials"):
        from_source(request)
    for key in ("one", "two"):
        (tmp_path / "key").write_text(f"AWS_ACCESS_KEY_ID={key}\nAWS_SECRET_ACCESS_KEY=s\n")
        assert from_source(request)["AWS_ACCESS_KEY_ID"] == key
    (tmp_path / "key").write_text("AWS_ACCESS_KEY_ID=a\nAWS_SECRET_ACCESS_KEY=s\nAWS_CREDENTIAL_EXPIRATION=soon\n")
    with pytest.raises(InvalidConfig, match="is no time"):
        from_source(request)
    assert from_source(LaunchRequest(name="run", store="s3://runs/p")) == {} and RENEW_SECONDS < HOUR


def test_this_computer_reaches_the_store_as_its_machines_do() -> None:
    def here(store: str, profile: str | None) -> str:
        return LaunchRequest(name="run", store=store, store_profile=profile).store_here

    assert here("s3://runs/p", None) == "s3://runs/p"
    assert here("s3://runs/p", "my lab") == "s3://runs/p?profile=my%20lab"
    assert here("s3://runs/p?region=x", "lab") == "s3://runs/p?region=x&profile=lab"
    assert parse_location(here("s3://runs/p", "my lab")).profile == "my lab"
