"""Typed errors. Every message ends with what to do next; the CLI prints it on one line.

`retryable` says whether the same call may succeed later without a change by the caller; `status` is the HTTP
status under which a server reports the error, and `code` the name that crosses the wire, so that the client
raises the same type that the server did.
"""

from __future__ import annotations

from typing import Any, ClassVar


class ArtSkyError(Exception):
    """Base of all errors that art-sky raises on purpose."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def to_wire(self) -> dict[str, Any]:
        """The body of an error reply, in the OpenAI shape so that its client shows the message."""
        return {
            "error": {
                "message": self.message,
                "type": self.code,
                "code": self.code,
                "retryable": self.retryable,
                **({"details": self.details} if self.details else {}),
            }
        }


class InvalidInput(ArtSkyError):
    """A value that a caller gave is not acceptable."""

    code = "invalid_input"
    status = 400


class InvalidName(InvalidInput):
    """A project or model name that may not become a path or key."""

    code = "invalid_name"


class InvalidConfig(InvalidInput):
    """An unknown or contradictory setting."""

    code = "invalid_config"


class InvalidReward(InvalidInput):
    """A reward that is not a finite number."""

    code = "invalid_reward"


class MissingTokens(InvalidInput):
    """A choice without the token ids and logprobs that were sampled (rule R1)."""

    code = "missing_tokens"


class PromptTooLong(InvalidInput):
    code = "prompt_too_long"


class SequenceTooLong(InvalidInput):
    """A token sequence of a batch that is longer than training allows."""

    code = "sequence_too_long"


class Unsupported(InvalidInput):
    """A request whose answer would differ from what was asked for, on this engine."""

    code = "unsupported"


class InvalidBody(InvalidInput):
    """A request body that cannot be read as what the route takes."""

    code = "invalid_body"
    status = 422


class Unauthorized(ArtSkyError):
    code = "unauthorized"
    status = 401


class NotFound(ArtSkyError):
    code = "not_found"
    status = 404


class Conflict(ArtSkyError):
    """The same id with another body, a model registered with another base, a taken name."""

    code = "conflict"
    status = 409


class BaseMismatch(Conflict):
    """An adapter that was made for another base model than the one that runs."""

    code = "base_mismatch"


class VersionMismatch(ArtSkyError):
    """Client and server are of different releases (rule R10)."""

    code = "version_mismatch"
    status = 409


class ChildDied(ArtSkyError):
    """The engine or the trainer process ended while a call waited for it; it is being restarted."""

    code = "child_died"
    status = 503
    retryable = True


class Busy(ArtSkyError):
    """Nothing is wrong, but it takes longer than the deadline."""

    code = "busy"
    status = 503
    retryable = True


class TrainFailed(ArtSkyError):
    """A train call that committed nothing; HEAD is where it was."""

    code = "train_failed"
    status = 422


class Cancelled(ArtSkyError):
    code = "cancelled"
    status = 409


class StoreError(ArtSkyError):
    """The store did not do what was asked. Never raised to say that something is absent."""

    code = "store_error"
    status = 503


class ObjectNotFound(StoreError):
    code = "object_not_found"
    status = 404


class PreconditionFailed(StoreError):
    """A create-only key exists, or a compare-and-swap saw another version."""

    code = "precondition_failed"
    status = 409


class CorruptObject(StoreError):
    """Bytes that do not match their hash, or a record that cannot be parsed."""

    code = "corrupt_object"
    status = 500


class LeaseLost(StoreError):
    """Another process owns the model now; this one must stop writing."""

    code = "lease_lost"
    status = 409


class NoDiskSpace(StoreError):
    code = "no_disk_space"
    status = 507


class ServerUnreachable(ArtSkyError):
    """No answer from the server."""

    code = "server_unreachable"
    status = 503
    retryable = True


class CloudError(ArtSkyError):
    """A cloud, or what asks it, did not do what was asked."""

    code = "cloud_error"
    status = 502


class ProviderUnavailable(CloudError):
    """It could not be asked; nothing is known about its machines."""

    code = "provider_unavailable"
    status = 503
    retryable = True


class NoCredentials(CloudError):
    code = "no_credentials"


class NoCapacity(CloudError):
    """The cloud has none of these now; nothing is billed."""

    code = "no_capacity"
    retryable = True


class NoQuota(CloudError):
    code = "no_quota"


class LaunchFailed(CloudError):
    """A machine may exist and is being ended."""

    code = "launch_failed"


class BudgetTooSmall(InvalidInput):
    """The bound on the bill would be broken, or the shortest useful run does not fit into it."""

    code = "budget_too_small"


class NotOurs(CloudError):
    """A machine that art-sky did not make; it is never touched."""

    code = "not_ours"
    status = 409


class TooManyFailures(ArtSkyError):
    """More rollouts failed than `max_exceptions` or `max_exception_rate` allows."""

    code = "too_many_failures"


def _all_types(base: type[ArtSkyError]) -> dict[str, type[ArtSkyError]]:
    found = {base.code: base}
    for sub in base.__subclasses__():
        found |= _all_types(sub)
    return found


def from_wire(body: Any, status: int = 500) -> ArtSkyError:
    """The typed error behind an error reply; a reply that is not ours becomes a plain `ArtSkyError`."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return ArtSkyError(f"the server answered {status}: {str(body)[:500]}")
    kind = _all_types(ArtSkyError).get(str(error.get("code")), ArtSkyError)
    details = error.get("details")
    made = kind(str(error.get("message")), **(details if isinstance(details, dict) else {}))
    return made
