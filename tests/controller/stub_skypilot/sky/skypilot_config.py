from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Config(dict[str, Any]):
    def get_nested(self, keys: tuple[str, str], default: Any) -> Any:
        return self.get(keys[0], {}).get(keys[1], default)

    def set_nested(self, keys: tuple[str, str], value: Any) -> None:
        self.setdefault(keys[0], {})[keys[1]] = value


def get_nested(keys: tuple[str, ...], default: object) -> object:
    return "NO_UPLOAD"


def to_dict() -> Config:
    return Config(json.loads(os.environ.get("STUB_SKYPILOT", "{}")).get("config", {}))


@contextlib.contextmanager
def replace_skypilot_config_in_process(config: Config) -> Iterator[None]:
    """What a launch is made under goes to `$STUB_CALLS.config`."""
    Path(os.environ["STUB_CALLS"] + ".config").write_text(json.dumps(config))
    yield
