"""`python -m art_sky.controller`: the controller of this user, until nothing is left to watch."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import logging.handlers
import os
import sys
from pathlib import Path

from art_sky.controller.control import controller_folder
from art_sky.controller.daemon import Daemon, only_one
from art_sky.controller.provider import Provider
from art_sky.controller.registry import Registry, registry_file
from art_sky.errors import ArtSkyError, Conflict, InvalidConfig

SKYPILOT = "art_sky.controller.clouds.skypilot:SkyPilotProvider"


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 at its end and when another one runs already, 1 with one line on stderr when it cannot start."""
    argparse.ArgumentParser(prog="python -m art_sky.controller", description=__doc__).parse_args(argv)
    folder = controller_folder()
    try:
        with only_one(folder):
            _log_to(folder / "controller.log")
            registry = Registry(registry_file())
            try:
                asyncio.run(_run(folder, registry))
            finally:
                registry.close()
    except Conflict:
        return 0
    except ArtSkyError as e:
        print(f"error: {' '.join(e.message.split())}", file=sys.stderr)
        return 1
    # Threads that still wait for a cloud must not keep the process.
    logging.shutdown()
    os._exit(0)


def make_provider() -> Provider:
    """SkyPilot, or what `ART_SKY_PROVIDER=module:name` names (another way to rent, and tests). Raises InvalidConfig."""
    where = os.environ.get("ART_SKY_PROVIDER", SKYPILOT)
    module, _, name = where.partition(":")
    try:
        made: Provider = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, ValueError) as e:
        raise InvalidConfig(f"ART_SKY_PROVIDER={where!r} cannot be used: {e}; give module:name, or unset it") from e
    return made


async def _run(folder: Path, registry: Registry) -> None:
    await Daemon(folder, registry, make_provider()).run()


def _log_to(file: Path) -> None:
    handler = logging.handlers.RotatingFileHandler(file, maxBytes=4 << 20, backupCount=2)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    file.chmod(0o600)
    logging.basicConfig(level=logging.INFO, handlers=[handler])


if __name__ == "__main__":
    sys.exit(main())
