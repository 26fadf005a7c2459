"""What the tests of the store share; the servers are in the fixtures of all suites."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def quick_threads(aws_environment: None) -> Iterator[None]:
    """For a client and a server that are threads of one process and wait for each other all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0002)
    yield
    sys.setswitchinterval(before)
