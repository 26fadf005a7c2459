"""What ends a bill on which cloud: data, with where each entry was read.

Node agent: SkyPilot's own process on the machine can terminate it, with the laptop off. Guard: our root-owned timer
powers the machine off, and that ends the bill, or it can call the provider. The watchdog runs everywhere, but what it
ends is a job; the bill needs one of the other two behind it. Labels: a lost machine can be found by them.

Sources: SkyPilot 0.14.1 `sky/clouds/<cloud>.py` (unsupported features, credential files) and
`sky/provision/<cloud>/` (labels, termination from the node); AWS EC2 user guide, "Change instance initiated shutdown
behavior"; Google Compute Engine, "Stop or restart an instance" (a stopped one still pays for its disk); Lambda Cloud
API, "Terminate instances" (a machine that is powered off is billed on); Azure, "States and billing status of
virtual machines" (one that is shut down from inside stays allocated and billed).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from art_sky.suggest import did_you_mean

PowerOff = Literal["terminates", "stops", "nothing"]


@dataclass(frozen=True)
class CloudFacts:
    name: str
    # What the node agent terminates with: a role that the machine has by itself, or the account's key as a file.
    node_agent: Literal["role", "account key", "none"]
    power_off: PowerOff
    spot: bool
    spot_notice_seconds: int  # 0: none
    labels: bool
    image_id: bool
    note: str = ""

    def guarantees(self, key_on_node: bool) -> tuple[str, ...]:
        """What ends a machine of this cloud without the laptop, in the order in which it acts."""
        agent = self.node_agent == "role" or (self.node_agent == "account key" and key_on_node)
        guard = self.power_off != "nothing" or (self.node_agent == "account key" and key_on_node)
        found = [("watchdog", True), ("node agent", agent), ("guard", guard), ("gc by label", self.labels)]
        return tuple(word for word, has in found if has and (word != "watchdog" or agent or guard))

    def is_safe(self, key_on_node: bool) -> bool:
        """Whether the bill ends with the laptop off."""
        return "watchdog" in self.guarantees(key_on_node)


CLOUDS: dict[str, CloudFacts] = {
    c.name: c
    for c in (
        CloudFacts("aws", "role", "terminates", True, 120, labels=True, image_id=True),
        CloudFacts(
            "gcp", "role", "stops", True, 30, labels=True, image_id=True,
            note="a powered-off machine still pays for its disk until `art-sky gc`",
        ),
        CloudFacts(
            "azure", "role", "nothing", True, 30, labels=True, image_id=True,
            note="a machine that powers itself off stays allocated and billed; only the node agent ends it",
        ),
        CloudFacts(
            "lambda", "account key", "nothing", False, 0, labels=False, image_id=False,
            note="only a process on the machine that holds your Lambda API key can end it: --allow-cloud-key-on-node",
        ),
        CloudFacts(
            "runpod", "account key", "nothing", True, 0, labels=False, image_id=False,
            note="only a process on the machine that holds your RunPod API key can end it: --allow-cloud-key-on-node",
        ),
    )
}  # fmt: skip


def cloud_facts(name: str) -> CloudFacts:
    """A cloud that is not in the table promises nothing. See also `near_cloud`."""
    return CLOUDS.get(name.lower()) or CloudFacts(
        name.lower(), "none", "nothing", False, 0, labels=False, image_id=False, note="art-sky knows nothing of it"
    )


def near_cloud(name: str) -> str:
    return did_you_mean(name.lower(), sorted(CLOUDS))
