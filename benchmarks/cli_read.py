"""How long the commands that read a store take, as processes, and how many requests they make.

The store is a bucket with many models. `stub`: a server in memory whose answers take 20 ms, as over a network;
`seaweedfs`: a real one on this machine. `ours` is the median of wall and CPU seconds over the rounds, the peer is
`aws s3 ls` of the same prefix where the AWS command line is on the PATH (one request; what a listing alone costs).

    python benchmarks/cli_read.py [--rounds 5] [--models 40] [--servers stub,seaweedfs]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from cli_start import run
from store_sync import BUCKET, serving

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "store"))
sys.path.insert(0, str(HERE.parent / "tests" / "cli"))
STEPS = 5
DELAY_MS = 20
COMMANDS = {
    "models": ["models"],
    "steps, PROJECT/NAME": ["steps", "bench/model-07"],
    "steps, NAME alone": ["steps", "model-07"],
    "diff": ["diff", "bench/model-07@1", "bench/model-07@3"],
    "gc": ["gc", "bench/model-07"],
    "verify": ["verify", "bench/model-07"],
    "status": ["status"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", type=int, default=40)
    parser.add_argument("--servers", default="stub,seaweedfs")
    given = parser.parse_args()
    import s3_servers

    os.environ.update(s3_servers.ENVIRONMENT, AWS_DEFAULT_REGION="us-east-1", AWS_REGION="us-east-1")
    for server in given.servers.split(","):
        with tempfile.TemporaryDirectory() as scratch, serving(server, Path(scratch), DELAY_MS) as endpoint:
            os.environ["ART_SKY_HOME"] = str(Path(scratch, "home"))
            url = f"s3://{BUCKET}/runs?endpoint_url={endpoint}&region=us-east-1"
            fill(url, given.models)
            peers = {}
            if aws := shutil.which("aws"):
                listing = [aws, "s3", "ls", "--recursive", f"s3://{BUCKET}/runs/.models/", "--endpoint-url", endpoint]
                peers["aws s3 ls"] = median([run(listing) for _ in range(given.rounds)])
            for case, command in COMMANDS.items():
                store = [] if case == "status" else ["--store", url]
                ours = [sys.executable, "-m", "art_sky.cli.main", *command, *store, "--json"]
                run(ours)
                requests(server, endpoint)
                times = median([run(ours) for _ in range(given.rounds)])
                asked = requests(server, endpoint)
                notes = f"{given.models} models of {STEPS} steps; medians of {given.rounds} rounds, new processes"
                if asked is not None:
                    notes += f"; {asked // given.rounds} requests of {DELAY_MS} ms"
                ratio = {name: round(peer["wall_s"] / times["wall_s"], 2) for name, peer in peers.items()}
                line: dict[str, Any] = {"bench": "cli_read", "case": f"{case}/{server}", "ours": times, "peers": peers}
                print(json.dumps({**line, "ratio": ratio, "notes": notes}), flush=True)


def fill(url: str, models: int) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from cli_store import make_model

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: make_model(url, "bench", f"model-{n:02d}", STEPS), range(models)))


def requests(server: str, endpoint: str) -> int | None:
    """How many came since this was asked last."""
    if server != "stub":
        return None
    with urllib.request.urlopen(urllib.request.Request(endpoint, headers={"x-stub": "requests"})) as reply:
        return int(reply.read())


def median(times: list[tuple[float, float]]) -> dict[str, float]:
    wall, cpu = (round(statistics.median(values), 3) for values in zip(*times, strict=True))
    return {"wall_s": wall, "cpu_s": cpu}


if __name__ == "__main__":
    main()
