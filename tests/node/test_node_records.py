from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from art_sky.node import records

LIMITS = records.NodeLimits(idle_minutes=30, max_hours=2, orphan_minutes=15, flush_minutes=5, setup_minutes=20)
CONFIG = records.NodeConfig(
    cluster="artsky-00c0ffee", node="artsky-00c0ffee-1", cloud="aws", price_per_hour=1.5, spot=True,
    store="s3://bucket", limits=LIMITS, wheel="art_sky.whl", version="0.1.0", packages=[], server={"port": 0},
    billed_from_unix=1e9,
)  # fmt: skip


def test_a_record_is_read_back_as_it_was_written_with_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "node.json"
    records.write(file, CONFIG)
    assert records.read(file, records.NodeConfig) == CONFIG
    secrets = tmp_path / "secrets.json"
    records.write(secrets, records.Secrets(token="t"), 0o600)
    assert secrets.stat().st_mode & 0o777 == 0o600
    assert sorted(f.name for f in tmp_path.iterdir()) == ["node.json", "secrets.json"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"idle_minutes": 1}', '{"format": 99}', '{"unknown": 1}'])
def test_what_cannot_be_understood_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"node\.json cannot be read as NodeConfig"):
        records.parse(text, records.NodeConfig, "node.json")


def test_fields_of_a_newer_release_are_ignored() -> None:
    entry = records.LedgerEntry("c", "n", "i", "aws", "r", "t", False, 3.0, 0.0, 10.0)
    text = str(dataclasses.asdict(entry) | {"later": 1}).replace("'", '"').replace("None", "null")
    assert records.parse(text.replace("False", "false"), records.LedgerEntry, "entry") == entry


def test_an_open_entry_counts_until_now_and_a_closed_one_until_it_was_closed() -> None:
    entry = records.LedgerEntry("c", "n", "i", "aws", "r", "t", False, 3.0, 0.0, 10.0)
    assert entry.dollars(7200.0) == pytest.approx(6.0)
    assert dataclasses.replace(entry, closed_unix=3600.0).dollars(1e9) == pytest.approx(3.0)


def test_the_records_need_the_standard_library_only() -> None:
    code = "import sys, art_sky.node.records; print([m for m in sys.modules if m in ('pydantic', 'httpx', 'boto3')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
