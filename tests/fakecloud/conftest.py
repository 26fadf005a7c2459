"""The session's simulated cloud, and the order of its tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from fakecloud_environment import Unavailable
from fakecloud_session import FakeCloud


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "first: starts what takes minutes to end, before all other tests")
    config.addinivalue_line("markers", "last: looks at it, after all other tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """So that the minutes in which a machine is only waited for are spent on the other tests."""
    items.sort(
        key=lambda item: (item.get_closest_marker("last") is not None) - (item.get_closest_marker("first") is not None)
    )


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
