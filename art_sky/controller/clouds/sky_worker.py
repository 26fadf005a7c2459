"""`python -m art_sky.controller.clouds.sky_worker`: one call to SkyPilot, in a process that can be killed.

The call comes as one JSON object on stdin, what happens goes out as JSON lines on stdout:

    {"event": "request", "id": ...}     SkyPilot's id of the request, to cancel it by
    {"event": "log", "text": ...}       a line of SkyPilot's own log
    {"event": "result", "value": ...}   the last line of a call that worked
    {"event": "error", "code": ..., "message": ...}   the last line of one that did not; code of an `ArtSkyError`

SkyPilot prints wherever it likes: its output goes to stderr, our lines to a descriptor that it does not know.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from art_sky.controller.clouds import aws_direct
from art_sky.errors import (
    ArtSkyError,
    InvalidInput,
    LaunchFailed,
    NoCapacity,
    NoCredentials,
    NoQuota,
    NotOurs,
    ProviderUnavailable,
)
from art_sky.node import guard

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
        if not enabled:  # `sky check` was never run here, or found none
            sky.get(sdk.check(None, verbose=False))
            enabled = sky.get(sdk.enabled_clouds())
    return {cloud.lower(): None for cloud in enabled}


def launch(
    say: Say, task: dict[str, Any], node: str, cloud: str, region: str, key_on_node: bool, role: str | None
) -> dict[str, Any]:
    """Returns the machine's facts once the job was handed to the node. `key_on_node`: the account's key of this cloud
    stays there, for its node agent and our guard."""
    import sky

    _check_untouched(node, cloud, region, role)

    def heard(event: dict[str, Any]) -> None:
        say(event)
        # At its first moment: whoever dies after this, the guard's power-off ends the bill.
        if cloud == "aws" and "Instance is up" in event["text"]:
            aws_direct.end_on_power_off(node, region)

    log = _Lines(heard)
    with _typed(log):
        delete = " ".join(map(_shell_path, copied_keys(cloud if key_on_node else None)))
        made = sky.Task.from_yaml_config({**task, "setup": f"rm -rf {delete}\n{task['setup']}"})
        with _ended_from_first_boot():
            request = sky.launch(made, cluster_name=node)
        say({"event": "request", "id": str(request)})
        sky.stream_and_get(request, output_stream=log)
        if cloud == "aws":
            aws_direct.end_on_power_off(node, region)
            for stray in aws_direct.terminate_strays(node, region):
                say({"event": "log", "text": f"{stray} was made twice and is ended"})
    return find(say, node, cloud, region)


@contextlib.contextmanager
def _ended_from_first_boot() -> Iterator[None]:
    """SkyPilot's settings under which a machine that this launch leaves before its setup ends itself. The commands of
    the user's own settings are run too. For AWS alone: SkyPilot 0.14.1 has no such setting for other clouds."""
    from sky import skypilot_config

    keys, config = ("aws", "post_provision_runcmd"), skypilot_config.to_dict()
    config.set_nested(keys, [*(config.get_nested(keys, None) or []), guard.FIRST_BOOT])
    with skypilot_config.replace_skypilot_config_in_process(config):
        yield


def _check_untouched(node: str, cloud: str, region: str, role: str | None) -> None:
    """Raises what keeps a launch from being begun, `untouched`: no login, no such role, a name that somebody has."""
    taken = None
    try:
        if cloud == "aws":
            with _typed():
                # Who cannot ask EC2 could not end the machine either; SkyPilot would say that there is no such image.
                taken = aws_direct.find(node, region)["seen"] not in ("absent", "ending")
                if role is not None and not aws_direct.has_role(role, region):
                    raise InvalidInput(
                        f"the account has no instance profile {role!r}; infra/aws makes one, or leave out --node-role"
                    )
        if taken or _status(node, refresh=False) is not None:
            raise NotOurs(
                f"there is a machine {node} already that this launch did not make; it is left alone, see `sky status`"
            )
    except (NoCredentials, InvalidInput, NotOurs) as e:  # not an outage, after which the same launch would work
        raise type(e)(e.message, untouched=True) from e


def copied_keys(kept: str | None) -> list[str]:
    """Paths on a node at which SkyPilot may put keys of this computer although our settings forbid all that can be
    forbidden; without those of the cloud `kept`.

    They cannot be kept from being copied (SkyPilot 0.14.1): `check.get_cloud_credential_file_mounts` goes through all
    clouds, enabled or not, and leaves out those alone whose `remote_identity` says so. The server's schema of the
    config knows that setting for no other cloud, globally or in a workspace, and `disabled` there is not asked. The
    paths are fixed, below the server's own home, and of a client's environment only SKYPILOT_* and a list of names
    reach it. A server with another home would be one that `sky status` and `sky down` know nothing of.
    """
    from sky import skypilot_config
    from sky.adaptors import cloudflare, coreweave, huggingface, vastdata
    from sky.utils import registry

    # Where SkyPilot leaves a second copy of each file, and its own SSH key: both only for clusters of several nodes.
    paths = {huggingface.HF_TOKEN_PATH, "~/.sky/.runtime_files", "~/.ssh/sky-cluster-key"}
    for name, cloud in registry.CLOUD_REGISTRY.items():
        if name != kept and skypilot_config.get_nested((name, "remote_identity"), None) is None:
            paths.update(cloud.get_credential_file_mounts())
    for store in (cloudflare, coreweave, vastdata):
        paths.update(store.get_credential_file_mounts())
    return sorted(paths)


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


def _shell_path(path: str) -> str:
    """Quoted, but for a tilde in front that the node's shell shall expand."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)


_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class _Lines:
    """A text stream that says each line; SkyPilot's colours and carriage returns are taken off. `refusal` is the last
    one of a cloud, which SkyPilot's own error does not repeat."""

    _REFUSAL = re.compile(r"An error occurred \(\w+\).*|\S*(?:quota|POOL_EXHAUSTED).*", re.IGNORECASE)

    def __init__(self, say: Say) -> None:
        self._say, self._rest = say, ""
        self.refusal = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + _CONTROL.sub("", text)).split("\n")
        for line in lines:
            if line.strip():
                self._say({"event": "log", "text": line})
                if found := self._REFUSAL.search(line):
                    self.refusal = found[0]
        return len(text)

    def flush(self) -> None:
        pass


class _typed:
    """SkyPilot's and botocore's errors as ours. `launch`: the log of one, after whose errors a machine may exist."""

    def __init__(self, launch: _Lines | None = None) -> None:
        self._launch = launch

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, ArtSkyError | ModuleNotFoundError):
            raise _as_ours(error, self._launch) from error


_QUOTA = re.compile(r"quota|limit ?exceeded", re.IGNORECASE)
# EC2's codes for keys that it does not take.
_KEYS = re.compile(r"ExpiredToken|RequestExpired|AuthFailure|InvalidClientTokenId|SignatureDoesNotMatch")


def _as_ours(error: Exception, launch: _Lines | None) -> ArtSkyError:
    from botocore import exceptions as aws
    from sky import exceptions

    text = " ".join(_CONTROL.sub("", str(error)).split())[:600]
    if isinstance(error, exceptions.APIVersionMismatchError):
        return ProviderUnavailable(
            "your SkyPilot server is of another version than the installed SkyPilot; run `sky api stop` when no "
            f"launch is under way, then try again ({text})"
        )
    if isinstance(error, exceptions.ApiServerConnectionError | ConnectionError):
        return ProviderUnavailable(f"SkyPilot's server does not answer ({text}); run `sky api start`, then try again")
    keyless = (
        *(aws.NoCredentialsError, aws.PartialCredentialsError, aws.CredentialRetrievalError, aws.SSOError),
        *(aws.ProfileNotFound, exceptions.NoCloudAccessError, exceptions.InvalidCloudCredentials),
    )
    # SkyPilot's optimizer, before anything is asked of the cloud.
    closed = isinstance(error, exceptions.ResourcesUnavailableError) and "not enabled" in text
    if isinstance(error, keyless) or closed or _KEYS.search(text):
        details = {"untouched": True} if closed else {}
        return NoCredentials(
            f"no usable credentials: {text}; run `sky check`, which says how to set them up", **details
        )
    if isinstance(error, exceptions.ResourcesUnavailableError):
        why = launch.refusal if launch is not None and launch.refusal else text
        if _QUOTA.search(why):
            return NoQuota(f"the account's quota does not allow this machine: {why}; ask your cloud for more, or name "
                           "another --gpu or --region")  # fmt: skip
        return NoCapacity(f"the cloud has no such machine now: {why}; the next candidate is tried")
    if launch is not None:
        return LaunchFailed(f"{type(error).__name__}: {text}; see `art-sky logs`, then launch again")
    return ProviderUnavailable(f"{type(error).__name__}: {text}; try again, or see `sky status`")


if __name__ == "__main__":
    sys.exit(main())
