"""`art-sky launch`."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from art_sky.cli.output import duration, json_option, print_json, stderr, stdout
from art_sky.cli.server_options import server_config, server_options
from art_sky.config import Limits
from art_sky.errors import Conflict

if TYPE_CHECKING:
    from art_sky.controller.rented import LaunchRequest

LOCAL_IDLE_MINUTES = 60.0
# Of a rented machine only; given with a local server they are an error, not a silence (rule R6).
_RENTED = (
    "gpu", "region", "spot", "spot_only", "max_price", "budget", "max_hours", "orphan_minutes", "setup_minutes",
    "cpus", "memory", "disk", "image_id", "node_role", "store_profile", "store_credential", "allow_unsafe",
    "allow_cloud_key_on_node", "keep", "yes", "dry_run",
)  # fmt: skip


# How --help divides the options; what stands in none of them is of the server.
SERVER = "The server, here or there"
SECTIONS = {
    "What to rent": (
        "cloud", "gpu", "region", "spot", "spot_only", "max_price", "cpus", "memory", "disk", "image_id",
    ),
    "Bounds of the bill": ("budget", "max_hours", "idle_minutes", "orphan_minutes", "setup_minutes"),
    "Keys and risks": ("node_role", "store_profile", "store_credential", "allow_unsafe", "allow_cloud_key_on_node"),
    "This command": ("dry_run", "yes", "keep", "as_json"),
}  # fmt: skip


class _Sectioned(click.Command):
    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found: dict[str, list[tuple[str, str]]] = {title: [] for title in (*SECTIONS, SERVER)}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (shown := param.get_help_record(ctx)) is not None:
                title = next((title for title, names in SECTIONS.items() if param.name in names), SERVER)
                found["This command" if "--help" in param.opts else title].append(shown)
        for title, options in found.items():
            with formatter.section(title):
                formatter.write_dl(options)


_ABOVE_0 = click.FloatRange(0, min_open=True)


def _default(name: str) -> str:
    return f"Default: {Limits.model_fields[name].default:g}."


@click.command(cls=_Sectioned)
@click.argument("name", required=False)
@click.option("--cloud", metavar="LIST", help="local, or clouds to choose from: aws,gcp,lambda. Default: local; with "
              "--gpu every cloud that SkyPilot may use.")  # fmt: skip
@click.option("--gpu", metavar="LIST", multiple=True, help="What to rent, such as H100, or L4:2 for two; several: "
              "whichever is cheapest.")  # fmt: skip
@click.option("--region", metavar="LIST", multiple=True, help="Regions to choose from. Default: all.")
@click.option("--spot", is_flag=True, help="Consider spot machines too: cheaper, and taken away at any time.")
@click.option("--spot-only", is_flag=True, help="Consider spot machines alone.")
@click.option("--max-price", type=_ABOVE_0, metavar="DOLLARS", help="Ceiling of an hour's price.")
@click.option("--cpus", metavar="N", help="8 for exactly, 8+ for at least.")
@click.option("--memory", metavar="GIB", help="32 for exactly, 32+ for at least.")
@click.option("--disk", type=click.IntRange(30), metavar="GIB", help="Default: 100.")
@click.option("--image-id", metavar="[REGION=]ID", multiple=True, help="A prepared image (infra/image has the recipe), "
              "on AWS one for each region; other regions are then not considered.")  # fmt: skip
@click.option("--budget", type=_ABOVE_0, metavar="DOLLARS", help="End when so much is spent, all machines together.")
@click.option("--max-hours", type=_ABOVE_0, metavar="HOURS", help="End after so long, all machines together. "
              f"{_default('max_hours')}")  # fmt: skip
@click.option("--idle-minutes", type=float, metavar="MINUTES", help="End after so long without work. Default: 60 for a "
              f"local server, {Limits.model_fields['idle_minutes'].default:g} for a rented one.")  # fmt: skip
@click.option("--orphan-minutes", type=float, metavar="MINUTES", help="End after so long without work when this "
              f"computer is gone too. {_default('orphan_minutes')}")  # fmt: skip
@click.option("--setup-minutes", type=float, metavar="MINUTES", help="End when it does not serve after so long. "
              f"{_default('setup_minutes')}")  # fmt: skip
@click.option("--node-role", metavar="NAME", help="AWS instance profile of the machine; infra/aws makes one that may "
              "reach the store's prefix and nothing else.")  # fmt: skip
@click.option("--store-profile", metavar="NAME", help="Profile of this computer whose credential for the store is sent "
              "to the machine, where its role may not reach it; renewed there while this computer runs.")  # fmt: skip
@click.option("--store-credential", type=click.File(), metavar="FILE", help="The same as lines that `aws configure "
              "export-credentials --format env` prints; - reads stdin. A file is looked at again.")  # fmt: skip
@click.option("--allow-unsafe", is_flag=True, help="Rent where nothing ends the bill when this computer is off.")
@click.option("--allow-cloud-key-on-node", is_flag=True, help="Where a machine can end itself only with your "
              "account's key (Lambda, RunPod): put the key there.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Show the plan with its worst-case bill; rent nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--keep", is_flag=True, help="Keep the machine of a failed launch for a look, until its limits end it.")
@server_options
@json_option
def command(name: str | None, cloud: str | None, as_json: bool, **given: Any) -> None:
    """Start a server that outlives this command.

    Here, by default: the cluster NAME (default: local) serves and trains in the background until it has had no work
    for --idle-minutes, or until `art-sky down NAME`.

    With --gpu or --cloud it rents a machine (NAME defaults to `rented`): the cheapest that fits, at a price that is
    shown first with the most that it can come to. The machine ends itself when it is idle, when the budget or the
    hours are used up, and when this computer is gone.

    Agent code reaches it with `art_sky.connect("NAME")`, at an address that stays the same.
    """
    clouds = _list([cloud] if cloud else [])
    rented = {key: given.pop(key) for key in _RENTED}
    if "local" in clouds and clouds != ["local"]:
        raise click.UsageError("--cloud local goes with no other cloud")
    if clouds == ["local"] or not (clouds or rented["gpu"]):
        asked = [f"--{key.replace('_', '-')}" for key, value in rented.items() if value]
        if asked:
            raise click.UsageError(f"{asked[0]} is for rented machines; add --gpu or --cloud aws")
        return _local(name or "local", as_json, given)
    _rented(name or "rented", clouds, rented, as_json, given)


def _local(name: str, as_json: bool, given: dict[str, Any]) -> None:
    from art_sky.controller.cloud import LaunchConfig
    from art_sky.controller.clouds.local import LocalCloud

    _refuse_rented(name)
    local = LocalCloud()
    given["idle_minutes"] = LOCAL_IDLE_MINUTES if given["idle_minutes"] is None else given["idle_minutes"]
    server = server_config(given, state_dir=str(local.folder(name) / "state"))
    with stderr().status(f"launching {name!r}") as line:
        cluster = local.launch(LaunchConfig(name=name, server=server), lambda text: line.update(text))
    if as_json:
        return print_json(cluster.model_dump())
    out = stdout()
    out.print(f"Cluster [bold]{name}[/] is up at [bold]{cluster.base_url}[/]", soft_wrap=True)
    out.print(f"  token in     {cluster.token_file}", soft_wrap=True, markup=False)
    out.print(f"  store        {cluster.store}", soft_wrap=True, markup=False)
    out.print(f"  ends after   {server.idle_minutes:g} minutes without work", soft_wrap=True)
    out.print(f'Use it from agent code:  backend = art_sky.connect("{name}")', markup=False)
    out.print(f"Next:  art-sky status   |   art-sky logs -f {name}   |   art-sky down {name}", markup=False)


def _refuse_rented(name: str) -> None:
    """One name is one cluster, wherever it is."""
    from art_sky.controller.registry import Registry, registry_file
    from art_sky.controller.views import is_over

    if not registry_file().exists():
        return
    registry = Registry(registry_file())
    try:
        found = registry.find(name)
    finally:
        registry.close()
    if found is not None and not is_over(found):
        raise Conflict(
            f"a rented cluster {name!r} is up; use it, end it with `art-sky down {name}`, or take another name"
        )


def _rented(name: str, clouds: list[str], rented: dict[str, Any], as_json: bool, given: dict[str, Any]) -> None:
    from art_sky.cli.plan_table import show_plan
    from art_sky.cli.rented import EventLines
    from art_sky.controller.clouds.skypilot import SkyPilotProvider
    from art_sky.controller.launching import launch_rented
    from art_sky.controller.plan import make_plan

    file = rented.pop("store_credential")
    request = launch_request(name, clouds, rented, given)
    credential = _credential(file, request)
    request = request.model_copy(update={"store_credential": _kept_file(file)})
    asking = "" if clouds else "asking SkyPilot which clouds may be used, and "
    with stderr().status(f"{asking}reading prices"):
        plan = make_plan(request, SkyPilotProvider().offers(request.wanted()))
    if rented["dry_run"]:
        return print_json(plan.to_json()) if as_json else show_plan(stdout(), name, plan)
    show_plan(stderr(), name, plan)
    if not rented["yes"]:
        click.confirm("Rent it?", abort=True, err=True)
    view = launch_rented(request, plan, EventLines(), store_env=credential)
    if as_json:
        return print_json(view)
    out, node = stdout(), view["node"]
    out.print(f"Cluster [bold]{name}[/] is up at [bold]{view['base_url']}[/]", soft_wrap=True)
    out.print(f"  token in     {view['token_file']}", soft_wrap=True, markup=False)
    out.print(f"  store        {view['store']}", soft_wrap=True, markup=False)
    out.print(f"  took         {_phases(node['phases'])}", soft_wrap=True, markup=False)
    out.print(
        f"  costs        ${view['price_per_hour']:.2f} an hour, ${view['worst_case']:.2f} at most", soft_wrap=True
    )
    out.print(f'Use it from agent code:  backend = art_sky.connect("{name}")', markup=False)
    out.print(f"Next:  art-sky status   |   art-sky logs -f {name}   |   art-sky down {name}", markup=False)


def _phases(phases: dict[str, float]) -> str:
    """`ready 61s: provisioning 24s, installing 9s, ...`."""
    parts = [f"{phase} {duration(seconds)}" for phase, seconds in phases.items() if phase != "ready"]
    return f"{duration(phases.get('ready'))}: {', '.join(parts)}"


def _credential(file: TextIO | None, request: LaunchRequest) -> dict[str, str]:
    from art_sky.controller.store_credential import check_expiry, from_source, parse_credential

    if file is not None and request.store_profile is not None:
        raise click.UsageError("give --store-profile or --store-credential, not both")
    if file is None:
        return from_source(request)  # a profile is renewed, and may end before the cluster
    limits, credential = request.limits, parse_credential(file.read())
    check_expiry(credential, limits.max_hours + limits.flush_minutes / 60, datetime.now(UTC))
    return credential


def _kept_file(file: TextIO | None) -> str | None:
    """Where a fresh credential may be found later; None for a pipe."""
    path = Path("-" if file is None else file.name)
    return str(path.resolve()) if path.is_file() else None


def launch_request(name: str, clouds: list[str], rented: dict[str, Any], given: dict[str, Any]) -> LaunchRequest:
    """A LaunchRequest from what was given on the command line. Raises InvalidConfig naming the option."""
    from art_sky.controller.plan import check_store
    from art_sky.controller.rented import LaunchRequest

    if rented["spot"] and rented["spot_only"]:
        raise click.UsageError("give --spot or --spot-only, not both")
    limits = {key: rented[key] for key in ("budget", "max_hours", "orphan_minutes", "setup_minutes")}
    limits["idle_minutes"] = given.pop("idle_minutes")
    check_store(given["store"], shares_files=False)
    server = server_config(given, state_dir="unused")
    values = {
        "name": name,
        "clouds": clouds,
        "gpus": _list(rented["gpu"]),
        "regions": _list(rented["region"]),
        "spot": "only" if rented["spot_only"] else "prefer" if rented["spot"] else "no",
        "limits": Limits.parse({key: value for key, value in limits.items() if value is not None}),
        "store": server.store,
        "server": server.model_dump(exclude={"store", "state_dir", "idle_minutes"}, exclude_defaults=True),
        "disk_gib": rented["disk"],
        "image_id": _image_id(rented["image_id"]),
        **{k: rented[k] for k in ("cpus", "memory", "max_price", "node_role", "store_profile", "allow_unsafe",
                                  "allow_cloud_key_on_node", "keep")},
    }  # fmt: skip
    made: LaunchRequest = LaunchRequest.parse({key: value for key, value in values.items() if value is not None})
    return made


def _image_id(given: tuple[str, ...]) -> str | dict[str, str] | None:
    of_region = dict(text.split("=", 1) for text in given if "=" in text)
    if len(given) > 1 and len(of_region) < len(given):
        raise click.UsageError("give one --image-id ID, or --image-id REGION=ID once for each region")
    return of_region or (given[0] if given else None)


def _list(given: Any) -> list[str]:
    return [
        word.strip().lower() if "," in text else word.strip()
        for text in given
        for word in text.split(",")
        if word.strip()
    ]
