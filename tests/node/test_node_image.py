"""infra/image: the recipe of a prepared image, what setup makes of one, and of one that is out of date."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import hcl2
import pytest
from node_harness import Node
from packaging.requirements import Requirement

from art_sky.controller.wheel import make_wheel
from art_sky.node import install, packages, records

CHECKOUT = Path(__file__).parents[2]
RECIPE = CHECKOUT / "infra" / "image"
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]


def pins() -> dict[str, str]:
    lines = (CHECKOUT / "art_sky" / "node" / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def needed(requirements: list[str]) -> set[str]:
    """Names of all packages that they lead to, as installed here."""
    left, seen = [Requirement(r) for r in requirements], set()
    while left:
        wanted = left.pop()
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        for extra in ("", *wanted.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                found = map(Requirement, importlib.metadata.requires(name) or [])
                left += [r for r in found if r.marker is None or r.marker.evaluate({"extra": extra})]
    return {name for name, _ in seen}


def test_every_package_of_a_node_has_a_version_that_the_project_allows() -> None:
    extras = PROJECT["optional-dependencies"]
    direct = [*PROJECT["dependencies"], *extras["local"], *extras["s3"], *extras["bnb"]]
    direct = [r for r in direct if not r.startswith("art-sky")]
    pinned = pins()
    assert needed(direct) - set(pinned) == set()
    for requirement in map(Requirement, direct):
        assert requirement.specifier.contains(pinned[requirement.name.lower()]), requirement
    (vllm,) = (Requirement(r) for r in extras["gpu"] if r.startswith("vllm"))
    assert [str(vllm)] == list(packages.VLLM)


def test_the_constraints_are_read_out_of_the_wheel(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    code = "import pathlib, art_sky.node.packages as p; print(p.__file__, p.write_constraints(pathlib.Path('.')))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(wheel)}, capture_output=True, text=True
    )
    assert done.stdout.startswith(str(wheel)), done.stderr
    assert (tmp_path / "constraints.txt").read_text() == (CHECKOUT / "art_sky/node/constraints.txt").read_text()


def dependency(folder: Path, version: str) -> Path:
    return tiny_wheel(folder, "tiny_node_dependency", version)


def tiny_wheel(folder: Path, name: str, version: str, requires: str = "") -> Path:
    import zipfile

    file, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        names = (f"{name}.py", f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD")
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in names))
    return file


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "home" / ".art-sky-node")


@pytest.fixture
def image(tmp_path: Path, node: Node, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A prepared image that holds version 1 of what the wheel needs, where version 2 is wanted and to be had."""
    index = tmp_path / "index"
    index.mkdir()
    dependency(index, "1.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "image" / "venv"], check=True)
    python = tmp_path / "image" / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", dependency(tmp_path, "1.0")], check=True)
    dependency(index, "2.0")

    def constraints(folder: Path) -> Path:
        (folder / "constraints.txt").write_text("tiny-node-dependency==2.0\n")
        return folder / "constraints.txt"

    monkeypatch.setattr(install, "write_constraints", constraints)
    file = tiny_wheel(node.folder, "tiny_node_wheel", "1.0", "tiny-node-dependency")
    node.config = dataclasses.replace(node.config, wheel=file.name)
    return tmp_path / "image"


def version_in(python: str) -> str:
    code = "import tiny_node_dependency as d; print(d.VERSION)"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_an_image_that_is_out_of_date_is_noticed_and_mended(
    image: Path, node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    found = install.install(node.folder, node.config, image, Path("/nowhere"))
    assert found == install.Python(str(image / "venv/bin/python")) and version_in(found.executable) == "2.0"
    assert "is out of date" in capfd.readouterr().out
    again = install.install(node.folder, node.config, image, Path("/nowhere"))
    assert again == install.Python(found.executable, str(node.folder / "site"))
    assert "has all packages" in capfd.readouterr().out


def test_an_image_that_cannot_be_mended_is_left(image: Path, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    real = install.run

    def run(command: list[str], *rest: Any) -> None:
        if str(image) in command[0]:
            raise subprocess.CalledProcessError(1, command)
        real(command, *rest)

    monkeypatch.setattr(install, "run", run)
    found = install.install(node.folder, node.config, image, Path("/nowhere"))
    assert found == install.Python(str(node.folder / "venv/bin/python")) and version_in(found.executable) == "2.0"
    assert version_in(str(image / "venv/bin/python")) == "1.0"


# --- the recipe ---


def test_the_packer_file_parses_and_runs_both_scripts_in_order() -> None:
    parsed = hcl2.loads((RECIPE / "aws.pkr.hcl").read_text())
    text = (RECIPE / "aws.pkr.hcl").read_text()
    declared = {name.strip('"') for block in parsed["variable"] for name in block}
    assert declared == set(re.findall(r"\bvar\.(\w+)", text))
    (build,) = parsed["build"]
    scripts = [b["script"] for p in build["provisioner"] for b in p.values() if "script" in b]
    assert [s.strip('"').removeprefix("${path.root}/") for s in scripts] == ["provision.sh", "clean.sh"]
    (source,) = (values for block in parsed["source"] for kind in block.values() for values in kind.values())
    assert source["shutdown_behavior"].strip('"') == "terminate" and "shutdown -h" in source["user_data"]
    token = next(
        b["hf_token"] for b in ({k.strip('"'): v for k, v in b.items()} for b in parsed["variable"]) if "hf_token" in b
    )
    assert token["sensitive"] is True


@pytest.mark.parametrize("script", ["provision.sh", "clean.sh"])
def test_the_scripts_are_valid_shell(script: str) -> None:
    subprocess.run(["bash", "-n", RECIPE / script], check=True)


# On a machine of its own: what these folders get is gone with the namespace. What is printed are JSON values.
ON_A_MACHINE = r"""
mount -t tmpfs -o size=6g scratch /mnt
for name in etc home opt root tmp var; do
    mkdir -p /mnt/$name/upper /mnt/$name/work
    mount -t overlay overlay -o lowerdir=/$name,upperdir=/mnt/$name/upper,workdir=/mnt/$name/work /$name
done
export HOME=/root PATH=/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin
say() { echo "$1 $2" >&3; }
setup() {  # what setup says, and its seconds
    mkdir $HOME/$1
    cp $FOLDER/node.json $FOLDER/*.whl $HOME/$1
    began=$(date +%s%N)
    PYTHONPATH=$(echo $HOME/$1/*.whl) python3 -m art_sky.node.install $HOME/$1
    say $1.seconds $(( ($(date +%s%N) - began) / 1000000 ))e-3
    say $1.python "$(cat $HOME/$1/python.json)"
}
mkdir -p /root/.ssh /root/.aws /root/.cache/huggingface /tmp/art-sky-image
for secret in /root/.ssh/authorized_keys /root/.aws/credentials /root/.cache/huggingface/token /root/.bash_history \
    /etc/ssh/ssh_host_rsa_key /var/log/planted.log; do
    echo PLANTED > $secret
done
cp $FOLDER/*.whl /tmp/art-sky-image
HF_TOKEN=PLANTED bash $RECIPE/provision.sh /tmp/art-sky-image/*.whl --without-vllm --model smollm2-135m
setup prepared
/opt/art-sky/venv/bin/python -m pip install --quiet jmespath==1.0.1
setup mended
say again "$(/opt/art-sky/venv/bin/python -c 'import jmespath, json; print(json.dumps(jmespath.__version__))')"
bash $RECIPE/clean.sh
say identity $(stat -c %s /etc/machine-id)
left=$(grep -rls PLANTED /mnt/*/upper || true)  # all that was written
say left "\"$(echo $left)\""
say weights $(find /root/.art-sky -name '*.safetensors' | wc -l)
mv /opt/art-sky /opt/away
setup bare
"""


@pytest.mark.slow
def test_on_a_machine_of_this_image_setup_installs_nothing(tmp_path: Path, node: Node) -> None:
    """The scripts themselves, as far as a CPU goes; they install some hundred MB. Needs root."""
    probe = subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "t", "/mnt"], capture_output=True)
    if probe.returncode or not Path("/usr/bin/python3.11").exists():
        pytest.skip("needs root, mount namespaces and a Python 3.11 of the system")
    folder = tmp_path / "node"
    folder.mkdir()
    wheel = make_wheel(folder)
    config = dataclasses.replace(node.config, wheel=wheel.name, packages=[packages.server(bitsandbytes=False)])
    records.write(folder / "node.json", config)
    said = tmp_path / "said"
    with said.open("w") as out:
        done = subprocess.run(
            [
                "unshare",
                "--mount",
                "--pid",
                "--fork",
                "--kill-child",
                "bash",
                "-euo",
                "pipefail",
                "-c",
                f"exec 3>&{out.fileno()}\n{ON_A_MACHINE}",
            ],
            env={
                **{k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
                "FOLDER": str(folder),
                "RECIPE": str(RECIPE),
            },
            pass_fds=(out.fileno(),),
            capture_output=True,
            text=True,
            timeout=1100,
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = {
        key: json.loads(value) for key, _, value in (line.partition(" ") for line in said.read_text().splitlines())
    }
    print({key: value for key, value in found.items() if key.endswith("seconds")})
    image = "/opt/art-sky/venv/bin/python"
    assert found["prepared.python"] == {"executable": image, "path": "/root/prepared/site", "vllm": None}
    assert found["mended.python"] == {"executable": image, "path": None, "vllm": None}
    assert found["again"] == pins()["jmespath"]
    assert found["bare.python"]["executable"] == "/root/bare/venv/bin/python"
    assert found["prepared.seconds"] < found["bare.seconds"] / 2
    assert found["identity"] == 0 and found["left"] == "" and found["weights"] == 1
