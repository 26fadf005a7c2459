"""Train requests that ended without a step: what they were, and why. Their batches can be trained again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from art_sky.errors import InvalidInput
from art_sky.schemas import AttemptRecord, TrainRequestRecord
from art_sky.store.model_store import ModelStore

MAX_DEATHS = 3  # attempts that kill the trainer before the request is given up


@dataclass(frozen=True)
class FailedRequest:
    record: TrainRequestRecord
    attempts: list[AttemptRecord]  # at least one; the last one ended

    @property
    def cause(self) -> str:
        last = self.attempts[-1]
        if last.outcome == "trainer_died":
            return f"{_deaths(self.attempts)} attempts ended the trainer, the last with: {last.message}"
        return last.message or "no cause was written down"

    @property
    def ended(self) -> float:
        """By the clock of the server that tried it."""
        return self.attempts[-1].ended or self.attempts[-1].begun


def failed_requests(model: ModelStore) -> Iterator[FailedRequest]:
    """Of all that a model was asked to train, what failed or killed its trainer too often; the oldest first."""
    applied = {step.manifest.request for step in model.steps()}
    names = [n.removeprefix("requests/").removesuffix(".json") for n in model.names("requests/") if n.count(".") == 1]
    records = [model.request(request) for request in names if request not in applied]
    for record in sorted(records, key=lambda r: (r.created, r.request)):
        attempts = model.attempts(record.request)
        if _has_failed(attempts):
            yield FailedRequest(record, attempts)


def find_failed(model: ModelStore, request: str) -> FailedRequest:
    """Raises NotFound for a request that was never sent, and InvalidInput for one that did not fail."""
    step = next((s.manifest.step for s in model.steps() if s.manifest.request == request), None)
    if step is not None:
        raise InvalidInput(f"train request {request} made step {step}; only one that failed can be replayed")
    record, attempts = model.request(request), model.attempts(request)
    if not _has_failed(attempts):
        state = "was cancelled" if attempts and attempts[-1].outcome == "cancelled" else "is not over"
        raise InvalidInput(
            f"train request {request} {state}; a server that has the model goes on with what is not over, and only one "
            "that failed can be replayed"
        )
    return FailedRequest(record, attempts)


def _has_failed(attempts: list[AttemptRecord]) -> bool:
    if not attempts:
        return False
    return attempts[-1].outcome == "failed" or _deaths(attempts) >= MAX_DEATHS


def _deaths(attempts: list[AttemptRecord]) -> int:
    return sum(a.outcome == "trainer_died" for a in attempts)
