"""`python3 -m art_sky.node.install FOLDER`: a Python for the server, in `FOLDER/python.json`.

An image that has everything is used as it is, in /opt/art-sky/venv or in the Python that a job finds first, and the
wheel is unpacked into the folder. Else a virtual environment is made there, by uv where SkyPilot put one, and wheel
and packages go into it. What an earlier run finished is not done again. Runs as a child of the watchdog, which sets
its deadline.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from art_sky.node import records

IMAGES = (Path("/opt/art-sky/venv/bin/python"), Path(sys.executable))
VLLM_IMAGES = (Path("/opt/art-sky/vllm/bin/python"), Path(sys.executable))
OLDEST = (3, 11)  # requires-python of the wheel


@dataclasses.dataclass(frozen=True)
class Python:
    """`path` goes into PYTHONPATH where the wheel is not installed in the environment itself; `vllm` is the
    interpreter of vLLM's own environment, where one was ordered."""

    executable: str
    path: str | None = None
    vllm: str | None = None


def main(argv: list[str]) -> int:
    folder = Path(argv[0])
    try:
        config = records.read(folder / "node.json", records.NodeConfig)
        python = install(folder, config, IMAGES, VLLM_IMAGES)
        path = {} if python.path is None else {"PYTHONPATH": python.path}
        _run([python.executable, "-c", "import art_sky.server.main"], path)
    except (OSError, ValueError, zipfile.BadZipFile, subprocess.SubprocessError) as e:
        print(f"art-sky: the installation failed: {e}; see the lines above, then launch again", flush=True)
        return 1
    records.write_text(folder / "python.json", json.dumps(dataclasses.asdict(python)))
    return 0


def install(
    folder: Path, config: records.NodeConfig, images: Sequence[Path], vllm_images: Sequence[Path] = ()
) -> Python:
    """The first of `images` that needs nothing more, else a new environment; the same for vLLM.

    Raises OSError, ValueError or SubprocessError, each with what failed.
    """
    wheel = folder / config.wheel
    image = _first_with_all(images, [str(wheel), *config.packages])
    if image is not None:
        python, path = image, str(_unpack(wheel, folder / "site"))
    else:
        python, path = _environment_with(folder / "venv", [str(wheel), *config.packages], _hash(wheel)), None
    vllm = None
    if config.vllm_packages:
        vllm = _first_with_all(vllm_images, config.vllm_packages)
        vllm = vllm or _environment_with(folder / "vllm", config.vllm_packages, "")
    return Python(str(python), path, None if vllm is None else str(vllm))


def has_all(python: Path, packages: Sequence[str]) -> bool:
    """Whether this Python needs nothing more, by pip's own resolver without an index. Packages pinned to a version
    must have it."""
    if not python.exists():
        return False
    command = [str(python), "-m", "pip", "install", "--dry-run", "--no-index"]
    environment = {name: value for name, value in _environment().items() if not name.startswith("PIP_")}
    found = subprocess.run(
        [*command, "--quiet", *packages],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**environment, "PIP_CONFIG_FILE": os.devnull},
    )
    if found.returncode != 0:
        missing = found.stderr.strip().splitlines()[-1:] or ["pip failed"]
        print(f"art-sky: {python} lacks something: {missing[0][:300]}", flush=True)
        return False
    return True


def read_python(folder: Path) -> Python:
    """What the installation left. Raises OSError or ValueError."""
    found = json.loads((folder / "python.json").read_text())
    return Python(**found)


def _first_with_all(images: Sequence[Path], packages: Sequence[str]) -> Path | None:
    image = next((image for image in images if has_all(image, packages)), None)
    if image is not None:
        print(f"art-sky: the image has all packages ({image})", flush=True)
    return image


def _environment_with(venv: Path, packages: Sequence[str], version: str) -> Path:
    """The interpreter of an environment that holds `packages`; made anew unless an earlier run finished it."""
    python, marker = venv / "bin" / "python", venv / "installed.json"
    wanted = {"version": version, "packages": list(packages)}
    if marker.exists() and json.loads(marker.read_text()) == wanted:
        print(f"art-sky: all packages were installed before ({python})", flush=True)
        return python
    tools = [tool for tool in (_with_uv(venv), _with_pip(venv)) if tool is not None]
    if not tools:
        raise ValueError(f"the image has neither uv nor a Python {'.'.join(map(str, OLDEST))} with venv")
    for n, (make, pip) in enumerate(tools):
        shutil.rmtree(venv, ignore_errors=True)
        try:
            _run(make)
            _run([*pip, *packages])
            break
        except subprocess.CalledProcessError:
            if n == len(tools) - 1:
                raise
    records.write_text(marker, json.dumps(wanted))
    return python


def _with_uv(venv: Path) -> tuple[list[str], list[str]] | None:
    uv = shutil.which("uv", path=f"{os.environ.get('PATH', '')}:{Path.home() / '.local' / 'bin'}")
    if uv is None:
        return None
    make = [uv, "venv", "--no-project", "--python", f">={'.'.join(map(str, OLDEST))}", str(venv)]
    return make, [uv, "pip", "install", "--python", str(venv / "bin" / "python")]


def _with_pip(venv: Path) -> tuple[list[str], list[str]] | None:
    for name in ("python3.13", "python3.12", "python3.11", "python3"):
        found = shutil.which(name)
        if found and _version(found) >= OLDEST:
            pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
            return [found, "-m", "venv", str(venv)], pip
    return None


def _version(python: str) -> tuple[int, ...]:
    code = "import sys, venv, ensurepip; print(*sys.version_info[:2])"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, env=_environment())
    return tuple(map(int, found.stdout.split())) if found.returncode == 0 else (0, 0)


def _run(command: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})) -> None:
    print(f"art-sky: {' '.join(command)}", flush=True)
    subprocess.run(list(command), stdin=subprocess.DEVNULL, check=True, env={**_environment(), **environment})


def _environment() -> dict[str, str]:
    """Of the children: this process runs from the wheel, they must not."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def _unpack(wheel: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
