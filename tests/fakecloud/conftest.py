"""The session's simulated cloud."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from fakecloud_environment import Unavailable
from fakecloud_session import FakeCloud


@pytest.fixture(scope="session")
def fakecloud() -> Iterator[FakeCloud]:
    """One simulated cloud for the session. Where it cannot run: skipped, under ART_SKY_REQUIRE_FAKECLOUD=1 failed."""
    try:
        cloud = FakeCloud.start()
    except Unavailable as e:
        if os.environ.get("ART_SKY_REQUIRE_FAKECLOUD") == "1":
            pytest.fail(str(e), pytrace=False)
        pytest.skip(str(e))
    with cloud:
        yield cloud
