"""One boto3 client for all threads, and when a call is made again.

botocore's own retries are off: its retry of a put whose reply was lost would report 412, so that a won commit looks
lost. Calls without a condition are made again here, with jitter, until a deadline. A login that has expired is looked
for anew, in the environment and files as they are then, once a call: a fresh one may lie there.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import botocore.exceptions
from boto3.session import Session
from botocore.config import Config

from art_sky.errors import InvalidConfig
from art_sky.store.s3_errors import CALL_ERRORS, code_of, explained, is_expired_login, kind_of, status_of
from art_sky.store.s3_location import Location

T = TypeVar("T")
DEFAULT_REGION = "us-east-1"  # signed with where none is configured; servers other than AWS ignore it
TRANSFERS = 6  # parts in flight, of all transfers of a store together


@dataclass(frozen=True)
class Timing:
    """Seconds."""

    deadline: float = 60.0  # until an unconditional call is given up
    conditional: float = 20.0  # until the outcome of a conditional write is reported as unknown; under ttl / 2
    first_contact: float = 5.0  # until an address that never answered is given up
    connect: float = 5.0
    read: float = 20.0  # of silence
    first_pause: float = 0.1  # doubled each time; what is slept is random below it
    longest_pause: float = 5.0


class Client:
    """`raw` is the boto3 client, to be used within `retry`."""

    def __init__(self, at: Location, timing: Timing) -> None:
        self.at = at
        self.timing = timing
        self.raw = _connect(at, timing)
        self.checksums = True  # until a server says that it does not know them
        self.answered = False
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def retry(self, what: str, name: str, attempt: Callable[[], T]) -> T:
        """What `attempt` returns, sooner or later. Absence raises botocore's ClientError, all else StoreError."""
        pauses = self.pauses(self.timing.deadline)
        while True:
            try:
                result = attempt()
            except CALL_ERRORS as e:
                kind = kind_of(e)
                if kind == "absent":
                    raise
                if pauses.adapt(e):
                    continue
                if kind == "final" or not pauses.another():
                    raise explained(e, what, self.at, name) from e
            else:
                self.answered = True
                return result

    def pauses(self, seconds: float) -> Pauses:
        return Pauses(self, seconds)

    def log_in_again(self) -> None:
        with self._lock:
            self.raw = _connect(self.at, self.timing)

    @property
    def pool(self) -> ThreadPoolExecutor:
        """For parts of large objects; its tasks wait for no other tasks."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(TRANSFERS, thread_name_prefix="s3-transfer")
            return self._pool


class Pauses:
    """Between the tries of one call."""

    def __init__(self, client: Client, seconds: float) -> None:
        self._client = client
        self._seconds = seconds
        self._begin = time.monotonic()
        self._limit = client.timing.first_pause
        self._plainer = self._logged_in = False

    def adapt(self, error: Exception) -> bool:
        """Learns from an error; True, at most once a call for each cause, when the next try will be another request."""
        self._client.answered |= status_of(error) > 0
        if not self._plainer and _means_no_checksums(error):
            self._plainer, self._client.checksums = True, False
            return True
        if not self._logged_in and is_expired_login(error):
            self._logged_in = True
            self._client.log_in_again()
            return True
        return False

    def another(self) -> bool:
        """Sleeps for a random while; False, at once, when the deadline would pass meanwhile."""
        timing = self._client.timing
        pause = random.uniform(0, self._limit)
        seconds = self._seconds if self._client.answered else min(self._seconds, timing.first_contact)
        if time.monotonic() + pause >= self._begin + seconds:
            return False
        time.sleep(pause)
        self._limit = min(self._limit * 2, timing.longest_pause)
        return True


def _connect(at: Location, timing: Timing) -> Any:
    try:
        session = Session(profile_name=at.profile)
        region = at.region or session.region_name or DEFAULT_REGION

        def client(path_style: bool) -> Any:
            config = _config(timing, path_style)
            return session.client("s3", region_name=region, endpoint_url=at.endpoint_url, config=config)

        path_style = at.endpoint_url is not None and not _is_aws(at.endpoint_url)
        made = client(path_style)
        # The endpoint may also come from the environment or the profile.
        return made if path_style or _is_aws(made.meta.endpoint_url) else client(path_style=True)
    except (botocore.exceptions.BotoCoreError, ValueError) as e:
        raise InvalidConfig(f"cannot use s3://{at.bucket}: {e}; mend the store's URL or the AWS settings") from e


def _config(timing: Timing, path_style: bool) -> Config:
    return Config(
        signature_version="s3v4",
        connect_timeout=timing.connect,
        read_timeout=timing.read,
        max_pool_connections=32,
        retries={"total_max_attempts": 1, "mode": "standard"},
        tcp_keepalive=True,
        # Ours are in the request as they are; botocore's trailers are unknown to some servers.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path"} if path_style else None,
    )


def _is_aws(endpoint: str) -> bool:
    """Only there does every bucket have a host name of its own."""
    return (urlsplit(endpoint).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))


def _means_no_checksums(error: Exception) -> bool:
    return code_of(error) == "NotImplemented" or (
        code_of(error) in ("InvalidArgument", "InvalidRequest") and "checksum" in str(error).lower()
    )
