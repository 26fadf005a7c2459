"""The fan-out to trackers, and what never leaves in a configuration."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from art_sky.errors import InvalidConfig
from art_sky.tracking import Tracking, start
from art_sky.tracking.redact import REDACTED, redact


class Remembers:
    def __init__(self, fails_at: int | None = None) -> None:
        self.rows: list[tuple[int, int, str, Mapping[str, float | None]]] = []
        self.fails_at = fails_at
        self.finished = False

    def log(self, attempt: int, step: int, split: str, metrics: Mapping[str, float | None]) -> None:
        if step == self.fails_at:
            raise RuntimeError("the dashboard is on fire")
        self.rows.append((attempt, step, split, metrics))

    def finish(self) -> None:
        self.finished = True


def tracking_of(**trackers: Remembers) -> Tracking:
    return Tracking("proj", "agent", {}, {kind: lambda *_, t=t: t for kind, t in trackers.items()})


def test_rows_arrive_in_order_and_finish_waits() -> None:
    seen = Remembers()
    tracking = tracking_of(seen=seen)
    for step in range(100):
        tracking.log(1, step, "train", {"reward": 0.5})
    tracking.finish()
    assert [row[1] for row in seen.rows] == list(range(100)) and seen.finished
    tracking.finish()
    tracking.log(1, 100, "train", {})
    assert len(seen.rows) == 100


def test_a_failing_tracker_warns_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = Remembers(), Remembers(fails_at=2)
    with caplog.at_level(logging.WARNING, "art_sky.tracking"):
        tracking = tracking_of(good=good, bad=bad)
        for step in range(5):
            tracking.log(1, step, "train", {})
        tracking.finish()
    assert len(good.rows) == 5 and len(bad.rows) == 2
    (record,) = caplog.records
    assert "bad shows no more rows of proj/agent: RuntimeError: the dashboard is on fire" in record.getMessage()


def test_a_tracker_that_cannot_start_warns(caplog: pytest.LogCaptureFixture) -> None:
    def absent(project: str, name: str, config: Mapping[str, Any]) -> None:
        raise ImportError("wandb is not installed; pip install 'art-sky[wandb]'")

    with caplog.at_level(logging.WARNING, "art_sky.tracking"):
        tracking = Tracking("proj", "agent", {}, {"wandb": absent})
        tracking.log(1, 1, "train", {})
        tracking.finish()
    assert "pip install 'art-sky[wandb]'" in caplog.text and len(caplog.records) == 1


def test_a_stuck_tracker_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    class Stuck(Remembers):
        def log(self, attempt: int, step: int, split: str, metrics: Mapping[str, float | None]) -> None:
            release.wait(30)

    tracking = tracking_of(stuck=Stuck())
    began = time.monotonic()
    tracking.log(1, 1, "train", {})
    with caplog.at_level(logging.WARNING, "art_sky.tracking"):
        tracking.finish(seconds=0.05)
    assert time.monotonic() - began < 5
    assert "was not up to date" in caplog.text
    release.set()


def test_opt_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert start("proj", "agent", {}) is None
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert start("proj", "agent", {}, "none") is None
    with pytest.raises(InvalidConfig, match="did you mean 'wandb'"):
        start("proj", "agent", {}, ["wanbd"])


def test_secrets_are_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "value-of-some-key")
    monkeypatch.setenv("SHORT_TOKEN", "1")
    clean = redact(
        {
            "OPENAI_API_KEY": "x",
            "hfToken": "y",
            "nested": {"db_password": "p", "list": ["fine", "has value-of-some-key inside"]},
            "url": "postgres://me:pw@host/db",
            "note": "sk-abcdefghijklmnop and hf_ABCDEFGHIJKLMNOP",
            "max_tokens": 8,
            "token_count": 3,
            "tokenizer": "gpt",
            "keyboard": "qwerty",
            "ok": True,
            "none": None,
        }
    )
    assert clean == {
        "OPENAI_API_KEY": REDACTED,
        "hfToken": REDACTED,
        "nested": {"db_password": REDACTED, "list": ["fine", f"has {REDACTED} inside"]},
        "url": f"postgres://{REDACTED}@host/db",
        "note": f"{REDACTED} and {REDACTED}",
        "max_tokens": 8,
        "token_count": 3,
        "tokenizer": "gpt",
        "keyboard": "qwerty",
        "ok": True,
        "none": None,
    }
