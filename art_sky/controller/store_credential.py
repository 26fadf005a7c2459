"""A credential for the store that a user hands to a launch: read, checked, and long enough for the plan.

It comes from a profile of this computer's AWS settings or from a file, which are looked at again (`renewal`), or by
itself, as through a pipe.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from art_sky.controller.rented import LaunchRequest
from art_sky.errors import InvalidConfig
from art_sky.node import credentials
from art_sky.node.records import Secrets

EXPIRATION = "AWS_CREDENTIAL_EXPIRATION"


def parse_credential(text: str) -> dict[str, str]:
    """Lines NAME=VALUE, with or without `export`, as `aws configure export-credentials --format env` prints them.

    Raises InvalidConfig, which repeats no value.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if not line.strip():
            continue
        if not equals:
            raise InvalidConfig(f"line {number} of the store's credential is not NAME=VALUE; {_HOW}")
        found[name.strip()] = value.strip().strip("\"'")
    if "AWS_ACCESS_KEY_ID" not in found:
        raise InvalidConfig(f"the store's credential holds no AWS_ACCESS_KEY_ID; {_HOW}")
    return _checked(found)


def from_profile(name: str) -> dict[str, str]:
    """What a profile of this computer gives now, with its region and endpoint; may ask the network or run a program.

    Raises InvalidConfig with the next step.
    """
    import botocore.exceptions
    import botocore.session

    # A session of its own: what another one found stays as it was.
    session = botocore.session.Session(profile=name)
    try:
        found = session.get_credentials()
        keys = found.get_frozen_credentials() if found is not None else None
        scoped = session.get_scoped_config()
    except botocore.exceptions.ProfileNotFound:
        known = ", ".join(sorted(session.available_profiles)) or "none"
        raise InvalidConfig(f"there is no profile {name!r} in this computer's AWS settings (there: {known})") from None
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError, RuntimeError, OSError) as e:
        raise InvalidConfig(f"the profile {name!r} gives no credential ({_one_line(e)}); {renew_profile(name)}") from e
    if keys is None or not keys.access_key or not keys.secret_key:
        raise InvalidConfig(f"the profile {name!r} gives no credential; {renew_profile(name)}")
    values = {
        "AWS_ACCESS_KEY_ID": keys.access_key,
        "AWS_SECRET_ACCESS_KEY": keys.secret_key,
        "AWS_SESSION_TOKEN": keys.token,
        EXPIRATION: _end(found),
        "AWS_REGION": scoped.get("region"),
        "AWS_ENDPOINT_URL_S3": scoped.get("endpoint_url"),
    }
    return _checked({name: value for name, value in values.items() if value})


def from_source(request: LaunchRequest) -> dict[str, str]:
    """What the launch named gives now; empty where it named nothing. Raises InvalidConfig."""
    if request.store_profile is not None:
        return from_profile(request.store_profile)
    if request.store_credential is not None:
        try:
            text = Path(request.store_credential).expanduser().read_text()
        except (OSError, ValueError) as e:
            raise InvalidConfig(f"{request.store_credential} cannot be read ({_one_line(e)}); {_HOW}") from e
        return parse_credential(text)
    return {}


def expires(credential: dict[str, str]) -> float | None:
    """Unix seconds; None where it says nothing of an end."""
    if EXPIRATION not in credential:
        return None
    end = datetime.fromisoformat(credential[EXPIRATION])
    return end.replace(tzinfo=end.tzinfo or UTC).timestamp()


def check_expiry(credential: dict[str, str], hours: float, now: datetime) -> None:
    """Raises InvalidConfig where it ends before a cluster may: the last steps could not be written."""
    end = expires(credential)
    if end is None:
        return
    left = (end - now.timestamp()) / 3600
    if left < hours:
        raise InvalidConfig(
            f"the store's credential ends in {max(left, 0):.1f} hours and the cluster may run for {hours:.1f}, last "
            f"flush included; give --max-hours {max(left - 0.5, 0):.1f} or less, a longer credential, --store-profile, "
            "which is renewed, or --node-role"
        )


def renew_profile(name: str) -> str:
    return f"renew it, as by `aws sso login --profile {name}`"


def _checked(found: dict[str, str]) -> dict[str, str]:
    try:
        credentials.check(Secrets(token="-", store_env=found))
    except ValueError as e:
        raise InvalidConfig(f"the store's credential cannot be used: {e}; {_HOW}") from None
    try:
        expires(found)
    except ValueError:
        raise InvalidConfig(f"{EXPIRATION} of the store's credential is no time; {_HOW}") from None
    return found


def _end(credentials: object) -> str | None:
    """botocore keeps the end of one that it renews in a field of its own; a later release may rename it."""
    end = getattr(credentials, "_expiry_time", None)
    return end.isoformat() if isinstance(end, datetime) else None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200].rstrip(".")


_HOW = "`aws configure export-credentials --format env-no-export` prints one"
