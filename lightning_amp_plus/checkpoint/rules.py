"""The rules of the checkpoint contract, one for each field: :data:`TABLE`. Pure: two manifests in, a judgment out.

``compatibility`` applies them, and the table in ``docs/checkpoints.md`` is made from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_amp_plus.checkpoint.manifest import Fp8Module, Hardware, LossScaleEntry, Manifest
from lightning_amp_plus.plan_table import cell
from lightning_amp_plus.scaling.loss_scale import usable

Verdict = Literal["ok", "note", "convert", "refuse"]

_PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "fp8-mixed")  # AmpPrecision takes these

# From narrow to wide. BF16 and FP16 are neither: each loses what the other keeps.
_WIDTH = {"fp8": 0, "bf16": 1, "fp16": 1, "fp32": 2, "fp64": 3}


# What a judge says: verdict, saved, current, why, remedy.
_Judgment = tuple[Verdict, str, str, str, str]


@dataclass(frozen=True)
class Check:
    """The rule for one field.

    Attributes:
        field: Its name.
        compares: What is compared, for the docs.
        rule: The verdicts, for the docs.
        judge: Says what there is to say about two manifests, or ``None`` where one of them does not have the field.
        waivable: Whether ``AmpPrecision(allow=...)`` may name it.
    """

    field: str
    compares: str
    rule: str
    judge: Callable[[Manifest, Manifest], _Judgment | None]
    waivable: bool = False


def _equal(
    section: str, attribute: str, different: Verdict, why: str, remedy: str = ""
) -> Callable[[Manifest, Manifest], _Judgment | None]:
    """The rule that compares one attribute of a section and gives one verdict where it differs."""

    def judge(saved: Manifest, current: Manifest) -> _Judgment | None:
        before, now = getattr(saved, section), getattr(current, section)
        if before is None or now is None:
            return None
        return _differs(getattr(before, attribute), getattr(now, attribute), different, why, remedy)

    return judge


def _differs(before: Any, now: Any, different: Verdict, why: str, remedy: str = "") -> _Judgment:
    if before == now:
        return "ok", cell(before), cell(now), "", ""
    texts = cell(before), cell(now)
    if texts[0] == texts[1]:  # they differ in digits that are not shown
        texts = repr(before), repr(now)
    return different, *texts, why, remedy


def _precision(saved: Manifest, current: Manifest) -> _Judgment:
    before, now = saved.precision, current.precision
    known = saved.writer == "lightning_amp_plus"
    if before is None:
        possible = ["32-true", "bf16-mixed"] if saved.scaler is None else ["16-mixed"]
        if saved.dtypes is None or not saved.dtypes.parameters:  # the weights lie elsewhere, in shards
            possible += ["bf16-true"] if saved.scaler is None else ["16-true"]
        said = f"not recorded ({' or '.join(possible)})"
        if now in possible:
            return "note", said, cell(now), "The checkpoint was written without AmpPrecision.", ""
        return "refuse", said, cell(now), _why_precision(possible[0], saved, current), _precision_remedy(possible)
    if before == now:
        return "ok", before, str(now), "" if known else "Written without AmpPrecision.", ""
    return "refuse", before, str(now), _why_precision(before, saved, current), _precision_remedy([before])


def _why_precision(before: str, saved: Manifest, current: Manifest) -> str:
    now = str(current.precision)
    (old, _, old_kind), (new, _, new_kind) = before.partition("-"), now.partition("-")
    reasons = []
    if new == "16" and old != "16":
        reasons.append(
            "FP16 ends at 65504: activations of this model may lie above it, and no loss scale can rescue those"
            + ("" if saved.scaler is not None else "; gradients need a loss scale that this checkpoint does not have")
        )
    if old == "16" and new != "16":
        reasons.append(
            (
                "the run would go on without the loss scale it found"
                if current.loss_scale is None
                else "the range changes"
            )
            + (f", and {new.upper()} keeps fewer digits than FP16" if new in ("bf16", "fp8") else "")
        )
    if new == "fp8":
        reasons.append("FP8 has no amax history in this checkpoint, so its first scales are guesses")
    if old == "fp8":
        reasons.append("the weights were fitted to the rounding of FP8")
    if old == "32" and new == "bf16":
        reasons.append("BF16 keeps 8 significant bits of the 24 that this model was trained with")
    if old == "bf16" and new == "32":
        reasons.append("the weights were fitted to the rounding of BF16")
    if before == "64-true":
        reasons.append("weights were kept in 64 bits, which this run would round")
    elif old_kind != new_kind and "true" in (old_kind, new_kind) and "32-true" not in (before, now):
        reasons.append(
            "weights would be rounded to 16 bits, where updates below half an ulp vanish"
            if new_kind == "true"
            else "weights were kept in 16 bits and would go on in FP32"
        )
    elif before == "32-true" and new_kind == "true" and new != "32":
        reasons.append("weights would be rounded to 16 bits, where updates below half an ulp vanish")
    elif now == "32-true" and old_kind == "true" and old != "32":
        reasons.append("weights were kept in 16 bits and would go on in FP32")
    text = "; ".join(reasons) or "it is not known what computing in it does to these weights"
    return f"{text[0].upper()}{text[1:]}."


def _precision_remedy(before: Sequence[str]) -> str:
    known = [f"AmpPrecision({name!r})" for name in before if name in _PRECISIONS]
    resume = f"Resume with {' or '.join(known)}. " if known else "Resume with what it was saved by. "
    return f"{resume}To use the weights alone, load the state_dict into the model and start a new fit."


def _column(manifest: Manifest, column: str) -> dict[str, str] | None:
    if manifest.routes is None:
        return None
    return {name: route[column] for name, route in manifest.routes.items() if column in route}


def _by_module(
    saved: Manifest, current: Manifest, column: str, why: str, remedy: str, widened: Verdict = "convert"
) -> _Judgment | None:
    """Compares a column of the plan module by module: what became narrower, what wider."""
    before, now = _column(saved, column), _column(current, column)
    if not before or not now:
        return None
    changed = {name: (before[name], now[name]) for name in now if name in before and before[name] != now[name]}
    if not changed:
        return "ok", f"{len(before)} modules", f"{len(now)} modules", "", ""
    refused = changed if widened == "refuse" else {n: pair for n, pair in changed.items() if not _widens(*pair)}
    shown = refused or changed
    old, new = (_some(f"{name or '(model)'} {pair[i]}" for name, pair in shown.items()) for i in (0, 1))
    if refused:
        return "refuse", old, new, why, remedy
    return widened, old, new, "These modules go on in a wider format.", ""


def _widens(before: str, now: str) -> bool:
    """Whether every number of the old format is one of the new; formats nobody knows widen to nothing."""
    old, new = before.split("+"), now.split("+")  # a module may hold parameters of several
    if not all(name in _WIDTH for name in (*old, *new)):
        return False
    narrowest = min(_WIDTH[name] for name in new)
    return all(_WIDTH[name] < narrowest or (name in new and len(new) == 1) for name in old)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:6]) + (f" and {len(listed) - 6} more" if len(listed) > 6 else "")


def _routes(saved: Manifest, current: Manifest) -> _Judgment | None:
    if saved.precision != current.precision:
        return None  # said by `precision`, of which it follows
    return _by_module(
        saved,
        current,
        "compute",
        "These modules would go on in a format that cannot hold all that theirs could.",
        "Give them back their rule, or plugin.set_route() them once the resumed run is stable.",
    )


def _modules(saved: Manifest, current: Manifest) -> _Judgment | None:
    if not saved.routes or not current.routes:
        return None
    gone, new = saved.routes.keys() - current.routes.keys(), current.routes.keys() - saved.routes.keys()
    if not gone and not new:
        return "ok", f"{len(saved.routes)} modules", f"{len(current.routes)} modules", "", ""
    return (
        "note",
        _some(sorted(gone)) or "-",
        _some(sorted(new)) or "-",
        "The model has other modules. Whether the weights fit is for strict loading to say.",
        "",
    )


def _parameters(saved: Manifest, current: Manifest) -> _Judgment | None:
    return _by_module(
        saved,
        current,
        "params",
        "Loading would round these weights to fewer digits without a word.",
        "Keep the parameters in the format they were saved in.",
    )


def _optimizer_state(saved: Manifest, current: Manifest) -> _Judgment | None:
    if saved.dtypes is not None and not saved.dtypes.optimizer_state:
        return None  # SGD without momentum has nothing to cast
    return _by_module(
        saved,
        current,
        "optimizer",
        "Loading would cast these moments, and updates go on in other numerics.",
        "Keep the precision, or params and master_weights of the policy, as they were.",
        widened="refuse",
    )


def _reduce(saved: Manifest, current: Manifest) -> _Judgment | None:
    if saved.policy is None or current.policy is None:
        return None
    before, now = str(saved.policy.get("reduce")), str(current.policy.get("reduce"))
    if before == now:
        return "ok", before, now, "", ""
    if _widens(before, now):
        return "convert", before, now, "A wider format loses nothing.", ""
    why = "Gradients would be added up over ranks with fewer digits or a smaller range."
    return "refuse", before, now, why, f"Set reduce={before!r} in the policy."


def _buffers(saved: Manifest, current: Manifest) -> _Judgment | None:
    if saved.policy is None or current.policy is None:
        return None
    before, now = (policy.get("buffers") or policy.get("params") for policy in (saved.policy, current.policy))
    why = "Running statistics would be rounded to fewer digits."
    if before != now and not _widens(str(before), str(now)):
        which = "buffers" if saved.policy.get("buffers") or current.policy.get("buffers") else "params"
        return "refuse", cell(before), cell(now), why, f"Set {which}={before!r} in the policy."
    lost = sorted(set(saved.kept_buffers or ()) - set(current.kept_buffers or ()))
    if lost and now != "fp32" and current.kept_buffers is not None:
        return (
            "refuse",
            f"{_some(lost)} kept",
            f"stored in {now}",
            why,
            "Give these buffers back the rule that names them.",
        )
    if before != now:
        return "convert", cell(before), cell(now), "A wider format loses nothing.", ""
    return "ok", cell(before), cell(now), "", ""


def _rules(saved: Manifest, current: Manifest) -> _Judgment | None:
    if saved.fingerprint is None or current.fingerprint is None or saved.precision != current.precision:
        return None
    return _differs(
        saved.fingerprint[:12],
        current.fingerprint[:12],
        "note",
        "The policy is written in another way; what it comes to is compared field by field.",
    )


def _moves(saved: Manifest, current: Manifest) -> _Judgment | None:
    if not saved.moves:
        return None
    when = "" if saved.moves[-1].step is None else f" (last at step {saved.moves[-1].step})"
    moved = _some(f"{move.match} to {move.compute}" for move in saved.moves)
    return "ok", f"{moved}{when}", "moved again", "Modules moved while training are moved again, not compared.", ""


def _masters(saved: Manifest, current: Manifest) -> _Judgment | None:
    before, now = saved.master_weights_kept, current.master_weights_kept
    if before is None or now is None:
        return None
    why = (
        "The FP32 copies that hold small updates would be dropped, and weights go on rounded to 16 bits."
        if before
        else "Masters would start from rounded weights, without the digits an FP32 copy had held."
    )
    return _differs(before, now, "refuse", why, f"Set master_weights={before} in the policy.")


def _loss_scale(saved: Manifest, current: Manifest) -> _Judgment | None:
    before, now = _scale_kind(saved), _scale_kind(current)
    if before == now:
        if before == "static" and saved.loss_scale is not None and current.loss_scale is not None:
            return _differs(
                saved.loss_scale.init, current.loss_scale.init, "convert", "The static scale of this run is used."
            )
        return "ok", before, now, "", ""
    if saved.precision is None and saved.scaler is None and current.precision != "16-mixed":
        return None
    if "none" not in (before, now):
        why = (
            "The static scale of this run is used, whatever scale was found."
            if now == "static"
            else "The dynamic scale goes on from the static one."
        )
        return "convert", before, now, why, ""
    in_fp16 = (current.precision or "").startswith("16-")
    why = (
        f"The run goes on without its loss scale{': gradients below 6e-8 become zero in FP16' if in_fp16 else ''}."
        if now == "none"
        else "The run gets a loss scale, which starts anew."
    )
    # Where the precision itself changed, that is the finding, and the scale follows from it.
    verdict: Verdict = "refuse" if saved.precision == current.precision else "convert"
    return verdict, before, now, why, "" if verdict == "convert" else "Give loss_scale= as it was."


def _scale_kind(manifest: Manifest) -> str:
    if manifest.loss_scale is not None:
        return manifest.loss_scale.kind
    return "none" if manifest.scaler is None else "dynamic"


_RULE_OF_SCALE = ("growth_factor", "backoff_factor", "growth_interval", "min", "max", "hysteresis",
                  "backoff_on_forward_overflow")  # fmt: skip


def _loss_scale_rule(saved: Manifest, current: Manifest) -> _Judgment | None:
    if saved.loss_scale is None or current.loss_scale is None or saved.loss_scale.kind != "dynamic":
        return None
    if current.loss_scale.kind != "dynamic":
        return None

    def rule(entry: LossScaleEntry, names: Sequence[str]) -> dict[str, str]:
        return {name: cell(getattr(entry, name)) for name in names}

    names = [n for n in _RULE_OF_SCALE if getattr(saved.loss_scale, n) != getattr(current.loss_scale, n)]
    if not names:
        return "ok", "the same", "the same", "", ""
    why = "The scale goes on from where it was, by the rule of this run."
    return "note", cell(rule(saved.loss_scale, names)), cell(rule(current.loss_scale, names)), why, ""


def _scaler(saved: Manifest, current: Manifest) -> _Judgment | None:
    if _scale_kind(saved) == "none" or _scale_kind(current) == "none":
        return None
    start = "new" if current.loss_scale is None else f"starts at {current.loss_scale.init:g}"
    if saved.scaler is None:
        return "refuse", "missing", start, "The state of the loss scale is not in the checkpoint.", _ANEW
    fault = scaler_fault(saved.scaler)
    if fault is not None:
        return "refuse", fault, start, "No training can go on from this state of the loss scale.", _ANEW
    scale = float(saved.scaler["scale"])
    config = current.loss_scale
    if config is not None and config.kind == "dynamic" and not config.min <= scale <= config.max:
        inside = min(max(scale, config.min), config.max)
        why = f"The saved scale lies outside [{config.min:g}, {config.max:g}] of this run and is moved into it."
        return "convert", f"{scale:g}", f"{inside:g}", why, ""
    taken = "taken over" if config is None or config.kind == "dynamic" else "not used: this run's is static"
    return "ok", f"scale {scale:g}", taken, "", ""


_ANEW = "Resume from an earlier checkpoint, or let the loss scale start anew: allow=['scaler']."


def scaler_fault(state: Mapping[str, Any]) -> str | None:
    """What is wrong with the saved state of a loss scale, or ``None``.

    Besides what a ``LossScaler`` holds, that of torch's GradScaler is fine, which has no hysteresis.
    """
    if not state:
        return "empty"
    missing = [key for key in ("scale", "_growth_tracker") if key not in state]
    if missing:
        return f"lacks {', '.join(missing)}"
    numbers: list[tuple[str, Callable[[float], bool]]] = [
        ("scale", usable),
        ("_growth_tracker", lambda value: value >= 0 and value == int(value)),
        ("_hysteresis", lambda value: value == int(value)),
        ("growth_factor", lambda value: value >= 1),
        ("backoff_factor", lambda value: 0 < value < 1),
        ("growth_interval", lambda value: value >= 1),
    ]
    for key, fits in numbers:
        if key not in state:
            continue
        value = state[key]
        if not _is_number(value) or not fits(float(value)):
            return f"{key}={value!r}"[:80]
    return None


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:  # a whole number beyond any float
        return False


def _fp8_modules(saved: Manifest, current: Manifest) -> Iterator[tuple[str, Fp8Module, Fp8Module]]:
    if saved.fp8 is not None and current.fp8 is not None:
        for name, module in current.fp8.modules.items():
            if name in saved.fp8.modules:
                yield name, saved.fp8.modules[name], module


def _fp8(
    attribute: str, different: Verdict, why: str, remedy: str, where_both_have_one: bool = False
) -> Callable[[Manifest, Manifest], _Judgment | None]:
    def judge(saved: Manifest, current: Manifest) -> _Judgment | None:
        both = [
            (name, before, now)
            for name, before, now in _fp8_modules(saved, current)
            if not where_both_have_one or None not in (getattr(before, attribute), getattr(now, attribute))
        ]
        if not both:
            return None
        changed = [
            (name, getattr(before, attribute), getattr(now, attribute))
            for name, before, now in both
            if getattr(before, attribute) != getattr(now, attribute)
        ]
        if not changed:
            return "ok", _some({cell(getattr(before, attribute)) for _, before, _ in both}), "the same", "", ""
        before_text, now_text = (_some(f"{name} {cell(values[i])}" for name, *values in changed) for i in (0, 1))
        return different, before_text, now_text, why, remedy

    return judge


def _delayed(manifest: Manifest) -> bool:
    return manifest.fp8 is not None and any(m.recipe.startswith("delayed") for m in manifest.fp8.modules.values())


def _fp8_clock(saved: Manifest, current: Manifest) -> _Judgment | None:
    if not (_delayed(saved) and _delayed(current)) or saved.fp8 is None or current.fp8 is None:
        return None
    why = "Under delayed scaling the history would fill at another pace, and scales are taken from other steps."
    return _differs(saved.fp8.amax_clock, current.fp8.amax_clock, "refuse", why, "Keep the amax clock as it was.")


def _fp8_start(saved: Manifest, current: Manifest) -> _Judgment | None:
    if saved.fp8_start is None or current.fp8_start is None or saved.policy is None or current.policy is None:
        return None
    (_, stable), (after, now_stable) = _waits(saved.policy), _waits(current.policy)
    begun_at = saved.fp8_start.begun_at
    before = "waits" if begun_at is None else "on" if begun_at == 0 else f"on since step {begun_at}"
    if saved.history.applied < after:
        now = f"waits for step {after}{' and for stability' if now_stable else ''}"
        return ("ok", before, now, "", "") if begun_at is None else ("note", before, now, "FP8 is off until then.", "")
    if begun_at is not None:
        return "ok", before, "stays on", "", ""
    if stable and not now_stable:
        return "note", before, "begins", "FP8 waits no longer for stability.", ""
    return "ok", before, "waits for stability" if now_stable else "begins", "", ""


def _waits(policy: Mapping[str, Any]) -> tuple[int, bool]:
    after = policy.get("fp8_after_steps")
    return after if isinstance(after, int) else 0, policy.get("fp8_when_stable") is True


def _accumulation(saved: Manifest, current: Manifest) -> _Judgment | None:
    if saved.accumulation is None or current.accumulation is None:
        return None
    before, now = saved.accumulation.batches, current.accumulation.batches
    if _delayed(saved) and _delayed(current):
        why = "Under delayed scaling the amax history would span another number of micro-batches."
        return _differs(before, now, "refuse", why, f"Set accumulate_grad_batches={before}.")
    return _differs(before, now, "note", "The effective batch size changes.")


def _window(saved: Manifest, current: Manifest) -> _Judgment | None:
    window = saved.window
    if window is None or window.micro_batches == 0:
        return None
    size = "" if window.size is None else f" of {window.size}"
    done = f"{window.micro_batches}{size} micro-batches done"
    if window.gradients == "stored":
        batches = [m.accumulation.batches if m.accumulation is not None else None for m in (saved, current)]
        if saved.strategy is not None and saved.strategy == current.strategy and batches[0] == batches[1] is not None:
            return "ok", done, "gradients restored", "", ""
        why = "Saved in mid-window on other ranks, in another layout or for another window; its gradients are left out."
        return "convert", done, "gradients dropped", why, ""
    why = "Saved in mid-window without its gradients, so the first window of this run goes on without them."
    remedy = "PrecisionCheckpoint(save_window=True) stores them."
    return "convert", done, "gradients lost", why, remedy


def _data(saved: Manifest, current: Manifest) -> _Judgment | None:
    if saved.data is None:
        return None
    if saved.data.moment != "clean":
        where, what = UNCLEAN[saved.data.moment]
        return "note", where, what, "The resume is not exact.", "Save between two batches, or at the end of an epoch."
    if not saved.data.mid_epoch:
        return None
    if saved.data.stateful:
        return "ok", "middle of an epoch", "loader continues", "", ""
    return (
        "note",
        "middle of an epoch",
        "loader starts over",
        "The loader has no state_dict, so Lightning starts its data again: batches repeat, and the resume is not exact.",
        "Save at the end of an epoch, or give the loader state_dict and load_state_dict (torchdata's "
        "StatefulDataLoader has them).",
    )


# Where Lightning does not go on from where a checkpoint was saved, and what it does instead.
UNCLEAN = {
    "batch": ("in the middle of a batch", "that batch is run again, on the next data"),
    "epoch_start": ("in on_train_epoch_start", "most of that epoch is left out"),
    "stopped": ("after a fit that ended in mid-epoch", "goes on with the next epoch"),
}


def _random(saved: Manifest, current: Manifest) -> _Judgment | None:
    if current.strategy is None:
        return None
    ranks = current.strategy.world_size
    if saved.random is None:
        if saved.writer == "lightning_amp_plus" and saved.precision is not None:
            return "note", "none", "goes on", "No random state was saved: dropout and shuffling draw other numbers.", ""
        return None
    before = f"{saved.random.ranks} ranks" if saved.random.ranks != 1 else "1 rank"
    if saved.random.ranks == ranks and _on_accelerator(current) and "device" not in saved.random.generators:
        why = "The device's random state is not in a checkpoint of a CPU run; what is drawn there differs."
        return "note", f"{before}: {', '.join(saved.random.generators)}", "restored, but for the device", why, ""
    if saved.random.ranks == ranks:
        return "ok", f"{before}: {', '.join(saved.random.generators)}", "restored", "", ""
    why = "Random states of other ranks do not fit; dropout and shuffling draw other numbers."
    return "note", before, f"{ranks} rank{'s' * (ranks != 1)}", why, ""


def _on_accelerator(manifest: Manifest) -> bool:
    return manifest.hardware is not None and manifest.hardware.device != "cpu"


def _optimizer(saved: Manifest, current: Manifest) -> _Judgment | None:
    if not saved.optimizers or not current.optimizers:
        return None  # a Trainer makes its optimizers after the checkpoint has been judged, but under FSDP
    before, now = ([entry.name for entry in manifest.optimizers or ()] for manifest in (saved, current))
    if before != now:
        why = "The saved state belongs to another optimizer's arithmetic."
        return (
            "refuse",
            ", ".join(before),
            ", ".join(now),
            why,
            "Keep the optimizer, or start a new fit from the weights.",
        )
    fused = [[entry.fused for entry in manifest.optimizers or ()] for manifest in (saved, current)]
    old, new = (", ".join(f"{n}{' (fused)' * f}" for n, f in zip(before, flags, strict=True)) for flags in fused)
    return _differs(old, new, "note", "Another kernel; bits may differ.")


def _versions(name: str) -> Callable[[Manifest, Manifest], _Judgment | None]:
    return _equal("versions", name, "note", "Kernels and defaults differ between versions; bits may.")


def _hardware(saved: Manifest, current: Manifest) -> _Judgment | None:
    if saved.hardware is None or current.hardware is None:
        return None

    def said(hardware: Hardware) -> str:
        parts = [hardware.device, hardware.capability, hardware.cuda, hardware.hip, hardware.driver]
        return f"{hardware.name} ({', '.join(part for part in parts if part)})"

    why = "Another device, or other kernels, add up in another order; bits may differ."
    return _differs(said(saved.hardware), said(current.hardware), "note", why)


def _clipping(saved: Manifest, current: Manifest) -> _Judgment | None:
    if saved.strategy is None or current.strategy is None:
        return None  # not recorded: without a Trainer nobody knows

    def said(manifest: Manifest) -> str:
        return "none" if manifest.clipping is None else f"{manifest.clipping.value!r} by {manifest.clipping.algorithm}"

    return _differs(said(saved), said(current), "note", "Updates are bounded by another threshold.")


TABLE: tuple[Check, ...] = (
    Check(
        "precision",
        "compute and storage format of the whole run",
        "another: refuse. Of a checkpoint written without AmpPrecision: note where it can be the same",
        _precision,
        waivable=True,
    ),
    Check(
        "routes",
        "compute format of every module, where the precision is the same",
        "wider: convert; narrower, or between BF16 and FP16: refuse, naming the modules",
        _routes,
        waivable=True,
    ),
    Check("moves", "modules moved while training", "moved again, not compared", _moves),
    Check("modules", "names of the modules", "others: note (strict loading decides)", _modules),
    Check(
        "parameters",
        "storage format of every module's parameters",
        "wider: convert; narrower, or between BF16 and FP16: refuse",
        _parameters,
        waivable=True,
    ),
    Check(
        "optimizer_state",
        "format of the optimizer's state for every module, where there is any",
        "another: refuse",
        _optimizer_state,
        waivable=True,
    ),
    Check(
        "optimizer",
        "classes of the optimizers, and their kernels",
        "another class: refuse; fused or not: note",
        _optimizer,
        True,
    ),
    Check("master_weights", "FP32 copies of 16-bit parameters", "kept or not: refuse", _masters, waivable=True),
    Check(
        "reduce",
        "format of gradient communication",
        "wider: convert; narrower, or between BF16 and FP16: refuse",
        _reduce,
        waivable=True,
    ),
    Check(
        "buffers",
        "storage format of buffers, and which of them a rule keeps as they are",
        "wider: convert; another, or no longer kept: refuse",
        _buffers,
        waivable=True,
    ),
    Check("policy", "fingerprint of the policy, where the precision is the same", "another: note", _rules),
    Check(
        "loss_scale",
        "whether there is a loss scale, and of which kind",
        "gained or lost in the same precision: refuse, together with a change of precision: convert; dynamic to static, "
        "back, or another static scale: convert",
        _loss_scale,
        waivable=True,
    ),
    Check(
        "loss_scale_rule",
        "factors, interval, limits and hysteresis of a dynamic scale",
        "others: note",
        _loss_scale_rule,
    ),
    Check(
        "scaler",
        "saved state of the loss scale",
        "missing, partial or impossible: refuse (allowed: the scale starts anew); outside this run's limits: convert",
        _scaler,
        waivable=True,
    ),
    Check(
        "fp8_recipe",
        "recipe of every module in FP8",
        "another: refuse",
        _fp8(
            "recipe",
            "refuse",
            "Scales would be chosen in another way than the weights were trained with.",
            "Give the modules their recipe back.",
        ),
        waivable=True,
    ),
    Check(
        "fp8_history",
        "length of the amax histories",
        "another: refuse (allowed: the newest part is kept, a longer one fills up)",
        _fp8(
            "history_length",
            "refuse",
            "Scales would look back on another number of steps than the weights were trained with.",
            "Give the recipe its history length back.",
            where_both_have_one=True,  # of another recipe that row speaks
        ),
        waivable=True,
    ),
    Check(
        "fp8_start",
        "whether FP8 had begun, and what it waits for",
        "on stays on, but not before `fp8_after_steps`: note; no longer waiting for stability: note",
        _fp8_start,
    ),
    Check("fp8_clock", "what advances an amax history, under delayed scaling", "another: refuse", _fp8_clock, True),
    Check(
        "fp8_backend",
        "backend of every module in FP8",
        "another: note",
        _fp8("backend", "note", "Another kernel rounds the same formats; bits may differ.", ""),
    ),
    Check(
        "fp8_amax_group",
        "ranks that share amax values",
        "another: note",
        _fp8("amax_group", "note", "Scales are taken over other ranks.", ""),
    ),
    Check(
        "accumulation",
        "accumulate_grad_batches",
        "another: note; under delayed scaling: refuse",
        _accumulation,
        waivable=True,
    ),
    Check(
        "partial_window",
        "weight of a shorter last window",
        "another: note",
        _equal("accumulation", "partial_window", "note", "The last window of an epoch is weighted in another way."),
    ),
    Check(
        "sync_each_microbatch",
        "whether FSDP2 reduces each micro-batch",
        "another: note",
        _equal(
            "accumulation", "sync_each_microbatch", "note", "Gradients are added up in another order; bits may differ."
        ),
    ),
    Check("clipping", "threshold and algorithm of gradient clipping", "another: note", _clipping),
    Check(
        "check_finite",
        "whether windows that are not finite are skipped without a scale",
        "another: note",
        _equal("settings", "check_finite", "note", "What a non-finite gradient does changes."),
    ),
    Check(
        "advance_scheduler_on_skip",
        "whether a skip advances per-step schedulers",
        "another: note",
        _equal("settings", "advance_scheduler_on_skip", "note", "Learning rates go on by another count."),
    ),
    Check(
        "world_size",
        "number of ranks",
        "another: convert",
        _equal(
            "strategy",
            "world_size",
            "convert",
            "Gradients are averaged over another number of ranks, and the effective batch size changes.",
        ),
    ),
    Check(
        "strategy",
        "strategy",
        "another: note",
        _equal("strategy", "name", "note", "Gradients are added up in another order; bits may differ."),
    ),
    Check(
        "mesh",
        "shape of the device mesh",
        "another: note",
        _equal("strategy", "mesh", "note", "The model is cut in another way; bits may differ."),
    ),
    Check(
        "weights",
        "weights and optimizer state themselves",
        "not finite: refuse, naming the first",
        lambda saved, current: None,  # judged once they have been read, by `health`
        waivable=True,
    ),
    Check(
        "window",
        "an accumulation window open at the save",
        "gradients stored: ok with the same strategy, ranks, mesh and accumulation, else convert; lost: convert",
        _window,
    ),
    Check(
        "data",
        "position of the training data",
        "middle of an epoch without a stateful loader, middle of a batch, on_train_epoch_start, or after a fit that ended "
        "in mid-epoch: note",
        _data,
    ),
    Check("random_state", "random states of every rank", "missing, or of other ranks: note", _random),
    Check(
        "compiled",
        "torch.compile",
        "another: note",
        _equal("flags", "compiled", "note", "Fused kernels round in another order; bits may differ."),
    ),
    Check(
        "activation_checkpointing",
        "recomputation of activations",
        "another: note",
        _equal("flags", "activation_checkpointing", "note", "The same numbers, computed once more."),
    ),
    *(
        Check(f"version_{name}", f"version of {name}", "another: note", _versions(name))
        for name in ("python", "torch", "lightning", "lightning_amp_plus", "torchao", "transformer_engine")
    ),
    Check("hardware", "the device", "another: note", _hardware),
)
