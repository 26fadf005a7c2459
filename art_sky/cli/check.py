"""`art-sky check`."""

from __future__ import annotations

import dataclasses

import click

from art_sky.cli.output import json_option, print_json, stderr, stdout, table
from art_sky.cli.stores import chosen_store
from art_sky.store import open_store
from art_sky.store.check import check_store


@click.command()
@click.argument("url", metavar="[STORE]", required=False)
@json_option
def command(url: str | None, as_json: bool) -> int:
    """Try out what a store can do.

    Reads, writes, creates, swaps, lists, locks and deletes below a random prefix, which is gone afterwards, and says
    what will and will not be safe there. Exit code 1 when training will not be.
    """
    store = chosen_store(None, None) if url is None else open_store(url)
    with stderr().status(f"checking {store.url}"):
        check = check_store(store)
    if as_json:
        print_json(
            {
                "store": check.url,
                "safe_to_read": check.safe_to_read,
                "safe_to_train": check.safe_to_train,
                "trials": [dataclasses.asdict(trial) for trial in check.trials],
                "next_step": check.next_step,
            }
        )
        return int(not check.safe_to_train)
    rows = [(t.name, "ok" if t.ok else "FAILED" if t.need != "nothing" else "no", t.detail) for t in check.trials]
    stdout().print(table(f"Store {check.url}", ["trial", "result", "what happened"], rows))
    safe = {"reading models": check.safe_to_read, "training": check.safe_to_train}
    for what, so in safe.items():
        stdout().print(f"{what}: {'safe' if so else 'NOT safe'}", highlight=False)
    if check.next_step:
        stdout().print(f"Next: {check.next_step}", markup=False, soft_wrap=True)
    return int(not check.safe_to_train)
