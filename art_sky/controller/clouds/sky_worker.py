"""`python -m art_sky.controller.clouds.sky_worker`: one call to SkyPilot, in a process that can be killed.

The call comes as one JSON object on stdin, what happens goes out as JSON lines on stdout:

    {"event": "request", "id": ...}     SkyPilot's id of the request, to cancel it by
    {"event": "log", "text": ...}       a line of SkyPilot's own log
    {"event": "result", "value": ...}   the last line of a call that worked
    {"event": "error", "code": ..., "message": ...}   the last line of one that did not; code of an `ArtSkyError`

SkyPilot prints wherever it likes: its output goes to stderr, our lines to a descriptor that it does not know.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from art_sky.controller.clouds import aws_direct
from art_sky.errors import ArtSkyError, LaunchFailed, NoCapacity, NoCredentials, NoQuota, ProviderUnavailable

Say = Callable[[dict[str, Any]], None]


def main() -> int:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=out, flush=True)

    call = json.load(sys.stdin)
    try:
        say({"event": "result", "value": CALLS[call.pop("call")](say=say, **call)})
        return 0
    except ArtSkyError as e:
        say({"event": "error", **e.to_wire()["error"]})
    except ModuleNotFoundError as e:
        missing = f"{e}; install what rents machines: pip install 'art-sky[sky]'"
        say({"event": "error", "code": ProviderUnavailable.code, "message": missing})
    return 1


def check(say: Say) -> dict[str, str | None]:
    """Enabled clouds by name; None is a cloud that can be used."""
    import sky
    from sky.client import sdk

    with _typed():
        enabled: list[str] = sky.get(sdk.enabled_clouds())
    return {cloud.lower(): None for cloud in enabled}


def launch(say: Say, task: dict[str, Any], node: str, cloud: str, region: str) -> dict[str, Any]:
    """Returns the machine's facts once the job was handed to the node."""
    import sky

    with _typed(launching=True):
        made = sky.Task.from_yaml_config(task)
        request = sky.launch(made, cluster_name=node)
        say({"event": "request", "id": str(request)})
        sky.stream_and_get(request, output_stream=_Lines(say))
        if cloud == "aws":
            aws_direct.end_on_power_off(node, region)
    return find(say, node, cloud, region)


def find(say: Say, node: str, cloud: str, region: str) -> dict[str, Any]:
    """What the cloud says, with how SSH reaches it as far as SkyPilot knows."""
    record = None
    if cloud == "aws":
        with _typed():
            seen = aws_direct.find(node, region)
        if seen["seen"] != "running":
            return seen
        record = _status(node, refresh=False)
    else:
        record = _status(node, refresh=True)
        seen = {"node": node, "cloud": cloud, "region": region, "seen": _seen(record)}
    return {**seen, **_ssh(record)}


def end(say: Say, node: str, cloud: str, region: str, request: str | None) -> None:
    """Cancels the launch, has SkyPilot end the cluster, then the provider itself whatever is left."""
    import sky
    from sky import exceptions

    failed: BaseException | None = None
    try:
        with _typed():
            if request is not None:
                sky.get(sky.api_cancel([request], silent=True))
            try:
                sky.stream_and_get(sky.down(node), output_stream=_Lines(say))
            except (exceptions.ClusterDoesNotExist, ValueError) as e:
                say({"event": "log", "text": f"SkyPilot: {e}"})  # the provider is asked below
    except ArtSkyError as e:
        failed = e
    if cloud == "aws":
        # Whatever SkyPilot said: an instance that it lost track of is billed all the same.
        with _typed():
            aws_direct.terminate(node, region)
    elif failed is not None:
        raise failed


def machines(say: Say, clouds: list[str]) -> list[dict[str, Any]]:
    """Ours by name or label, in all clouds that can be asked."""
    found: dict[str, dict[str, Any]] = {}
    import sky

    with _typed():
        records = sky.get(sky.status(None, refresh=sky.StatusRefreshMode.FORCE))
    for record in records:
        if record["name"].startswith("artsky-"):
            found[record["name"]] = {
                "node": record["name"],
                "cloud": str(record["cloud"] or "").lower(),
                "region": str(record["region"] or ""),
                "seen": _seen(record),
                "labels": record["labels"] or {},
            }
    if "aws" in clouds:
        with _typed():
            for machine in aws_direct.machines():
                found[machine["node"]] = {**found.get(machine["node"], {}), **machine}
    return list(found.values())


def logs(say: Say, node: str, follow: bool) -> None:
    import sky

    with _typed():
        sky.tail_logs(node, None, follow, output_stream=_Lines(say))


CALLS: dict[str, Callable[..., Any]] = {
    "check": check, "launch": launch, "find": find, "end": end, "machines": machines, "logs": logs,
}  # fmt: skip


def _status(node: str, refresh: bool) -> Any | None:
    import sky

    mode = sky.StatusRefreshMode.FORCE if refresh else sky.StatusRefreshMode.NONE
    with _typed():
        records = sky.get(sky.status([node], refresh=mode, _include_credentials=True))
    return next((r for r in records if r["name"] == node), None)


def _seen(record: Any | None) -> str:
    if record is None:
        return "absent"
    words = {"INIT": "pending", "UP": "running", "STOPPED": "stopped", "AUTOSTOPPING": "ending"}
    return words.get(record["status"].value, "pending")


def _ssh(record: Any | None) -> dict[str, Any]:
    if record is None or record["handle"] is None:
        return {}
    handle, credentials = record["handle"], record["credentials"] or {}
    if not handle.cached_external_ips:
        return {}
    return {
        "host": handle.cached_external_ips[0],
        "port": (handle.cached_external_ssh_ports or [22])[0],
        "user": credentials.get("ssh_user") or handle.ssh_user or "",
        "key_file": str(Path(credentials.get("ssh_private_key") or "~/.ssh/sky-key").expanduser()),
    }


class _Lines:
    """A text stream that says each line; SkyPilot's colours and carriage returns are taken off."""

    _CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")

    def __init__(self, say: Say) -> None:
        self._say, self._rest = say, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + self._CONTROL.sub("", text)).split("\n")
        for line in lines:
            if line.strip():
                self._say({"event": "log", "text": line})
        return len(text)

    def flush(self) -> None:
        pass


class _typed:
    """SkyPilot's and botocore's errors as ours. `launching`: a machine may exist after an unknown one."""

    def __init__(self, launching: bool = False) -> None:
        self._launching = launching

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, ArtSkyError | ModuleNotFoundError):
            raise _as_ours(error, self._launching) from error


_QUOTA = re.compile(r"quota|limit ?exceeded|VcpuLimitExceeded", re.IGNORECASE)
_CAPACITY = re.compile(
    r"InsufficientInstanceCapacity|capacity|ZONE_RESOURCE_POOL_EXHAUSTED|no resources", re.IGNORECASE
)


def _as_ours(error: Exception, launching: bool) -> ArtSkyError:
    from botocore import exceptions as aws
    from sky import exceptions

    text = " ".join(str(error).split())[:600]
    if isinstance(error, exceptions.APIVersionMismatchError):
        return ProviderUnavailable(
            "your SkyPilot server is of another version than the installed SkyPilot; run `sky api stop` when no "
            f"launch is under way, then try again ({text})"
        )
    if isinstance(error, exceptions.ApiServerConnectionError | ConnectionError):
        return ProviderUnavailable(f"SkyPilot's server does not answer ({text}); run `sky api start`, then try again")
    if isinstance(error, aws.NoCredentialsError | exceptions.NoCloudAccessError | exceptions.InvalidCloudCredentials):
        return NoCredentials(f"no usable credentials: {text}; run `sky check`, which says how to set them up")
    if isinstance(error, exceptions.ResourcesUnavailableError):
        if _QUOTA.search(text):
            return NoQuota(f"the account's quota does not allow this machine: {text}; ask your cloud for more, or name "
                           "another --gpu or --region")  # fmt: skip
        return NoCapacity(f"the cloud has no such machine now: {text}; the next candidate is tried")
    if launching:
        return LaunchFailed(f"{type(error).__name__}: {text}; see `art-sky logs`, then launch again")
    return ProviderUnavailable(f"{type(error).__name__}: {text}; try again, or see `sky status`")


if __name__ == "__main__":
    sys.exit(main())
