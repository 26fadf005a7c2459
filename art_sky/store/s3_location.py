"""`s3://bucket/prefix?endpoint_url=...&region=...&profile=...&lease_ttl=60`: where a bucket is, never how to log in."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from art_sky.errors import InvalidConfig, InvalidInput
from art_sky.store.keys import check_key

OPTIONS = ("endpoint_url", "region", "profile", "lease_ttl")
LEASE_TTL = 60.0
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_FORM = "use s3://bucket/prefix, with options such as ?endpoint_url=https://host&region=eu-west-1&profile=name"
_LOGIN = "give credentials by the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE ...), by a profile or a role"


@dataclass(frozen=True)
class Location:
    """What an `s3://` URL says."""

    bucket: str
    prefix: str = ""  # without slashes at its ends; empty for the whole bucket
    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    lease_ttl: float = LEASE_TTL  # seconds after which a silent holder of a lease counts as dead

    @property
    def url(self) -> str:
        """Opens the same place again, in another process too, whose credentials are its own."""
        path = f"/{quote(self.prefix)}" if self.prefix else ""
        ttl = None if self.lease_ttl == LEASE_TTL else f"{self.lease_ttl:g}"
        values = zip(OPTIONS, (self.endpoint_url, self.region, self.profile, ttl), strict=True)
        query = urlencode({name: value for name, value in values if value is not None}, safe=":/")
        return f"s3://{self.bucket}{path}{'?' + query if query else ''}"

    def name(self, key: str) -> str:
        """The object's name in the bucket. Raises InvalidInput when both are too long together."""
        return check_key(f"{self.prefix}/{key}") if self.prefix else key


def parse_location(url: str) -> Location:
    """Raises InvalidConfig, which repeats nothing of the URL that could be a secret."""
    rest = url.removeprefix("s3://")
    place, _, query = rest.partition("?")
    bucket, _, path = place.partition("/")
    if "@" in bucket or ":" in bucket:
        raise InvalidConfig(f"the store's URL holds a login or a port: {_LOGIN}; {_FORM}")
    if not _BUCKET.fullmatch(bucket):
        raise InvalidConfig(f"the store's URL names no bucket ({ascii(bucket)[:80]}): {_FORM}")
    prefix = unquote(path).removesuffix("/")
    try:
        prefix = check_key(prefix) if prefix else ""
    except InvalidInput as e:
        raise InvalidConfig(f"the prefix in s3://{bucket}/... is not usable: {e.message}") from e
    pairs = parse_qsl(query, keep_blank_values=True)
    given = dict(pairs)
    for name, value in pairs:
        if name not in OPTIONS:
            raise InvalidConfig(
                f"s3://{bucket}: unknown option {ascii(name)[:40]}: know {', '.join(OPTIONS)}; {_LOGIN}"
            )
        if not value.strip():
            raise InvalidConfig(f"s3://{bucket}: the option {name} is empty; give a value or leave it out")
    if len(given) != len(pairs):
        raise InvalidConfig(f"s3://{bucket}: an option is given twice; give it once")
    return Location(
        bucket,
        prefix,
        endpoint_url=_endpoint(bucket, given.get("endpoint_url")),
        region=given.get("region"),
        profile=given.get("profile"),
        lease_ttl=_ttl(bucket, given.get("lease_ttl")),
    )


def _endpoint(bucket: str, text: str | None) -> str | None:
    if text is None:
        return None
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        good = False
    if not good:
        raise InvalidConfig(f"s3://{bucket}: endpoint_url is not a URL; use for example endpoint_url=https://host:9000")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise InvalidConfig(f"s3://{bucket}: endpoint_url must be no more than a host and port: {_LOGIN}")
    return text.rstrip("/")


def _ttl(bucket: str, text: str | None) -> float:
    try:
        ttl = LEASE_TTL if text is None else float(text)
    except ValueError:
        ttl = math.nan
    if not 0.1 <= ttl <= 3600:
        raise InvalidConfig(
            f"s3://{bucket}: lease_ttl is not between 0.1 and 3600 seconds; leave it out for {LEASE_TTL:g}"
        )
    return ttl
