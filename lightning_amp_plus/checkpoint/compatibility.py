"""Whether a run may continue a checkpoint: one table of rules, and the pure function that applies it.

Two manifests in, findings out; nothing is read, asked or changed. The guard turns findings into an error or a log line, the
command line prints them, and the table in ``docs/checkpoints.md`` is made from :data:`TABLE`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from lightning_amp_plus.checkpoint.manifest import Fp8Module, LossScaleEntry, Manifest
from lightning_amp_plus.scaling.loss_scale import usable

Verdict = Literal["ok", "note", "convert", "refuse"]

# From narrow to wide. BF16 and FP16 are neither: each loses what the other keeps.
_WIDTH = {"fp8": 0, "bf16": 1, "fp16": 1, "fp32": 2, "fp64": 3}


@dataclass(frozen=True)
class Finding:
    """One field of the two manifests, compared.

    Attributes:
        field: Its name, as in :data:`TABLE` and in ``AmpPrecision(allow=...)``.
        saved: What the checkpoint says, for people.
        current: What this run says.
        verdict: ``ok``: the same. ``note``: another, without harm. ``convert``: goes on, with a logged step. ``refuse``:
            stops the resume unless the field is allowed.
        why: Why it matters.
        remedy: What to do.
    """

    field: str
    saved: str
    current: str
    verdict: Verdict
    why: str = ""
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        """The finding in plain types."""
        return dict(vars(self))


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


def compare(saved: Manifest, current: Manifest) -> list[Finding]:
    """What there is to say about continuing ``saved`` in a run described by ``current``, in the order of the table."""
    findings = []
    for check in TABLE:
        judgment = check.judge(saved, current)
        if judgment is not None:
            verdict, before, now, why, remedy = judgment
            findings.append(Finding(check.field, before, now, verdict, why, remedy))
    return findings


def in_evaluation(findings: Iterable[Finding]) -> list[Finding]:
    """The same findings for ``validate``, ``test`` and ``predict``, which take the weights and nothing else."""
    return [
        Finding(f.field, f.saved, f.current, "note", f.why, "Evaluation goes on; a fit would be refused.")
        if f.verdict == "refuse"
        else f
        for f in findings
    ]


def waive(findings: Iterable[Finding], allow: Iterable[str]) -> list[Finding]:
    """The findings with those refusals turned into conversions that the user named."""
    allowed = set(allow)
    return [
        Finding(f.field, f.saved, f.current, "convert", f.why, f"Allowed by allow={[f.field]!r}.")
        if f.verdict == "refuse" and f.field in allowed
        else f
        for f in findings
    ]


def refusals(findings: Iterable[Finding]) -> list[Finding]:
    """Those that stop a resume."""
    return [finding for finding in findings if finding.verdict == "refuse"]


def check_allow(allow: Any) -> tuple[str, ...]:
    """The fields named in ``AmpPrecision(allow=...)``.

    Raises:
        ValueError: If it is no collection of names, or one of them is none that can be allowed, naming it.
    """
    if isinstance(allow, str) or not isinstance(allow, (Sequence, set, frozenset)):
        raise ValueError(f"AmpPrecision(allow={allow!r}): expected a list of field names, such as allow=['precision'].")
    known = [check.field for check in TABLE if check.waivable]
    for name in allow:
        if name not in known:
            close = get_close_matches(str(name), known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"AmpPrecision(allow=[{name!r}]): there is no such field.{hint} Known are {known}.")
    return tuple(dict.fromkeys(allow))


# ---------------------------------------------------------------- the rules


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
        return "ok", _text(before), _text(now), "", ""
    return different, _text(before), _text(now), why, remedy


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items()) or "none"
    return str(value)


def _precision(saved: Manifest, current: Manifest) -> _Judgment:
    before, now = saved.precision, current.precision
    known = saved.writer == "lightning_amp_plus"
    if before is None:
        possible = ["32-true", "bf16-mixed"] if saved.scaler is None else ["16-mixed"]
        said = f"not recorded ({' or '.join(possible)})"
        if now in possible:
            return "note", said, _text(now), "The checkpoint was written without AmpPrecision.", ""
        return "refuse", said, _text(now), _why_precision(possible[0], str(now)), _precision_remedy(possible[0])
    if before == now:
        return "ok", before, str(now), "" if known else "Written without AmpPrecision.", ""
    return "refuse", before, str(now), _why_precision(before, str(now)), _precision_remedy(before)


def _why_precision(before: str, now: str) -> str:
    (old, _, old_kind), (new, _, new_kind) = before.partition("-"), now.partition("-")
    reasons = []
    if new == "16" and old != "16":
        reasons.append(
            "FP16 ends at 65504: activations of this model may lie above it, and no loss scale can rescue those; "
            "gradients need a loss scale that this checkpoint does not have"
        )
    if old == "16" and new != "16":
        reasons.append(
            "the run goes on without the loss scale it found"
            + (", and BF16 and FP8 keep fewer digits than FP16" if new in ("bf16", "fp8") else "")
        )
    if new == "fp8":
        reasons.append("FP8 has no amax history in this checkpoint, so its first scales are guesses")
    if old == "fp8":
        reasons.append("the weights were fitted to the rounding of FP8")
    if old == "32" and new == "bf16":
        reasons.append("BF16 keeps 8 significant bits of the 24 that this model was trained with")
    if old == "bf16" and new == "32":
        reasons.append("the weights were fitted to the rounding of BF16")
    if old_kind != new_kind and "true" in (old_kind, new_kind) and "32-true" not in (before, now):
        reasons.append(
            "weights would be rounded to 16 bits, where updates below half an ulp vanish"
            if new_kind == "true"
            else "weights were kept in 16 bits and would go on in FP32"
        )
    elif before == "32-true" and new_kind == "true" and new != "32":
        reasons.append("weights would be rounded to 16 bits, where updates below half an ulp vanish")
    elif now == "32-true" and old_kind == "true" and old != "32":
        reasons.append("weights were kept in 16 bits and would go on in FP32")
    text = "; ".join(reasons) or "losses would go on in other numerics"
    return f"{text[0].upper()}{text[1:]}."


def _precision_remedy(before: str) -> str:
    return (
        f"Resume with AmpPrecision({before!r}). To use the weights alone, load the state_dict into the model and start "
        "a new fit."
    )


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
    old, new = before.partition("+")[0], now.partition("+")[0]
    return old in _WIDTH and new in _WIDTH and _WIDTH[new] > _WIDTH[old]


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
    return _by_module(
        saved,
        current,
        "optimizer",
        "Loading would cast these moments, and updates go on in other numerics.",
        "Keep params and master_weights of the policy as they were.",
        widened="refuse",
    )


def _policy_format(key: str, why: str) -> Callable[[Manifest, Manifest], _Judgment | None]:
    def judge(saved: Manifest, current: Manifest) -> _Judgment | None:
        if saved.policy is None or current.policy is None:
            return None
        before, now = saved.policy.get(key), current.policy.get(key)
        if before == now:
            return "ok", _text(before), _text(now), "", ""
        if before is not None and now is not None and _widens(str(before), str(now)):
            return "convert", _text(before), _text(now), "A wider format loses nothing.", ""
        return "refuse", _text(before), _text(now), why, f"Set {key}={before!r} in the policy."

    return judge


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
    why = (
        "Saved with a loss scale, but this run has none: gradients below 6e-8 become zero in FP16."
        if now == "none"
        else "Saved without a loss scale, but this run has one, which starts anew."
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
        return {name: _text(getattr(entry, name)) for name in names}

    names = [n for n in _RULE_OF_SCALE if getattr(saved.loss_scale, n) != getattr(current.loss_scale, n)]
    if not names:
        return "ok", "the same", "the same", "", ""
    why = "The scale goes on from where it was, by the rule of this run."
    return "note", _text(rule(saved.loss_scale, names)), _text(rule(current.loss_scale, names)), why, ""


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
    return "ok", f"scale {scale:g}", "taken over", "", ""


_ANEW = "Resume from an earlier checkpoint, or start the loss scale anew by allowing it."


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
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not fits(float(value)):
            return f"{key}={value!r}"
    return None


def _fp8_modules(saved: Manifest, current: Manifest) -> Iterator[tuple[str, Fp8Module, Fp8Module]]:
    if saved.fp8 is not None and current.fp8 is not None:
        for name, module in current.fp8.modules.items():
            if name in saved.fp8.modules:
                yield name, saved.fp8.modules[name], module


def _fp8(attribute: str, different: Verdict, why: str, remedy: str) -> Callable[[Manifest, Manifest], _Judgment | None]:
    def judge(saved: Manifest, current: Manifest) -> _Judgment | None:
        both = list(_fp8_modules(saved, current))
        if not both:
            return None
        changed = [
            (name, getattr(before, attribute), getattr(now, attribute))
            for name, before, now in both
            if getattr(before, attribute) != getattr(now, attribute)
        ]
        if not changed:
            return "ok", _some({_text(getattr(before, attribute)) for _, before, _ in both}), "the same", "", ""
        before_text, now_text = (_some(f"{name} {_text(values[i])}" for name, *values in changed) for i in (0, 1))
        return different, before_text, now_text, why, remedy

    return judge


def _delayed(manifest: Manifest) -> bool:
    return manifest.fp8 is not None and any(m.recipe == "delayed" for m in manifest.fp8.modules.values())


def _fp8_clock(saved: Manifest, current: Manifest) -> _Judgment | None:
    if not (_delayed(saved) and _delayed(current)) or saved.fp8 is None or current.fp8 is None:
        return None
    why = "Under delayed scaling the history would fill at another pace, and scales are taken from other steps."
    return _differs(saved.fp8.amax_clock, current.fp8.amax_clock, "refuse", why, "Keep the amax clock as it was.")


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
        same = (
            saved.strategy is not None
            and current.strategy is not None
            and saved.strategy.world_size == current.strategy.world_size
            and saved.accumulation is not None
            and current.accumulation is not None
            and saved.accumulation.batches == current.accumulation.batches
        )
        if same:
            return "ok", done, "gradients restored", "", ""
        why = "Saved in mid-window on other ranks or for another window; those gradients are left out of this one."
        return "convert", done, "gradients dropped", why, ""
    why = "Saved in mid-window without its gradients, so the first window of this run goes on without them."
    remedy = "PrecisionCheckpoint(save_window=True) stores them."
    return "convert", done, "gradients lost", why, remedy


def _data(saved: Manifest, current: Manifest) -> _Judgment | None:
    if saved.data is None or not saved.data.mid_epoch:
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


def _random(saved: Manifest, current: Manifest) -> _Judgment | None:
    if current.strategy is None:
        return None
    ranks = current.strategy.world_size
    if saved.random is None:
        if saved.writer == "lightning_amp_plus" and saved.precision is not None:
            return "note", "none", "goes on", "No random state was saved: dropout and shuffling draw other numbers.", ""
        return None
    before = f"{saved.random.ranks} ranks" if saved.random.ranks != 1 else "1 rank"
    if saved.random.ranks == ranks:
        return "ok", f"{before}: {', '.join(saved.random.generators)}", "restored", "", ""
    why = "Random states of other ranks do not fit; dropout and shuffling draw other numbers."
    return "note", before, f"{ranks} rank{'s' * (ranks != 1)}", why, ""


def _versions(name: str) -> Callable[[Manifest, Manifest], _Judgment | None]:
    return _equal("versions", name, "note", "Kernels and defaults differ between versions; bits may.")


def _hardware(saved: Manifest, current: Manifest) -> _Judgment | None:
    if saved.hardware is None or current.hardware is None:
        return None
    before, now = (f"{h.name} ({h.device}{f' {h.capability}' if h.capability else ''})"
                   for h in (saved.hardware, current.hardware))  # fmt: skip
    return _differs(before, now, "note", "Another device adds up in another order; bits may differ.")


def _clipping(saved: Manifest, current: Manifest) -> _Judgment | None:
    if saved.strategy is None or current.strategy is None:
        return None  # not recorded: without a Trainer nobody knows

    def said(manifest: Manifest) -> str:
        return "none" if manifest.clipping is None else f"{manifest.clipping.value:g} by {manifest.clipping.algorithm}"

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
        "wider: convert; narrower: refuse",
        _parameters,
        waivable=True,
    ),
    Check(
        "optimizer_state",
        "format of the optimizer's state for every module",
        "another: refuse",
        _optimizer_state,
        waivable=True,
    ),
    Check("master_weights", "FP32 copies of 16-bit parameters", "kept or not: refuse", _masters, waivable=True),
    Check(
        "reduce",
        "format of gradient communication",
        "wider: convert; narrower: refuse",
        _policy_format("reduce", "Gradients would be added up over ranks with fewer digits or a smaller range."),
        waivable=True,
    ),
    Check(
        "buffers",
        "storage format of buffers",
        "wider: convert; another: refuse",
        _policy_format("buffers", "Running statistics would be rounded to fewer digits."),
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
        "another: convert",
        _fp8("history_length", "convert", "The newest part of the history is kept; a longer one fills up.", ""),
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
        "gradients stored: ok on as many ranks, else convert; lost: convert",
        _window,
    ),
    Check("data", "position of the training data", "middle of an epoch without a stateful loader: note", _data),
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
