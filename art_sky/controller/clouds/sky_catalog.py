"""Prices from SkyPilot's catalog. Reads files of this machine; no cloud and no SkyPilot server is asked.

`sky.catalog` fetches a catalog that is absent or stale (SkyPilot's own rules) and is imported on the first use: it
costs about 1.5 s.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections.abc import Iterator
from typing import Any

from art_sky.controller.cloud_table import CLOUDS
from art_sky.controller.provider import Offer, Wanted
from art_sky.errors import CloudError, InvalidInput, ProviderUnavailable
from art_sky.suggest import did_you_mean

_GPU = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?::(?P<count>[1-9]\d?))?")
# Where nothing was asked for: enough for the engine and trainer of a small model on a CPU.
DEFAULT_CPUS = "4+"


def offers(wanted: Wanted, clouds: list[str]) -> list[Offer]:
    """All machines that fit, in all regions, cheapest first; `clouds` are those that may be used.

    Raises InvalidInput for a GPU that cannot be read or that no cloud has, naming near ones; ProviderUnavailable
    when a catalog cannot be had.
    """
    gpus = [parse_gpu(text) for text in wanted.gpus]
    load()
    with _explained():
        found = list(_gpu_offers(gpus, wanted, clouds) if gpus else _cpu_offers(wanted, clouds))
    return sorted(found, key=lambda o: (o.price, o.cloud, o.region, o.instance_type))


def load() -> None:
    """Imports what `offers` needs, 1.5 s. Raises ProviderUnavailable without SkyPilot."""
    try:
        with _quiet():
            import sky.catalog  # noqa: F401
    except ModuleNotFoundError as e:
        raise ProviderUnavailable(f"{e}; install what rents machines: pip install 'art-sky[sky]'") from e


def parse_gpu(text: str) -> tuple[str, int]:
    """`H100:2` -> ("H100", 2); `H100` -> ("H100", 1). Raises InvalidInput."""
    match = _GPU.fullmatch(text.strip())
    if match is None:
        raise InvalidInput(f"--gpu {text!r} cannot be read; write a GPU as H100, or H100:2 for two of them")
    return match["name"], int(match["count"] or 1)


def _gpu_offers(gpus: list[tuple[str, int]], wanted: Wanted, clouds: list[str]) -> Iterator[Offer]:
    from sky import catalog

    names = "|".join(re.escape(name) for name, _ in gpus)
    listed = catalog.list_accelerators(
        gpus_only=True, name_filter=f"^(?:{names})$", clouds=clouds, case_sensitive=False, all_regions=True
    )
    for name, count in gpus:
        infos = [i for key, found in listed.items() if key.lower() == name.lower() for i in found]
        if not infos:
            _refuse_unknown(name, clouds)
        for info in infos:
            # The catalog gives a missing machine as NaN: accelerators that are priced without one.
            if info.accelerator_count != count or not isinstance(info.instance_type, str):
                continue
            if wanted.regions and info.region not in wanted.regions:
                continue
            if not (_enough(info.cpu_count, wanted.cpus) and _enough(info.memory, wanted.memory)):
                continue
            for spot, price in _prices(wanted, info.price, info.spot_price):
                yield Offer(
                    cloud=str(info.cloud).lower(),
                    region=info.region,
                    instance_type=info.instance_type,
                    accelerators={info.accelerator_name: count},
                    spot=spot,
                    price=price,
                    vcpus=_number(info.cpu_count),
                    memory_gib=_number(info.memory),
                    gpu_memory_gib=_number(info.device_memory),
                )


def _cpu_offers(wanted: Wanted, clouds: list[str]) -> Iterator[Offer]:
    from sky import catalog

    for cloud in clouds:
        instance_type = catalog.get_default_instance_type(
            cpus=wanted.cpus or DEFAULT_CPUS, memory=wanted.memory, clouds=cloud
        )
        if instance_type is None:
            continue
        vcpus, memory = catalog.get_vcpus_mem_from_instance_type(instance_type, clouds=cloud)
        for spot in (False, True):
            if spot and not (wanted.spot != "no" and _has_spot(cloud)):
                continue
            for region in catalog.get_region_zones_for_instance_type(instance_type, use_spot=spot, clouds=cloud):
                if wanted.regions and region.name not in wanted.regions:
                    continue
                price = catalog.get_hourly_cost(
                    instance_type, use_spot=spot, region=region.name, zone=None, clouds=cloud
                )
                on_demand, spot_price = (math.nan, price) if spot else (price, math.nan)
                for is_spot, cost in _prices(wanted, on_demand, spot_price):
                    yield Offer(
                        cloud, region.name, instance_type, {}, is_spot, cost, _number(vcpus), _number(memory)
                    )  # fmt: skip


def _prices(wanted: Wanted, on_demand: float, spot: float) -> Iterator[tuple[bool, float]]:
    """(is spot, dollars per hour) for each way that is wanted and has a price."""
    for is_spot, price, ways in ((False, on_demand, ("no", "prefer")), (True, spot, ("only", "prefer"))):
        if wanted.spot in ways and _number(price) is not None and price > 0:
            yield is_spot, float(price)


def _has_spot(cloud: str) -> bool:
    return cloud not in CLOUDS or CLOUDS[cloud].spot


def _enough(has: Any, asked: str | None) -> bool:
    """`8` is exactly 8, `8+` at least 8, as SkyPilot reads them."""
    if asked is None:
        return True
    number = _number(has)
    try:
        least = float(asked.removesuffix("+"))
    except ValueError:
        raise InvalidInput(f"{asked!r} is no number of cpus or GiB; write 8 for exactly, 8+ for at least") from None
    return number is not None and (number >= least if asked.endswith("+") else number == least)


def _number(value: Any) -> float | None:
    return None if value is None or math.isnan(value) else float(value)


def _refuse_unknown(name: str, clouds: list[str]) -> None:
    from sky import catalog

    known = catalog.list_accelerators(gpus_only=True, clouds=clouds)
    raise InvalidInput(f"none of {', '.join(clouds)} has a GPU {name!r}; {did_you_mean(name.upper(), known)}")


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """SkyPilot's own errors, and those of the download of a catalog, as ours."""
    import requests

    try:
        with _quiet():
            yield
    except requests.RequestException as e:
        raise ProviderUnavailable(
            f"SkyPilot's price catalog could not be fetched ({type(e).__name__}); check the network, then try again"
        ) from e
    except (ValueError, AttributeError, KeyError) as e:
        # AttributeError: a cloud whose catalog module lacks the function.
        raise CloudError(
            f"SkyPilot's price catalog could not be read: {e}; run `sky check`, or name other clouds with --cloud"
        ) from e


def _quiet() -> contextlib.redirect_stdout[io.StringIO]:
    """SkyPilot tells its progress on stdout, where a command's own answer belongs."""
    return contextlib.redirect_stdout(io.StringIO())
