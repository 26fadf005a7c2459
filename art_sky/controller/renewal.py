"""The credential for the store while a cluster runs: a fresh one is found, sent to the node, and missed in time.

Where a launch named a profile or a file, that is looked at again; `art-sky extend --store-credential` brings one by
hand. The node's server and its watchdog go on with what they are sent, without a restart. A machine that reaches the
store by a role of its own has nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from art_sky.controller import money
from art_sky.controller.calls import Calls
from art_sky.controller.live import Live
from art_sky.controller.rented import Node, RentedCluster
from art_sky.controller.secrets import read_secrets, replace_store_env
from art_sky.controller.store_credential import expires, from_source, renew_profile
from art_sky.errors import ArtSkyError

if TYPE_CHECKING:
    from art_sky.controller.observe import Ticks

# Seconds. So long before its end a credential is renewed from its profile, and its end is told.
RENEW_SECONDS = 1800.0
ASK_SECONDS = 60.0  # between looks at where it came from
GAIN_SECONDS = 300.0  # one that lasts no longer than this beyond the old one is not worth sending
PATIENCE_SECONDS = 30.0  # a node that waits for its secrets is not kept waiting longer for a fresh one


class Credentials(Protocol):
    """Where a cluster's credential is kept on this computer, and where it came from."""

    def current(self, cluster: RentedCluster) -> dict[str, str]:
        """What its nodes are sent, empty for nothing. Raises CorruptObject."""
        ...

    def fresh(self, cluster: RentedCluster) -> dict[str, str]:
        """What its source gives now, empty where it has none. Blocks; raises InvalidConfig."""
        ...

    def keep(self, cluster: RentedCluster, store_env: dict[str, str]) -> None:
        """From now on nodes are sent this one."""
        ...


class FileCredentials:
    """Implements `Credentials`."""

    def current(self, cluster: RentedCluster) -> dict[str, str]:
        return read_secrets(cluster.name).store_env

    def fresh(self, cluster: RentedCluster) -> dict[str, str]:
        return from_source(cluster.request)

    def keep(self, cluster: RentedCluster, store_env: dict[str, str]) -> None:
        replace_store_env(cluster.name, store_env)


class Renewals:
    """Of all clusters; what is known of one lies in its node's `Live`."""

    def __init__(self, credentials: Credentials, clock: Ticks, calls: Calls) -> None:
        self._credentials, self._clock, self._calls = credentials, clock, calls

    def look(self, cluster: RentedCluster, node: Node, live: Live, note: Callable[[str], None]) -> None:
        """Finds a fresh one where it is time, and says what is missing. Never blocks."""
        now = self._clock.now()
        try:
            have = self._credentials.current(cluster)
        except ArtSkyError as e:
            live.credential_problem = e.message
            return
        if not have:
            return
        fresh = self._asked(cluster, have, live)
        if _is_better(fresh, have, now):
            self._credentials.keep(cluster, fresh)
            have, end = fresh, expires(fresh)
            note(f"a fresh credential for the store, {'without an end' if end is None else _left(end - now)}")
        live.credential, live.credential_end = have, expires(have)
        live.credential_problem = self._problem(cluster, node, live)
        if live.credential_problem is None:
            live.said.discard("credential")
        elif "credential" not in live.said:
            live.said.add("credential")
            note(live.credential_problem)

    def awaited(self, live: Live) -> bool:
        """Whether a node's first secrets should wait for what is being asked."""
        return live.asking is not None and self._clock.now() - live.asked < PATIENCE_SECONDS

    def _asked(self, cluster: RentedCluster, have: dict[str, str], live: Live) -> dict[str, str]:
        """The newest answer of the source, empty for none; asks it where it is time, one question at a time."""
        request, now, end = cluster.request, self._clock.now(), expires(have)
        if request.store_profile is None and request.store_credential is None:
            return {}
        # A profile may ask the network and make a new credential each time.
        due = end is None or end - now < RENEW_SECONDS or request.store_credential is not None
        due = due or any(lease.problem for lease in live.leases.values())
        if live.asking is None and due and now - live.asked >= ASK_SECONDS:
            live.asked = now
            live.asking = self._calls.begin(lambda: self._credentials.fresh(cluster), f"credential {cluster.name}")
        if live.asking is None or not live.asking.done():
            return {}
        answer, live.asking = live.asking, None
        try:
            live.source_problem = None
            return answer.result()
        except ArtSkyError as e:
            live.source_problem = e.message
            return {}

    def _problem(self, cluster: RentedCluster, node: Node, live: Live) -> str | None:
        """One line with the next step, where the credential will not do until the node's own end."""
        now, end, request = self._clock.now(), live.credential_end, cluster.request
        if end is None or end - now >= RENEW_SECONDS or end >= money.ends_by_itself(cluster, node, now)[0]:
            return None
        if request.store_profile is not None:
            how = live.source_problem or f"the profile has no fresh one; {renew_profile(request.store_profile)}"
            how = f"{how}, and it is sent to the machine by itself"
        elif request.store_credential is not None:
            how = f"write a fresh one into {request.store_credential}, and it is sent to the machine by itself"
            how = f"{live.source_problem}; {how}" if live.source_problem else how
        else:
            how = (
                "give a fresh one: `aws configure export-credentials --format env-no-export | art-sky extend "
                f"{cluster.name} --store-credential -`"
            )
        return f"the store's credential {_left(end - now)}, and nothing can be written then: {how}"


def _is_better(fresh: dict[str, str], have: dict[str, str], now: float) -> bool:
    if not fresh or fresh == have:
        return False
    end, before = expires(fresh), expires(have)
    if end is not None and end <= now:
        return False
    return end is None or before is None or end > before + GAIN_SECONDS


def _left(seconds: float) -> str:
    return f"ends in {seconds / 60:.0f} minutes" if seconds > 0 else "has ended"
