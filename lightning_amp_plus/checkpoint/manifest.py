"""The manifest: what a checkpoint records of the precision it was trained in, as a versioned, typed document.

Everything in it is a plain type, so it reads with ``weights_only=True`` and is its own JSON. It lies in the checkpoint
under :data:`CHECKPOINT_KEY`, beside the few tensors that only a resume needs (:data:`TENSOR_PARTS`). The plugin's contract
composes it from what each room says of itself, ``compatibility`` compares two of them, the sidecar and the command line
show it.

A section that is ``None`` was not recorded: by an older version, by another library, or because it does not apply yet.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from lightning_amp_plus.errors import IncompatiblePrecisionError

CHECKPOINT_KEY = "lightning_amp_plus"
SCHEMA_VERSION = 2

TENSOR_PARTS = ("master_weights", "random_state", "gradients", "fp8_histories", "fp8_scales", "fp8_noted")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Versions(_Section):
    """Versions of what computed; ``None`` for what was not installed."""

    python: str
    torch: str
    lightning: str
    lightning_amp_plus: str
    torchao: str | None = None
    transformer_engine: str | None = None


class Hardware(_Section):
    """The device that a rank computes on; on a CPU the capability is its vector instructions."""

    device: str
    name: str
    capability: str | None = None
    driver: str | None = None
    cuda: str | None = None
    hip: str | None = None


class Move(_Section):
    """A module moved to another format while training.

    Attributes:
        match: Glob on qualified names, as in a rule.
        compute: The format it was moved to.
        reason: Why.
        step: The Trainer's ``global_step`` when it was moved.
        recipe: Into FP8: the recipe in plain form; ``None`` for the default one.
        gemms: Into FP8: which GEMMs; ``None`` for all.
        backend: Into FP8: what multiplies; ``None`` for the one that is chosen.
    """

    match: str
    compute: Literal["fp32", "bf16", "fp16", "fp8"]
    reason: str = ""
    step: int | None = None
    recipe: dict[str, Any] | None = None
    gemms: list[str] | None = None
    backend: str | None = None


class OptimizerEntry(_Section):
    """One optimizer.

    Attributes:
        name: Its class.
        fused: Whether its fused kernels were asked for.
        state_dtypes: Number of state tensors by dtype, as found.
    """

    name: str
    fused: bool
    state_dtypes: dict[str, int]


class Dtypes(_Section):
    """Number of tensors by dtype, as found."""

    parameters: dict[str, int]
    gradients: dict[str, int]
    optimizer_state: dict[str, int]


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class LossScaleEntry(_Section):
    """Configuration of the loss scale; see ``LossScale``."""

    kind: Literal["dynamic", "static"]
    init: Positive
    growth_factor: Positive
    backoff_factor: Positive
    growth_interval: int = Field(ge=1)
    min: Positive
    max: Positive
    hysteresis: int = Field(ge=1)
    backoff_on_forward_overflow: bool = True


class Fp8Module(_Section):
    """How one module chooses its FP8 scales.

    Attributes:
        recipe: ``delayed``, ``current``, ``rowwise``, ``block`` or ``mx``.
        history_length: Number of amax values that delayed scaling looks back on.
        backend: What computed.
        amax_group: Which ranks shared amax values.
    """

    recipe: str
    history_length: int | None = None
    backend: str | None = None
    amax_group: str | None = None


class Fp8(_Section):
    """FP8 as it was run.

    Attributes:
        modules: Modules in FP8, by qualified name.
        amax_clock: What advances an amax history: ``window`` or ``micro_batch``.
    """

    modules: dict[str, Fp8Module]
    amax_clock: Literal["window", "micro_batch"] = "window"


def _finite(numbers: Sequence[float | None]) -> None:
    if not all(math.isfinite(number) for number in numbers if number is not None):
        raise ValueError("expected finite numbers")


class Observed(_Section):
    """The last applied steps of one optimizer, while FP8 waits for stability; see ``Stability``.

    Attributes:
        optimizer: Its index.
        norms: Gradient norms, oldest first.
        losses: Losses of the same steps; ``None`` where there was none.
        peak: The highest level of the loss so far.
    """

    optimizer: int = Field(ge=0)
    norms: list[float]
    losses: list[float | None]
    peak: float | None

    @model_validator(mode="after")
    def _sound(self) -> Observed:
        if len(self.norms) != len(self.losses):
            raise ValueError("expected as many losses as norms")
        _finite([*self.norms, *self.losses, self.peak])
        return self


class Fp8Start(_Section):
    """When FP8 began, or what is known while it waits.

    Attributes:
        begun_at: Applied steps when it began; ``None`` if it has not.
        open_loss: Sum of the open window's losses over ranks, and of their weights.
        observed: What was seen of each optimizer that stepped.
    """

    begun_at: int | None = Field(ge=0)
    open_loss: list[float] = Field(default=[0.0, 0.0], min_length=2, max_length=2)
    observed: list[Observed] = []

    @model_validator(mode="after")
    def _sound(self) -> Fp8Start:
        _finite(self.open_loss)
        return self


class Clipping(_Section):
    """Gradient clipping of the Trainer."""

    value: float
    algorithm: str


class Accumulation(_Section):
    """Accumulation windows.

    Attributes:
        batches: ``accumulate_grad_batches`` in force.
        partial_window: How a shorter last window is weighted.
        sync_each_microbatch: Whether FSDP2 reduced each micro-batch.
    """

    batches: int = Field(ge=1)
    partial_window: str
    sync_each_microbatch: bool


class StrategyEntry(_Section):
    """How the model lay over ranks."""

    name: str
    world_size: int = Field(ge=1)
    mesh: dict[str, int] | None = None


class Settings(_Section):
    """What else of the plugin's settings steers a run."""

    check_finite: bool
    max_consecutive_skips: int
    advance_scheduler_on_skip: bool


class Flags(_Section):
    """What wraps the model's computation."""

    compiled: bool
    activation_checkpointing: bool


class Progress(_Section):
    """Where the run stood, as the Trainer counts."""

    epoch: int
    global_step: int


class WindowPosition(_Section):
    """The accumulation window that was open.

    Attributes:
        micro_batches: Micro-batches already in it; 0 between two windows.
        size: How many it was to have; ``None`` in manual optimization.
        gradients: Whether the gradients of those micro-batches are in the checkpoint.
    """

    micro_batches: int = Field(ge=0)
    size: int | None
    gradients: Literal["none", "stored", "lost"]


class Data(_Section):
    """Where the training data stood.

    Attributes:
        mid_epoch: Whether batches of the epoch were still to come.
        stateful: Whether every loader can continue in mid-epoch (``state_dict`` and ``load_state_dict``).
        moment: ``clean``: between two batches or epochs. ``batch``: a batch had begun. ``epoch_start``: in
            ``on_train_epoch_start``. ``stopped``: after a fit that ended in mid-epoch. From the latter three Lightning
            does not go on where it was.
    """

    mid_epoch: bool
    stateful: bool
    moment: Literal["clean", "batch", "epoch_start", "stopped"] = "clean"


class RandomState(_Section):
    """Which random states are in the checkpoint: of how many ranks, and which generators of each."""

    ranks: int = Field(ge=1)
    generators: list[str]


def _run(pair: list[float]) -> list[float]:
    if len(pair) != 2 or pair[1] < 1 or pair[1] != int(pair[1]):
        raise ValueError("expected [scale, number of windows]")
    return pair


class HistoryEntry(_Section):
    """Counts and scales of the run so far; see ``History``. Scales are ``[value, count]`` runs."""

    scales: list[Annotated[list[float], AfterValidator(_run)]]
    applied: int = Field(ge=0)
    skipped: int = Field(ge=0)
    growths: int = Field(ge=0)
    backoffs: int = Field(ge=0)
    consecutive_skips: int = Field(ge=0)


class CensusOp(_Section):
    """Operations of one kind in one place; see ``census.OpRow``."""

    module: str
    phase: str
    kind: str
    op: str
    dtypes: str
    count: int = Field(ge=1)


class CensusFlag(_Section):
    """Something that deserves a look; see ``census.Flag``."""

    kind: str
    module: str
    op: str
    found: str
    remedy: str


class CensusEntry(_Section):
    """The dtypes that a training step really ran in; see ``census.Census``.

    Attributes:
        step: The Trainer's ``global_step`` when the step began.
        fingerprint: As of ``Census.fingerprint``.
        modules: Dtypes by column, by qualified name.
        ops: Operations that no module's columns tell of.
        flags: What differed from the plan, or costs digits.
        notes: What else to know.
        versions: Of what computed then, which may be older than the save.
        hardware: On which it computed then.
    """

    step: int = Field(ge=0)
    fingerprint: str
    modules: dict[str, dict[str, str]]
    ops: list[CensusOp]
    flags: list[CensusFlag]
    notes: list[str]
    versions: Versions | None
    hardware: Hardware | None


class Manifest(_Section):
    """The whole document; see the sections' classes.

    Attributes:
        schema_version: Version of this document.
        save_id: Names one save; a sidecar carries that of its checkpoint.
        writer: What wrote the checkpoint.
        precision: ``32-true bf16-mixed 16-mixed fp8-mixed bf16-true 16-true fp8-true 64-true``; ``None`` if unknown.
        policy: As of ``PrecisionPolicy.to_dict``.
        fingerprint: As of ``PrecisionPolicy.fingerprint``.
        device_type: Device that the plan was made for.
        routes: What every module got, by qualified name; see ``Route``.
        kept_buffers: Buffers that keep their format because a rule names them.
    moves: Modules moved while training; a resume moves them again.
        loss_scale: Its configuration; ``None`` where none was in use.
        scaler: Its state.
        windows: Windows that closed.
        history: Counts and scales; see ``History``.
        weights_only: Whether this stands for a checkpoint saved with ``save_weights_only=True``, which has no state.
    """

    schema_version: int
    policy: dict[str, Any] | None
    fingerprint: str | None
    moves: list[Move]
    scaler: dict[str, Any] | None
    windows: int = Field(ge=0)
    history: HistoryEntry
    save_id: str | None = None
    writer: str = CHECKPOINT_KEY
    precision: str | None = None
    versions: Versions | None = None
    hardware: Hardware | None = None
    device_type: str | None = None
    routes: dict[str, dict[str, str]] | None = None
    kept_buffers: list[str] | None = None
    dtypes: Dtypes | None = None
    optimizers: list[OptimizerEntry] | None = None
    loss_scale: LossScaleEntry | None = None
    master_weights_kept: bool | None = None
    fp8: Fp8 | None = None
    fp8_start: Fp8Start | None = None
    clipping: Clipping | None = None
    accumulation: Accumulation | None = None
    strategy: StrategyEntry | None = None
    settings: Settings | None = None
    flags: Flags | None = None
    progress: Progress | None = None
    window: WindowPosition | None = None
    data: Data | None = None
    random: RandomState | None = None
    census: CensusEntry | None = None
    weights_only: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The document in plain types."""
        return self.model_dump()

    def to_json(self) -> str:
        """The document as JSON."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    @classmethod
    def from_dict(cls, values: Any, where: str) -> Manifest:
        """The document that ``to_dict`` gave; the tensors that lie beside it in a checkpoint are not looked at.

        Args:
            values: The plain document.
            where: What it was read from, for messages.

        Raises:
            IncompatiblePrecisionError: If it is of a newer version, or a field is unknown, missing or of a wrong type,
                naming each.
        """
        if not isinstance(values, Mapping):
            raise IncompatiblePrecisionError(
                f"{where} holds {type(values).__name__} where the precision manifest should be; expected a mapping."
            )
        version = values.get("schema_version")
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            raise IncompatiblePrecisionError(
                f"The precision manifest of {where} has schema_version {version!r}; expected a number from 1 to "
                f"{SCHEMA_VERSION}."
            )
        if version > SCHEMA_VERSION:
            raise IncompatiblePrecisionError(
                f"The precision manifest of {where} has schema_version {version}, written by a newer lightning_amp_plus "
                f"than this one, which reads up to {SCHEMA_VERSION}. Update lightning_amp_plus to resume from it."
            )
        plain = {key: value for key, value in values.items() if key not in TENSOR_PARTS}
        if (found := _not_plain(plain.get("policy"))) is not None:
            raise IncompatiblePrecisionError(_damaged(where, [f"policy holds {found}, which is no plain type"]))
        if isinstance(plain.get("scaler"), dict):  # whatever it holds, the field `scaler` is judged, and may be allowed
            plain["scaler"] = {str(key): _plainly(value) for key, value in plain["scaler"].items()}
        try:
            return cls.model_validate(plain)
        except ValidationError as error:
            raise IncompatiblePrecisionError(_said(error, where)) from None


def _not_plain(value: Any) -> str | None:
    """The first type in a nested value that JSON does not have, or ``None``."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return None
    if isinstance(value, list):
        return next((found for item in value if (found := _not_plain(item)) is not None), None)
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return _not_plain(list(value.values()))
    return _kind(value)


def _kind(value: Any) -> str:
    name = type(value).__name__
    return "Tensor" if name == "TensorStub" else name  # read without its numbers


def _plainly(value: Any) -> Any:
    return value if value is None or isinstance(value, (str, bool, int, float)) else f"<{_kind(value)}>"


def _said(error: ValidationError, where: str) -> str:
    lines = []
    for problem in error.errors(include_url=False, include_context=False):
        name = ".".join(map(str, problem["loc"])) or "(manifest)"
        kind = {"missing": "is missing", "extra_forbidden": "is not a field of this version"}.get(
            problem["type"], f"holds {_short(problem['input'])}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"
        )
        lines.append(f"{name} {kind}")
    return _damaged(where, lines)


def _damaged(where: str, lines: list[str]) -> str:
    return (
        f"The precision manifest of {where} is damaged, or was edited:\n"
        + "\n".join(f"  {line}" for line in lines[:20])
        + (f"\n  and {len(lines) - 20} more" if len(lines) > 20 else "")
        + "\nResume from another checkpoint; for the weights alone, load its state_dict and start a new fit."
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
