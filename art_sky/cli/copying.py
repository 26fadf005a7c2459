"""What `art-sky push` and `art-sky pull` share."""

from __future__ import annotations

import dataclasses

from art_sky.cli.output import print_json, size, stdout, transfer_bar
from art_sky.cli.stores import lease_owner
from art_sky.store.copy import copy_model
from art_sky.store.model_store import ModelStore


def copy_and_report(command: str, source: ModelStore, destination: ModelStore, as_json: bool) -> None:
    with transfer_bar(f"{command} {source.prefix}") as progress:
        copied = copy_model(
            source,
            destination,
            lease_owner(command),
            wait_seconds=destination.store.lease_wait_seconds,
            progress=progress,
        )
    if as_json:
        places = {"model": source.prefix, "from": source.store.url, "to": destination.store.url}
        return print_json(places | dataclasses.asdict(copied))
    place = f"{source.prefix} in {destination.store.url}"
    if copied.unchanged:
        text = f"Nothing new: {place} has it all"
    else:
        at = "without a step yet" if copied.step is None else f"at step {copied.step}"
        text = f"{place} is {at}: copied {copied.blobs} blobs ({size(copied.bytes)}) and {copied.records} records"
    stdout().print(text, markup=False, soft_wrap=True)
