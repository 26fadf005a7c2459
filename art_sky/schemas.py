"""Every type that crosses a process boundary, except trajectories (`art_sky.trajectories`) and settings
(`art_sky.config`). Client, server, children and store share them; the state tables stand here too.

Times are Unix seconds (float). Hashes are lower-case SHA-256 in hex.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StringConstraints,
    model_serializer,
)

from art_sky.config import AnyTrainConfig, LoRAConfig, ModelOptions, TrainConfig

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
RequestId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
Split = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,31}$")]


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


# --- capture: what a Choice carries (rule R1) ---------------------------------------------------------


class Sampling(Wire):
    """How the tokens of one choice were drawn; the extra field `sampling` of an OpenAI Choice.

    A Choice from this server carries four extra fields: `prompt_token_ids` (list[int]), `token_ids`
    (list[int], every sampled token, the end-of-turn token included), `token_logprobs` (list[float], one per
    token id: log_softmax(logits / temperature), temperature 1 where sampling was greedy) and `sampling`.
    """

    model_config = ConfigDict(extra="ignore")
    completion_id: str
    model: str  # name@step that sampled, e.g. "agent@3"
    temperature: float  # as asked; 0 = greedy
    comparable: bool  # False under top_p < 1, top_k, min_p, ...: trained with ratio 1 and counted


class Exchange(Wire):
    """One completion as the gateway recorded it, before the reply was released."""

    completion_id: str
    created: float
    project: str
    model: str  # name@step
    rollout: str | None = None
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    choices: list[dict[str, Any]]  # OpenAI Choice objects with the four extra fields


# --- store: the records of DESIGN §7 --------------------------------------------------------------------


class Record(BaseModel):
    """A stored record: unknown fields of a newer release are kept, a newer `format` is refused by the reader."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    format: int = 1


class BaseShape(Wire):
    """What of a base model an adapter depends on, as config.json says: two that differ here take no common adapter."""

    architecture: str  # the class in transformers
    layers: int
    width: int
    vocabulary: int

    def __str__(self) -> str:
        return f"{self.architecture} with {self.layers} layers of width {self.width}, vocabulary {self.vocabulary}"


class ModelRecord(Record):
    """`model.json`, written once."""

    project: str
    name: str
    base_model: str
    base_shape: BaseShape | None = None  # of the base model when the first adapter was made; None: not trainable
    lora: LoRAConfig
    options: ModelOptions = ModelOptions()
    created: float
    created_by: str  # "art-sky 0.1.0"
    config: dict[str, Any] = {}  # the user's own, free
    forked_from: str | None = None  # project/name@step in store


class BlobRoot(Wire):
    """The model that holds the bytes of a file which another model names: a fork copies none."""

    store: str | None = None  # URL of its store; None: the store in which this was read
    model: str  # project/name


class FileRef(Wire):
    sha256: Sha256
    size: int = Field(ge=0)
    root: BlobRoot | None = None  # None: in the blobs of the model whose record this is; then not written

    @model_serializer(mode="wrap")
    def _as_dict(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = plain(self)
        if self.root is None:
            del values["root"]
        return values


class Manifest(Record):
    """One step. `files` maps a name to its blob, e.g. `adapter/adapter_model.safetensors`."""

    step: int = Field(ge=0)
    parent: str | None  # key of the parent manifest; None only at step 0
    request: str
    generation: int
    created: float
    updates: int  # optimizer updates made; 0 = skipped, the files are the parent's
    reason: str | None = None  # why a step was skipped
    files: dict[str, FileRef]
    batch: FileRef | None = None
    config: dict[str, Any] = {}
    metrics: dict[str, float | None] = {}
    versions: dict[str, str] = {}


class Head(Record):
    """The pointer to the newest step. `generation` is the fencing number, `nonce` makes every write unique."""

    step: int
    manifest: str
    generation: int
    nonce: str
    attempt: int = 1  # counts rewinds to an older step; a history row belongs to one attempt


class TrainRequestRecord(Record):
    """`requests/<id>.json`: create-only, written before training begins."""

    request: str
    batch: FileRef
    config: dict[str, Any]
    head_step: int
    head_manifest: str
    created: float


class AttemptRecord(Record):
    """`requests/<id>.<n>.json`: attempt n begun; rewritten once with its terminal outcome."""

    request: str
    attempt: int
    generation: int
    begun: float
    ended: float | None = None
    outcome: Literal["committed", "failed", "cancelled", "trainer_died", "interrupted"] | None = None
    message: str | None = None
    manifest: str | None = None


class HistoryRow(Record):
    """One row of the run's history; (attempt, step, split) is its key. Later logs merge into it."""

    attempt: int
    step: int
    split: str
    time: float
    metrics: dict[str, float | None]


# --- API ------------------------------------------------------------------------------------------------


class RegisterRequest(Wire):
    project: str
    name: str
    base_model: str
    lora: LoRAConfig = LoRAConfig()
    options: ModelOptions = ModelOptions()
    config: dict[str, Any] = {}
    trainable: bool = True  # False: a prompted model, only logged; `base_model` is then just its name elsewhere
    client_version: str


class LeaseStatus(Wire):
    """The claim in the store by which a server is the one that may commit steps of a model."""

    owner: str
    generation: int  # grows with every holder
    age_seconds: float  # since this holder took it
    problem: str | None = None  # why it can no longer be relied on


class ModelStatus(Wire):
    project: str
    name: str
    base_model: str
    inference_name: str  # what goes into `model=` of a chat completion
    step: int
    manifest: str
    lora: LoRAConfig
    server_version: str
    context_length: int
    lease: LeaseStatus | None = None  # of a model that is trained here


class TrainRequest(Wire):
    request_id: RequestId
    batch: Sha256  # uploaded before with PUT .../blobs/<sha256>
    config: AnyTrainConfig = TrainConfig()


JobState = Literal["queued", "running", "committing", "committed", "failed", "cancelled"]
JOB_TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    "queued": frozenset({"running", "failed", "cancelled"}),
    # back to queued: the trainer died and the request has attempts left
    "running": frozenset({"queued", "committing", "failed", "cancelled"}),
    "committing": frozenset({"committed", "failed"}),
    "committed": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}
JOB_TERMINAL: frozenset[JobState] = frozenset(s for s, nxt in JOB_TRANSITIONS.items() if not nxt)


class TrainResult(Wire):
    """What a train call returns, now or when it is asked again."""

    request_id: str
    step: int
    manifest: str
    updates: int
    reason: str | None = None
    metrics: dict[str, float | None]
    seconds: float

    @property
    def checkpoint_path(self) -> str:
        """Where the step is in the store: the key of its manifest."""
        return self.manifest


class Job(Wire):
    request_id: str
    project: str
    name: str
    state: JobState
    created: float
    attempts: int = 0
    result: TrainResult | None = None
    error: dict[str, Any] | None = None  # the body of ArtSkyError.to_wire()["error"]
    events: int = 0  # number of events so far


class JobEvent(Wire):
    """One line of a job's event stream; `offset` counts from 0 and never repeats."""

    offset: int
    time: float
    kind: Literal["state", "progress", "warning"]
    data: dict[str, Any]


class LogRequest(Wire):
    split: Split
    step: int | None = None  # None: HEAD's
    batch: Sha256 | None = None  # trajectories, uploaded before as a blob
    metrics: dict[str, float | None] = {}


class LogResult(Wire):
    attempt: int
    step: int
    split: str


class Checkpoint(Wire):
    step: int
    manifest: str
    created: float
    updates: int
    reason: str | None
    metrics: dict[str, float | None]
    size: int  # bytes of the step's files
    deleted: bool = False  # its files were deleted by delete_checkpoints; the record stays
    best: bool = False


class RolloutAddress(Wire):
    rollout: str
    base_url: str
    api_key: str


class RolloutExchanges(Wire):
    """What was recorded of a rollout here. Without `complete` calls are missing: another machine served it before, and
    its part is lost, or the server's log had no room for them any more."""

    exchanges: list[Exchange]
    complete: bool


class ServerStatus(Wire):
    version: str
    pid: int
    store: str
    started: float
    idle_seconds: float
    idle_limit_seconds: float | None
    engine: dict[str, Any]
    trainer: dict[str, Any]
    models: list[ModelStatus]
    jobs: list[Job]


# --- server <-> children --------------------------------------------------------------------------------


class AdapterRef(Wire):
    """An adapter in a local folder in PEFT's format. `name` is unique per content: project/model@step."""

    name: str
    path: str


class InitTask(Wire):
    """Make the untrained adapter of step 0 in `out_dir`: the files of `adapter/` and `trainer/`."""

    base_model: str
    lora: LoRAConfig
    out_dir: str


class TrainTask(Wire):
    """One train call for the trainer. It reads `parent_dir` and `batch_path`, writes `out_dir`, commits nothing.

    `parent_dir` and `out_dir` hold `adapter/adapter_model.safetensors`, `adapter/adapter_config.json` (PEFT) and
    `trainer/optimizer.safetensors`, `trainer/state.json`; so does `reference_dir`, the step of
    `config.kl_penalty_reference_step`. With an SFTConfig the batch is what `art_sky.server.examples` makes of it.
    """

    request_id: str
    base_model: str
    parent_dir: str
    reference_dir: str | None = None
    batch_path: str
    out_dir: str
    config: AnyTrainConfig


class TrainOutcome(Wire):
    """`updates == 0` means nothing was written: the step is skipped for `reason`."""

    updates: int
    reason: str | None = None
    metrics: dict[str, float | None]
