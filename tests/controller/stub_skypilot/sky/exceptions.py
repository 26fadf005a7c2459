"""The errors that our driver tells apart."""

from __future__ import annotations


class APIVersionMismatchError(Exception): ...


class ApiServerConnectionError(Exception): ...


class NoCloudAccessError(Exception): ...


class InvalidCloudCredentials(Exception): ...


class ResourcesUnavailableError(Exception): ...


class ClusterDoesNotExist(Exception): ...
