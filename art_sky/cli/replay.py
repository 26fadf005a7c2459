"""`art-sky replay`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from typing import TYPE_CHECKING, Any

import click

from art_sky.cli.output import duration, json_option, print_json, stderr, stdout, table
from art_sky.cli.stores import chosen_store, find_model, store_options, whole_model
from art_sky.config import SFTConfig, TrainConfig, home
from art_sky.controller.clouds.local import LocalCloud
from art_sky.store.failed import FailedRequest, failed_requests, find_failed
from art_sky.store.model_store import ModelStore

if TYPE_CHECKING:
    from art_sky.client.http_backend import HttpBackend
    from art_sky.schemas import TrainResult


@click.command()
@click.argument("model", metavar="MODEL")
@click.argument("request", metavar="[REQUEST]", required=False)
@click.option(
    "--set", "settings", metavar="NAME=VALUE", multiple=True, help="A setting of TrainConfig to change; repeatable."
)
@store_options
@json_option
def command(
    model: str, request: str | None, settings: tuple[str, ...], url: str | None, cluster: str | None, as_json: bool
) -> None:
    """List train requests that failed, or train the batch of one again.

    The batch is trained on the newest step, as a new request whose id is made from REQUEST and the settings: the same
    command again gives the same result and trains nothing twice. It runs on the server of the cluster that is up with
    this store, else on one that is started for it.
    """
    store = chosen_store(url, cluster)
    found = find_model(store, whole_model(model))
    if request is None:
        if settings:
            raise click.UsageError("--set goes with a REQUEST; see `art-sky replay MODEL` for those that failed")
        return _list(found, as_json)
    failed = find_failed(found, request)
    config = changed(failed.record.config, settings)
    new_id = replay_id(request, config)
    names = [c.name for c in LocalCloud().list() if c.state == "up" and c.store == store.url]
    if cluster is None and len(names) == 1:
        (cluster,) = names
    with stderr().status(f"training the batch of {request} as {new_id}"):
        result = asyncio.run(_train(found, failed, config, new_id, cluster))
    if as_json:
        return print_json({"model": found.prefix, "replayed": request, **result.model_dump()})
    what = f"{result.updates} updates" if result.updates else f"skipped: {result.reason}"
    loss = result.metrics.get("loss")
    what += "" if loss is None else f", loss {loss:.4g}"
    stdout().print(f"{request} is step {result.step} of {found.prefix} ({what})", markup=False, soft_wrap=True)


def changed(config: dict[str, Any], settings: tuple[str, ...]) -> TrainConfig | SFTConfig:
    """A stored config with NAME=VALUE settings on top, values as JSON or plain words. Raises InvalidConfig."""
    values = dict(config)
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name:
            raise click.UsageError(f"--set {setting!r}: write NAME=VALUE, as in learning_rate=1e-6")
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    parsed: TrainConfig | SFTConfig = (SFTConfig if "method" in config else TrainConfig).parse(values)
    return parsed


def replay_id(request: str, config: TrainConfig | SFTConfig) -> str:
    """The same for the same settings, so that a command that was broken off can be called again (rule R3)."""
    told = json.dumps([request, config.model_dump()], sort_keys=True).encode()
    return f"replay-{hashlib.sha256(told).hexdigest()[:32]}"


async def _train(
    model: ModelStore, failed: FailedRequest, config: TrainConfig | SFTConfig, new_id: str, cluster: str | None
) -> TrainResult:
    from art_sky.client.model import TrainableModel

    record = model.record()
    asked = TrainableModel(
        name=model.name,
        project=model.project,
        base_model=record.base_model,
        lora=record.lora,
        options=record.options,
        config=record.config,
        report_to="none",
    )
    async with _backend(model, cluster) as backend:
        await backend.register(asked)
        result = await backend.train_stored(asked, failed.record.batch.sha256, config, new_id)
        split = "sft" if isinstance(config, SFTConfig) else "train"
        await backend.log(asked, [], split, result.step, result.metrics)
        return result


def _backend(model: ModelStore, cluster: str | None) -> HttpBackend:
    if cluster is not None:
        from art_sky.client.connect import connect

        return connect(cluster)
    from art_sky.client.local_backend import LocalBackend

    return LocalBackend(home() / "replay", store=model.store.url)


def _list(model: ModelStore, as_json: bool) -> None:
    failed = list(failed_requests(model))
    if as_json:
        return print_json(
            {
                "store": model.store.url,
                "model": model.prefix,
                "failed": [
                    {
                        "request": f.record.request,
                        "created": f.record.created,
                        "ended": f.ended,
                        "attempts": len(f.attempts),
                        "head_step": f.record.head_step,
                        "batch": f.record.batch.sha256,
                        "batch_kept": model.has_blob(f.record.batch.sha256),
                        "cause": f.cause,
                        "config": f.record.config,
                    }
                    for f in failed
                ],
            }
        )
    if not failed:
        return stdout().print(f"No train request of {model.prefix} has failed.", markup=False)
    now = time.time()
    rows = [
        (
            f.record.request,
            f"{duration(now - f.ended)} ago",
            f.record.head_step,
            len(f.attempts),
            "yes" if model.has_blob(f.record.batch.sha256) else "deleted",
            f.cause,
        )
        for f in failed
    ]
    columns = ["request", "failed", "#on step", "#attempts", "batch", "cause"]
    stdout().print(table(f"Failed train requests of {model.prefix}", columns, rows))
