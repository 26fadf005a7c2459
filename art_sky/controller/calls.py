"""Blocking calls with deadlines. A call that hangs keeps its thread, never its caller."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from art_sky.errors import ProviderUnavailable

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Call(Protocol[T_co]):
    """A call under way in a thread of its own."""

    def done(self) -> bool: ...

    def result(self) -> T_co:
        """Of a call that is done; raises what it raised."""
        ...


class Calls:
    """How blocking calls are made. Tests bring a way without threads."""

    def begin(self, call: Callable[[], T], name: str) -> Call[T]:
        """Starts a call that may take many minutes."""
        return _Thread(call, name)

    def within(self, seconds: float, what: str, call: Callable[[], T]) -> T:
        """The result of a short call. Raises ProviderUnavailable when it takes longer; it is then left to itself."""
        under_way = _Thread(call, what)
        if not under_way.wait(seconds):
            raise ProviderUnavailable(f"{what}: no answer within {seconds:.0f} s; it is asked again")
        return under_way.result()


class _Thread(Generic[T]):
    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._call = call
        self._done = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None
        # A daemon: the end of the controller must not wait for a cloud.
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def wait(self, seconds: float) -> bool:
        return self._done.wait(seconds)

    def done(self) -> bool:
        return self._done.is_set()

    def result(self) -> T:
        assert self._done.is_set()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as e:  # handed to whoever asks for the result
            self._error = e
        finally:
            self._done.set()
