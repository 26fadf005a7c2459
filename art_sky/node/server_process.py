"""The server as the watchdog sees it: a process group, a health check, a way to end it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from art_sky.node.clock import Clock

_ANSWER_SECONDS = 10.0
_EASIER_TO_KILL = "500"  # for the kernel when memory runs out: the engine goes before the watchdog
_ENDED_STATES = ("committed", "failed", "cancelled")


@dataclass(frozen=True)
class ServerView:
    """One answer of the status route."""

    idle_seconds: float
    pending: list[str]  # train requests that were accepted and have not ended: project/name id


class ServerProcess:
    def __init__(self, command: list[str], environment: dict[str, str], state: Path, token: str, clock: Clock) -> None:
        """Starts it. Raises OSError."""
        self._state, self._token, self._clock = state, token, clock
        for leftover in ("server.json", "unfinished.json"):
            (state / leftover).unlink(missing_ok=True)
        owned, self._owner = os.pipe()  # closed by the kernel when this process dies, which ends the server
        try:
            self._child = subprocess.Popen(
                [*command, "--owner-fd", str(owned)],
                stdin=subprocess.DEVNULL,
                env=environment,
                cwd=state,
                pass_fds=(owned,),
                start_new_session=True,
            )
        except OSError:
            os.close(self._owner)
            raise
        finally:
            os.close(owned)
        with suppress(OSError):
            Path(f"/proc/{self._child.pid}/oom_score_adj").write_text(_EASIER_TO_KILL)

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._child.poll()

    @property
    def url(self) -> str | None:
        """Where it listens, once it does."""
        try:
            found = json.loads((self._state / "server.json").read_text())
            return str(found["base_url"]) if found["pid"] == self._child.pid else None
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def view(self) -> ServerView | None:
        """None when it does not answer in time, or not what it should."""
        try:
            found = json.loads(self._ask("GET", "/api/v1/status"))
            pending = [
                f"{job['project']}/{job['name']} {job['request_id']}"
                for job in found["jobs"]
                if job["state"] not in _ENDED_STATES
            ]
            return ServerView(float(found["idle_seconds"]), pending)
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
            return None

    def drain(self, seconds: float) -> bool:
        """Asks it to finish accepted train jobs within `seconds` and then to end; False when it does not answer."""
        try:
            self._ask("POST", f"/api/v1/shutdown?drain_seconds={max(seconds, 0):.0f}")
        except (OSError, http.client.HTTPException, ValueError):
            return False
        return True

    def unfinished(self) -> list[str] | None:
        """What it left undone by its own account; None when it ended without one."""
        try:
            found = json.loads((self._state / "unfinished.json").read_text())
            return [str(name) for name in found["requests"]] if found["pid"] == self._child.pid else None
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def terminate(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._child.pid, signal.SIGTERM) if self._child.poll() is None else None

    def kill(self) -> None:
        """Ends the whole group, also what is left of it when the server has ended."""
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        if self._owner >= 0:
            os.close(self._owner)
            self._owner = -1

    def _ask(self, method: str, path: str) -> str:
        url = self.url
        if url is None:
            raise ConnectionError("it does not listen")
        parts = urlsplit(url)
        timeout = self._clock.timeout(_ANSWER_SECONDS)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
        try:
            connection.request(method, path, headers={"Authorization": f"Bearer {self._token}"})
            answer = connection.getresponse()
            body = answer.read().decode()
            if answer.status >= 300:
                raise ValueError(f"status {answer.status}")
            return body
        finally:
            connection.close()
