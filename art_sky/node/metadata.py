"""What the cloud's metadata service says: which machine this is, and whether it is about to be taken away.

AWS: IMDSv2, `spot/instance-action`
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
GCP: `instance/preempted` https://cloud.google.com/compute/docs/instances/create-use-preemptible
Azure: scheduled events https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
"""

from __future__ import annotations

import http.client
import json
from calendar import timegm
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from time import strptime, time

from art_sky.node.clock import Clock

ADDRESS = ("169.254.169.254", 80)
_SECONDS = 1.0  # a metadata service answers in milliseconds or is not there

# How long a machine still runs after the notice was seen, with a margin: AWS gives 2 minutes, the others 30 s.
NOTICE_SECONDS = {"aws": 90.0, "gcp": 20.0, "azure": 20.0}

_GCP = {"Metadata-Flavor": "Google"}
_AZURE = {"Metadata": "true"}


@dataclass(frozen=True)
class Instance:
    """Which machine this is; empty where no metadata service says so."""

    id: str = ""
    region: str = ""
    type: str = ""


class Metadata:
    def __init__(self, cloud: str, clock: Clock, address: tuple[str, int] = ADDRESS) -> None:
        self.cloud = cloud
        self._clock, self._address = clock, address
        self._advised = False

    def notice(self) -> float | None:
        """When the machine will be taken away, in Unix seconds by the cloud's clock; None while it is not announced
        or cannot be found out."""
        if self.cloud == "aws":
            return self._aws_notice()
        if self.cloud == "gcp":
            found = self._get("/computeMetadata/v1/instance/preempted", _GCP)
            return self._clock.unix() + 30 if found is not None and found.strip() == "TRUE" else None
        if self.cloud == "azure":
            return self._azure_notice()
        return None

    def instance(self) -> Instance:
        if self.cloud == "aws":
            found = _object(self._get("/latest/dynamic/instance-identity/document", self._aws_token()))
            return Instance(_text(found, "instanceId"), _text(found, "region"), _text(found, "instanceType"))
        if self.cloud == "gcp":
            base = "/computeMetadata/v1/instance"
            values = [self._get(f"{base}/{name}", _GCP) or "" for name in ("id", "zone", "machine-type")]
            machine, zone, kind = (v.strip().rpartition("/")[2] for v in values)
            return Instance(machine, zone.rpartition("-")[0], kind)
        if self.cloud == "azure":
            found = _object(self._get("/metadata/instance/compute?api-version=2021-02-01", _AZURE))
            return Instance(_text(found, "vmId"), _text(found, "location"), _text(found, "vmSize"))
        return Instance(id=Path("/etc/hostname").read_text().strip() if Path("/etc/hostname").exists() else "")

    def _aws_token(self) -> dict[str, str]:
        token = self._get("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
        return {} if token is None else {"X-aws-ec2-metadata-token": token}

    def _aws_notice(self) -> float | None:
        token = self._aws_token()
        if not token:
            return None
        if not self._advised and self._get("/latest/meta-data/events/recommendations/rebalance", token) is not None:
            self._advised = True
            print("art-sky: AWS says that this spot machine is likelier than others to be taken back soon", flush=True)
        found = self._get("/latest/meta-data/spot/instance-action", token)
        return None if found is None else _iso_time(_text(_object(found), "time"))

    def _azure_notice(self) -> float | None:
        found = _object(self._get("/metadata/scheduledevents?api-version=2020-07-01", _AZURE))
        events = found.get("Events")
        for event in events if isinstance(events, list) else []:
            if isinstance(event, dict) and event.get("EventType") in ("Preempt", "Terminate"):
                try:
                    return parsedate_to_datetime(_text(event, "NotBefore")).timestamp()
                except (TypeError, ValueError):  # empty: it has begun
                    return self._clock.unix() + 30
        return None

    def _get(self, path: str, headers: dict[str, str], method: str = "GET") -> str | None:
        """The body of a 200, else None: no route, no service and no notice look alike here, and none is an error."""
        connection = http.client.HTTPConnection(*self._address, timeout=self._clock.timeout(_SECONDS))
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            body = answer.read(1 << 20)
            return body.decode("utf-8", "replace") if answer.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()


def _object(text: str | None) -> dict[str, object]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _text(found: dict[str, object], name: str) -> str:
    value = found.get(name)
    return value if isinstance(value, str) else ""


def _iso_time(text: str) -> float:
    """`2017-09-18T08:22:00Z`; a notice whose time cannot be read counts as two minutes from now."""
    try:
        return float(timegm(strptime(text, "%Y-%m-%dT%H:%M:%SZ")))
    except ValueError:
        return time() + 120
