"""`python3 -m art_sky.node.install FOLDER`: a Python for the server, in `FOLDER/python.json`.

A Python that has everything in the very versions of constraints.txt is used as it is, and the wheel unpacked into the
folder: that of a prepared image in /opt/art-sky, or the one that a job finds first. A prepared image that is out of
date gets what it lacks. Else a virtual environment is made in the folder, by uv where SkyPilot put one, and wheel and
packages go into it. What an earlier run finished is not done again. Runs as a child of the watchdog, which sets its
deadline.
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
from art_sky.node.packages import write_constraints
from art_sky.whole_file import write_whole

IMAGE = Path("/opt/art-sky")  # where a prepared image has the environments `venv` and `vllm`
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
        python = install(folder, config)
        path = {} if python.path is None else {"PYTHONPATH": python.path}
        run([python.executable, "-c", "import art_sky.server.main"], path)
    except (OSError, ValueError, zipfile.BadZipFile, subprocess.SubprocessError) as e:
        print(f"art-sky: the installation failed: {e}; see the lines above, then launch again", flush=True)
        return 1
    write_whole(folder / "python.json", json.dumps(dataclasses.asdict(python)))
    return 0


def install(
    folder: Path, config: records.NodeConfig, image: Path = IMAGE, job_python: Path = Path(sys.executable)
) -> Python:
    """Where server and, if it was ordered, vLLM find all they need; `image` and `job_python` are what may have it.

    Raises OSError, ValueError or SubprocessError, each with what failed.
    """
    wheel = folder / config.wheel
    server = [str(wheel), *config.packages, "--constraint", str(write_constraints(folder))]
    path = None
    if python := _there(image / "venv", job_python, server):
        path = str(_unpack(wheel, folder / "site"))
    else:
        python = _mended(image / "venv", server) or environment_with(folder / "venv", server, wheel)
    if not config.vllm_packages:
        return Python(str(python), path)
    vllm = (
        _there(image / "vllm", job_python, config.vllm_packages)
        or _mended(image / "vllm", config.vllm_packages)
        or environment_with(folder / "vllm", config.vllm_packages)
    )
    return Python(str(python), path, str(vllm))


def has_all(python: Path, packages: Sequence[str]) -> bool:
    """Whether this Python needs nothing more, by pip's own resolver without an index. What is pinned to a version, by
    itself or by a constraint, must have that one. `packages` is what `pip install` takes."""
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


def environment_with(venv: Path, packages: Sequence[str], wheel: Path | None = None) -> Path:
    """The interpreter of an environment that holds `packages`; made anew unless an earlier run finished it, with the
    same `wheel` where one is among them.

    Raises as `install` does.
    """
    python, marker = venv / "bin" / "python", venv / "installed.json"
    wanted = {"version": "" if wheel is None else _hash(wheel), "packages": list(packages)}
    if marker.exists() and json.loads(marker.read_text()) == wanted:
        print(f"art-sky: all packages were installed before ({python})", flush=True)
        return python
    tools = [tool for tool in (_with_uv(venv), _with_pip(venv)) if tool is not None]
    if not tools:
        raise ValueError(f"the image has neither uv nor a Python {'.'.join(map(str, OLDEST))} with venv")
    for n, (make, pip) in enumerate(tools):
        shutil.rmtree(venv, ignore_errors=True)
        try:
            run(make)
            run([*pip, *packages])
            break
        except subprocess.CalledProcessError:
            if n == len(tools) - 1:
                raise
    write_whole(marker, json.dumps(wanted))
    return python


def run(command: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})) -> None:
    """Tells it and does it, without this process's own packages. Raises CalledProcessError."""
    print(f"art-sky: {' '.join(command)}", flush=True)
    subprocess.run(list(command), stdin=subprocess.DEVNULL, check=True, env={**_environment(), **environment})


def _there(venv: Path, job_python: Path, packages: Sequence[str]) -> Path | None:
    for python in (venv / "bin" / "python", job_python):
        if has_all(python, packages):
            print(f"art-sky: the image has all packages ({python})", flush=True)
            return python
    return None


def _mended(venv: Path, packages: Sequence[str]) -> Path | None:
    """The interpreter of a prepared image's environment, with what it lacked; None where there is none, or it cannot
    be changed. Only what differs is downloaded."""
    python = venv / "bin" / "python"
    if not python.exists() or not os.access(venv, os.W_OK):
        return None
    print(f"art-sky: the image is out of date; {venv} gets what it lacks", flush=True)
    try:
        run([str(python), "-m", "pip", "install", "--disable-pip-version-check", *packages])
    except subprocess.CalledProcessError:
        return None  # pip said why; a new environment is made
    return python


def _with_uv(venv: Path) -> tuple[list[str], list[str]] | None:
    uv = shutil.which("uv", path=f"{os.environ.get('PATH', '')}:{Path.home() / '.local' / 'bin'}")
    if uv is None:
        return None
    make = [uv, "venv", "--no-project", "--seed", "--python", f">={'.'.join(map(str, OLDEST))}", str(venv)]
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
