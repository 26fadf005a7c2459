"""`python3 -m art_sky.node.image WHEEL`: what setup installs on a node, ahead of time, into the image of one.

`infra/image` runs it on the machine that the image is made of. art-sky itself is not left there: each launch brings
its own. Nor is a key: a gated model's is read from HF_TOKEN.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from art_sky.node import install, packages


def main(argv: list[str]) -> int:
    """Exit code 1 with one line where something failed; a second run begins with that."""
    parser = argparse.ArgumentParser(prog="python3 -m art_sky.node.image", description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path, help="of art-sky; says which packages, and in which versions")
    parser.add_argument("--without-vllm", action="store_true", help="for nodes that sample with the engine for CPUs")
    parser.add_argument("--model", help="base model whose weights the image shall hold, as a launch names it")
    given = parser.parse_args(argv)
    try:
        fill(install.IMAGE, given.wheel.resolve(), vllm=not given.without_vllm, model=given.model)
    except (OSError, ValueError, subprocess.SubprocessError) as e:
        print(f"art-sky: the image was not made: {e}; see the lines above, mend it and call again", file=sys.stderr)
        return 1
    return 0


def fill(image: Path, wheel: Path, *, vllm: bool, model: str | None) -> None:
    """Makes `image`/venv and, with `vllm`, `image`/vllm. Raises OSError, ValueError or SubprocessError."""
    needs = [str(wheel), packages.server(bitsandbytes=True), "--constraint", str(packages.write_constraints(image))]
    python = install.environment_with(image / "venv", needs, wheel)
    install.run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "art-sky"])
    if vllm:
        install.environment_with(image / "vllm", packages.VLLM)
    if model is not None:
        code = "import sys; from art_sky.base_models import resolve; print('art-sky: weights in', resolve(sys.argv[1]))"
        install.run([str(python), "-c", code, model], {"PYTHONPATH": str(wheel)})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
