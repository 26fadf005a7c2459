"""From a cluster's record to the order of its next machine."""

from __future__ import annotations

from pathlib import Path

from art_sky import __version__
from art_sky.config import EngineConfig, TrainerConfig, home
from art_sky.controller.plan import GUARD_MINUTES
from art_sky.controller.provider import NodeOrder, Offer
from art_sky.controller.rented import Node, RentedCluster
from art_sky.controller.wheel import make_wheel
from art_sky.node import packages
from art_sky.node.records import NodeConfig, NodeLimits


def make_order(cluster: RentedCluster, node: Node, limits: NodeLimits, wheels: Path | None = None) -> NodeOrder:
    """`limits` are what the cluster's earlier machines left; `wheels` is where our wheel is kept."""
    request, offer = cluster.request, Offer(**node.offer)
    engine = request.server.get("engine", {})
    trainer = TrainerConfig(**request.server.get("trainer", {}))
    bitsandbytes = trainer.optimizer == "adamw_8bit" or trainer.quantization == "nf4"
    wheel = make_wheel(wheels if wheels is not None else home() / "controller" / "wheels")
    config = NodeConfig(
        cluster=cluster.id,
        node=node.name,
        cloud=offer.cloud,
        price_per_hour=offer.price,
        spot=offer.spot,
        store=request.store,
        limits=limits,
        wheel=wheel.name,
        version=__version__,
        packages=[packages.server(bitsandbytes=bitsandbytes)],
        server=request.server,
        billed_from_unix=node.billed_from,
        vllm_packages=list(packages.VLLM) if EngineConfig(**engine).kind == "vllm" else [],
    )
    return NodeOrder(
        offer=offer,
        config=config,
        wheel=str(wheel),
        labels=labels(cluster.id, node, limits),
        disk_gib=request.disk_gib,
        image_id=request.image_in(offer.region),
        node_role=request.node_role,
        cloud_key_on_node=request.allow_cloud_key_on_node,
    )


def labels(cluster: str, node: Node, limits: NodeLimits) -> dict[str, str]:
    """By which a machine is found again, whatever else was lost; `art-sky-until` is Unix seconds after which it is an
    orphan. Lower-case letters, digits and '-', as the strictest cloud (GCP) takes them."""
    last = limits.max_hours * 3600 + (limits.flush_minutes + GUARD_MINUTES) * 60
    return {
        "art-sky": "1",
        "art-sky-id": cluster,
        "art-sky-node": node.name,
        "art-sky-until": str(int(node.billed_from + last)),
    }
