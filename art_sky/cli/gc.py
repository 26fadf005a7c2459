"""`art-sky gc`."""

from __future__ import annotations

import time

import click

from art_sky.cli.output import duration, json_option, print_json, size, stderr, stdout, table
from art_sky.cli.stores import chosen_store, find_model, lease_owner, store_options, whole_model
from art_sky.controller.old_clusters import KEEP_DAYS, find_old_clusters, forget
from art_sky.store.gc import GRACE_SECONDS, Garbage, collect, find_garbage
from art_sky.store.model_store import ModelStore, list_models


@click.command()
@click.argument("model", metavar="[MODEL]", required=False)
@click.option("--delete", is_flag=True, help="Delete it; without this nothing is changed.")
@click.option(
    "--grace-hours",
    type=click.FloatRange(0),
    default=GRACE_SECONDS / 3600,
    show_default=True,
    help="Leave what is younger than this: somebody may be about to use it.",
)
@click.option(
    "--logs-days",
    type=click.FloatRange(0),
    default=KEEP_DAYS,
    show_default=True,
    help="Leave logs and ledger of rented machines that ended less than this ago.",
)
@click.option("--clouds", is_flag=True, help="Of machines instead: those at the clouds that nobody needs.")
@click.option("--end", "picked", metavar="NAME", multiple=True, help="With --clouds: end this machine, whatever it is.")
@store_options
@json_option
def command(
    model: str | None,
    delete: bool,
    grace_hours: float,
    logs_days: float,
    clouds: bool,
    picked: tuple[str, ...],
    url: str | None,
    cluster: str | None,
    as_json: bool,
) -> None:
    """Find what no step needs; with --delete, delete it.

    That is what crashes left, batches that were uploaded and never trained on, and leftovers of broken uploads. What
    HEAD, a tag, a fork or a waiting train request needs stays. To delete, no server may have the model meanwhile.

    Without a MODEL also the logs that rented machines left, once all of a cluster ended --logs-days ago; of its ledger
    what each machine cost stays.

    With --clouds it lists the machines, stopped ones too, that carry our names or labels, and which of them are
    orphans by the registry here or by the ledger in --store. A name alone confirms nothing.
    """
    if clouds:
        if model is not None or cluster is not None:
            raise click.UsageError("--clouds takes no MODEL and no --cluster")
        from art_sky.cli.cloud_gc import collect_machines

        return collect_machines(url, delete, picked, as_json)
    if picked:
        raise click.UsageError("--end goes with --clouds")
    store = chosen_store(url, cluster)
    models = [ModelStore(store, *names) for names in list_models(store)] if model is None else []
    if model is not None:
        models = [find_model(store, whole_model(model))]
    found: list[tuple[ModelStore, Garbage]] = []
    for one in models:
        with stderr().status(f"looking through {one.prefix}"):
            if delete:
                with one.open_writer(lease_owner("gc"), store.lease_wait_seconds) as writer:
                    found.append((one, collect(writer, grace_hours * 3600)))
            else:
                found.append((one, find_garbage(one, grace_hours * 3600)))
    old = find_old_clusters(store, logs_days, time.time()) if model is None else []
    if delete:
        for ended in old:
            forget(store, ended)
    if as_json:
        return print_json(
            {
                "store": store.url,
                "deleted": delete,
                "models": [
                    {
                        "model": one.prefix,
                        "objects": [info.key for info in garbage.objects],
                        "bytes": garbage.size,
                        "younger": [info.key for info in garbage.young],
                        "uploads": garbage.uploads,
                    }
                    for one, garbage in found
                ],
                "clusters": [{"cluster": c.id, "bytes": c.size, "dollars": c.dollars} for c in old],
            }
        )
    rows = [(one.prefix, len(g.objects), size(g.size), len(g.young), g.uploads if delete else None) for one, g in found]
    columns = ["model", "#objects", "#bytes", "#younger, kept", "#broken uploads"]
    stdout().print(table(f"{'Deleted' if delete else 'Not needed'} in {store.url}", columns, rows))
    if old:
        now = time.time()
        ends = [(c.id, len(c.logs) + len(c.costs), size(c.size), f"{duration(now - c.closed)} ago") for c in old]
        columns = ["cluster", "#objects", "#bytes", "ended"]
        stdout().print(table("\nLogs and ledgers of rented clusters", columns, ends))
    if not delete and (old or any(garbage.objects for _, garbage in found)):
        stdout().print("Nothing was changed. Delete it with --delete.")
