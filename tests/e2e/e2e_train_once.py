"""A client that trains one step and is killed in the middle of it: RUN BASE GROUPS REQUEST [STORE]."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from e2e_run import TRAIN, make_backend, make_model

import art_sky as art


async def main(run: Path, base: Path, groups: Path, request: str, store: str | None = None) -> None:
    async with make_backend(run, store) as backend:
        model = make_model(base)
        await model.register(backend)
        batch = [art.TrajectoryGroup.model_validate(g) for g in json.loads(groups.read_text())]
        await model.train(batch, config=TRAIN, request_id=request)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:]))
