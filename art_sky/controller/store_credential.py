"""A credential for the store that a user hands to a launch: read, checked, and long enough for the plan."""

from __future__ import annotations

from datetime import UTC, datetime

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
    try:
        credentials.check(Secrets(token="-", store_env=found))
    except ValueError as e:
        raise InvalidConfig(f"the store's credential cannot be used: {e}; {_HOW}") from None
    return found


def check_expiry(credential: dict[str, str], hours: float, now: datetime) -> None:
    """Raises InvalidConfig where it ends before a cluster may: the last steps could not be written."""
    if EXPIRATION not in credential:
        return
    try:
        end = datetime.fromisoformat(credential[EXPIRATION])
    except ValueError:
        raise InvalidConfig(f"{EXPIRATION} of the store's credential is no time; {_HOW}") from None
    left = (end.replace(tzinfo=end.tzinfo or UTC) - now).total_seconds() / 3600
    if left < hours:
        raise InvalidConfig(
            f"the store's credential ends in {max(left, 0):.1f} hours and the cluster may run for {hours:.1f}, last "
            f"flush included; give --max-hours {max(left - 0.5, 0):.1f} or less, a longer credential, or --node-role"
        )


_HOW = "`aws configure export-credentials --format env-no-export` prints one"
