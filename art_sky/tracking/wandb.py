"""Weights & Biases as a view of the run's own history.

One W&B run per model and attempt (`NAME-ATTEMPT`, resumed under the same id by later processes), with
`training_step` as the axis of every key, so that a late evaluation lands where it belongs. Keys are
`SPLIT/metric`. W&B can only append, so a file in `home()/tracking/wandb` remembers which keys of which row were
sent: a row that is logged again adds what is new and doubles nothing; a value that changed later is found in the
store's history only.

Offline (files that `wandb sync` uploads later) without a key, without an answer from W&B within a few seconds,
or by WANDB_MODE. All calls here may block and may raise; `art_sky.tracking.trackers` keeps both from the run.
"""

from __future__ import annotations

import json
import logging
import math
import netrc
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from art_sky.config import home
from art_sky.names import check_name
from art_sky.tracking.redact import redact

Mode = Literal["online", "offline"]
AXIS = "training_step"
PROBE_SECONDS = 3.0
INIT_SECONDS = 20.0
_DEFAULT_URL = "https://api.wandb.ai"
_log = logging.getLogger("art_sky.tracking")


def start(project: str, name: str, config: Mapping[str, Any]) -> WandbTracker | None:
    """A `TrackerFactory`. None when WANDB_MODE=disabled. Raises ImportError with the mend when wandb is absent."""
    asked = os.environ.get("WANDB_MODE", "").lower()
    if asked == "disabled":
        return None
    try:
        import wandb  # noqa: F401
    except ImportError as e:
        raise ImportError("wandb is not installed; pip install 'art-sky[wandb]'") from e
    return WandbTracker(project, name, config, "offline" if asked == "offline" else choose_mode())


def choose_mode() -> Mode:
    """`online` if there is a key and W&B answers within PROBE_SECONDS, else `offline` with the reason logged."""
    import httpx

    url = os.environ.get("WANDB_BASE_URL") or _DEFAULT_URL
    if not _has_key(urlsplit(url).hostname or ""):
        _log.warning("no W&B key (WANDB_API_KEY, or `wandb login`): writing offline; upload later with `wandb sync`")
        return "offline"
    try:
        # Any answer will do, an error too: somebody is there. Proxies count, as they do for wandb itself.
        httpx.get(url, timeout=PROBE_SECONDS)
    except httpx.HTTPError as e:
        _log.warning("no answer from %s (%s): writing offline; upload later with `wandb sync`", url, type(e).__name__)
        return "offline"
    return "online"


class WandbTracker:
    """Implements `Tracker` for one model; its runs are begun when their first row comes."""

    def __init__(self, project: str, name: str, config: Mapping[str, Any], mode: Mode) -> None:
        self._project, self._name = check_name("project", project), check_name("model", name)
        self._mode: Mode = mode
        self._config = redact(config)
        self._sent = _Sent(home() / "tracking" / "wandb" / project / f"{name}.jsonl")
        self._attempt: int | None = None
        self._run: Any = None
        self._splits: set[str] = set()

    def log(self, attempt: int, step: int, split: str, metrics: Mapping[str, float | None]) -> None:
        values = {
            f"{split}/{key.removeprefix(f'{split}/')}": float(value)
            for key, value in metrics.items()
            if value is not None and math.isfinite(value)
        }
        new = {k: v for k, v in values.items() if k not in self._sent.keys(attempt, step, split)}
        if not new:
            return
        run = self._run_of(attempt)
        if split not in self._splits:
            run.define_metric(f"{split}/*", step_metric=AXIS)
            self._splits.add(split)
        run.log({AXIS: step, **new})
        self._sent.add(attempt, step, split, new)

    def finish(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run, self._attempt = None, None

    def _run_of(self, attempt: int) -> Any:
        if attempt != self._attempt:
            self.finish()
            self._run, self._attempt, self._splits = self._begin(attempt), attempt, set()
            self._run.define_metric(AXIS, hidden=True)
            self._run.define_metric("*", step_metric=AXIS)
        return self._run

    def _begin(self, attempt: int) -> Any:
        import wandb

        if self._mode == "online":
            try:
                return self._init(attempt)
            except (wandb.Error, OSError) as e:
                _log.warning("W&B refused the run (%s): writing offline; upload later with `wandb sync`", e)
                self._mode = "offline"
        return self._init(attempt)

    def _init(self, attempt: int) -> Any:
        import wandb

        return wandb.init(
            project=self._project,
            id=f"{self._name}-{attempt}",
            name=self._name if attempt == 1 else f"{self._name} (attempt {attempt})",
            group=self._name,
            config={**self._config, "attempt": attempt},
            mode=self._mode,
            resume="allow" if self._mode == "online" else None,
            reinit="create_new",
            settings=wandb.Settings(
                init_timeout=INIT_SECONDS,
                # Nothing of the machine, the command line, the code or its output: secrets may be in any of them.
                console="off",
                disable_git=True,
                disable_code=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
            ),
        )


class _Sent:
    """Which keys of which rows were sent, in an append-only file, so that the next process knows it too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys: defaultdict[tuple[int, int, str], set[str]] = defaultdict(set)
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                attempt, step, split, keys = json.loads(line)
            except ValueError:  # a blank line, or one cut off by a crash: its row is sent once more
                continue
            self._keys[attempt, step, split].update(keys)

    def keys(self, attempt: int, step: int, split: str) -> set[str]:
        return self._keys[attempt, step, split]

    def add(self, attempt: int, step: int, split: str, keys: Mapping[str, float]) -> None:
        self._keys[attempt, step, split].update(keys)
        with self._path.open("a") as file:
            # The line break comes first: a line that a crash cut off must not swallow the next one.
            file.write("\n" + json.dumps([attempt, step, split, sorted(keys)]))


def _has_key(host: str) -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
