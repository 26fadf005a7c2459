"""`art-sky launch --dry-run` with the real SkyPilot's price lists."""

from __future__ import annotations

import json
import resource
import time

import pytest
from fakecloud_session import FakeCloud

pytestmark = pytest.mark.cloud
STORE = ("--store", "s3://artsky-plan/runs")


@pytest.mark.parametrize("clouds", ["aws,gcp,lambda", None])
def test_a_plan_in_less_than_three_seconds(fakecloud: FakeCloud, clouds: str | None) -> None:
    """With SkyPilot's server up, which is asked for the enabled clouds where none are named."""
    options = ["--gpu", "H100,A100-80GB", "--budget", "20", *STORE, *(["--cloud", clouds] if clouds else [])]
    command = ["art-sky", "launch", "plan", "--dry-run", "--json", *options]
    fakecloud.run(["sky", "check", "aws"])
    fakecloud.run(command)  # bytecode and caches
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    plan = json.loads(fakecloud.run(command).stdout)
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"\n{clouds}: {wall:.1f} s, of which {cpu:.1f} s of CPU on all cores")
    # Of a machine with nothing else to do; two processes import SkyPilot side by side where the server is asked.
    assert cpu < (3 if clouds else 6)
    offers = [c["offer"] for c in plan["candidates"]]
    assert {o["cloud"] for o in offers} == ({"aws", "gcp", "lambda"} if clouds else {"aws"})
    assert [o["price"] for o in offers] == sorted(o["price"] for o in offers)
    refused = {c["offer"]["cloud"] for c in plan["candidates"] if c["refused"]}
    assert refused == ({"lambda"} if clouds else set())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "H1000", "--cloud", "aws"], "has a GPU 'H1000'; did you mean 'H100'"),
        (["--gpu", "L4", "--cloud", "aws", "--budget", "0.1"], "does not pay for 15 minutes"),
        (["--gpu", "H100", "--cloud", "lambda"], "--allow-cloud-key-on-node"),
        (["--gpu", "L4", "--cloud", "nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_rented_is_one_line(fakecloud: FakeCloud, options: list[str], message: str) -> None:
    done = fakecloud.run(["art-sky", "launch", "plan", "--dry-run", *STORE, *options], check=False)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
