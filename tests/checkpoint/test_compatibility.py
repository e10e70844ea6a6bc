"""Every rule of the checkpoint contract, from manifests made by hand: the pure function and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from lightning_amp_plus import AmpPrecision
from lightning_amp_plus.checkpoint.compatibility import (
    Finding,
    compare,
    in_evaluation,
    refusals,
    waive,
)
from lightning_amp_plus.checkpoint.findings_table import (
    conversions_text,
    notes_text,
    plain_table,
    refusal_text,
    rich_table,
)
from lightning_amp_plus.checkpoint.manifest import Manifest
from lightning_amp_plus.checkpoint.rules import TABLE, scaler_fault
from tests.support.manifests import DELETED, IMPOSSIBLE_SCALERS, document, manifest, route, scaler_state


@dataclass
class Case:
    """Two manifests: the same but for ``saved`` and ``current``; the verdict on ``row``, and words of the finding."""

    row: str
    verdict: str | None
    name: str = ""
    saved: dict[str, Any] = field(default_factory=dict)
    current: dict[str, Any] = field(default_factory=dict)
    precision: str = "16-mixed"
    now: str | None = None
    says: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.row}: {self.name or 'the same'}, {self.verdict or 'not compared'}"

    def finding(self) -> Finding | None:
        before = manifest(self.precision, **self.saved)
        now = manifest(self.now or self.precision, **self.current)
        found = [finding for finding in compare(before, now) if finding.field == self.row]
        assert len(found) <= 1
        return found[0] if found else None


def case(row: str, verdict: str | None, name: str = "", *says: str, **rest: Any) -> Case:
    return Case(row, verdict, name, says=says, **rest)


MOVE = {"match": "second", "compute": "fp32", "reason": "unstable", "step": 40}
STATIC = {"loss_scale__kind": "static"}
UNKNOWN = {"writer": "lightning", "precision": None, "policy": None, "fingerprint": None, "routes": None,
           "loss_scale": None, "scaler": None, "master_weights_kept": None}  # fmt: skip
TORCH_SCALER = scaler_state(_hysteresis=DELETED)
VERSIONS = ("python", "torch", "lightning", "lightning_amp_plus", "torchao", "transformer_engine")


def open_window(gradients: str, size: int | None = 4) -> dict[str, Any]:
    return {"window": {"micro_batches": 2, "size": size, "gradients": gradients}}


def both(changes: dict[str, Any]) -> dict[str, Any]:
    return {"saved": changes, "current": changes}


CASES = [
    # ---- the precision of the whole run
    case("precision", "ok"),
    case("precision", "refuse", "FP16 to BF16", "without the loss scale", now="bf16-mixed"),
    case("precision", "refuse", "BF16 to FP16", "65504", "no loss scale can rescue",
         precision="bf16-mixed", now="16-mixed"),
    case("precision", "refuse", "FP32 to FP16", "65504", precision="32-true", now="16-mixed"),
    case("precision", "refuse", "FP32 to BF16", "8 significant bits", precision="32-true", now="bf16-mixed"),
    case("precision", "refuse", "BF16 to FP32", "rounding of BF16", precision="bf16-mixed", now="32-true"),
    case("precision", "refuse", "BF16 to FP8", "no amax history", precision="bf16-mixed", now="fp8-mixed"),
    case("precision", "refuse", "FP8 to BF16", "rounding of FP8", precision="fp8-mixed", now="bf16-mixed"),
    case("precision", "refuse", "mixed to true", "half an ulp", precision="bf16-mixed", now="bf16-true"),
    case("precision", "refuse", "true to mixed", "in FP32", precision="bf16-true", now="bf16-mixed"),
    case("precision", "refuse", "FP32 to BF16 storage", "half an ulp", precision="32-true", now="bf16-true"),
    case("precision", "refuse", "BF16 storage to FP32", "would go on in FP32", precision="bf16-true", now="32-true"),
    case("precision", "refuse", "FP16 storage to FP32", "loss scale", precision="16-true", now="32-true"),
    case("precision", "note", "unknown, FP32 now", "32-true or bf16-mixed", saved=UNKNOWN, now="32-true"),
    case("precision", "note", "unknown, BF16 now", "32-true or bf16-mixed", saved=UNKNOWN, now="bf16-mixed"),
    case("precision", "refuse", "unknown, FP16 now", "65504", saved=UNKNOWN, now="16-mixed"),
    case("precision", "note", "unknown with a scaler", "16-mixed", saved={**UNKNOWN, "scaler": TORCH_SCALER}),
    case("precision", "refuse", "unknown with a scaler, BF16 now", "loss scale",
         saved={**UNKNOWN, "scaler": TORCH_SCALER}, now="bf16-mixed"),
    case("precision", "ok", "stock FP16", "Written without AmpPrecision", saved={"writer": "lightning (MixedPrecision)"}),
    # ---- module by module
    case("routes", "ok"),
    case("routes", "convert", "BF16 to FP32", "second bf16", "second fp32",
         precision="bf16-mixed", current={"routes__second": route("fp32")}),
    case("routes", "convert", "FP16 to FP32", current={"routes__second": route("fp32")}),
    case("routes", "convert", "FP8 to BF16", precision="fp8-mixed", current={"routes__second": route("bf16")}),
    case("routes", "convert", "FP8 to FP16", precision="fp8-mixed", current={"routes__second": route("fp16")}),
    case("routes", "convert", "FP8 to FP32", precision="fp8-mixed", current={"routes__second": route("fp32")}),
    case("routes", "refuse", "FP32 to FP16", "second fp32", saved={"routes__second": route("fp32")}),
    case("routes", "refuse", "BF16 to FP8", "second", precision="fp8-mixed", saved={"routes__second": route("bf16")}),
    case("routes", "refuse", "BF16 to FP16", "second", saved={"routes__second": route("bf16")}),
    case("routes", "refuse", "FP16 to BF16", "second", current={"routes__second": route("bf16")}),
    case("routes", "refuse", "an unknown format", "second", current={"routes__second": route("fp4")}),
    case("routes", "refuse", "one wider and one narrower", "second",
         saved={"routes__second": route("fp32")}, current={"routes__first": route("fp32")}),
    case("routes", "refuse", "the model itself", "(model)", saved={"routes": {"": route("fp32")}}),
    case("routes", None, "another precision", now="bf16-mixed"),
    case("routes", None, "not recorded", saved={"routes": None}),
    case("moves", None, "none"),
    case("moves", "ok", "one", "second to fp32", "step 40", "moved again", saved={"moves": [MOVE]}),
    case("moves", "ok", "of version 1", "second to fp32", saved={"moves": [{**MOVE, "step": None}]}),
    case("moves", None, "only in this run", current={"moves": [MOVE]}),
    case("modules", "ok"),
    case("modules", "note", "one gone and one new", "second", "third",
         current={"routes__second": DELETED, "routes__third": route("fp16")}),
    case("modules", None, "not recorded", saved={"routes": None}),
    # ---- storage
    case("parameters", "ok"),
    case("parameters", "convert", "BF16 to FP32", "first bf16", "first fp32",
         saved={"routes__first": route("fp16", params="bf16")}),
    case("parameters", "convert", "BF16 and FP32 to FP32", saved={"routes__first": route("fp16", params="bf16+fp32")}),
    case("parameters", "refuse", "FP32 to BF16", "first", current={"routes__first": route("fp16", params="bf16")}),
    case("parameters", "refuse", "FP32 to BF16 and FP32", "first",
         current={"routes__first": route("fp16", params="bf16+fp32")}),
    case("parameters", "refuse", "BF16 to FP16", "first",
         saved={"routes__first": route("fp16", params="bf16")}, current={"routes__first": route("fp16", params="fp16")}),
    case("parameters", "refuse", "FP64 to FP32", "first", saved={"routes__first": route("fp16", params="fp64")}),
    case("parameters", "refuse", "FP16 and FP64 to FP32", "first",
         saved={"routes__first": route("fp16", params="fp16+fp64")}),
    case("parameters", None, "not recorded", saved={"routes": None}),
    case("optimizer_state", "ok"),
    case("optimizer_state", "refuse", "narrower", "second", "master_weights",
         current={"routes__second": route("fp16", optimizer="fp16")}),
    case("optimizer_state", "refuse", "wider", "second", saved={"routes__second": route("fp16", optimizer="fp16")}),
    case("optimizer_state", None, "not recorded", saved={"routes": None}),
    case("master_weights", "ok"),
    case("master_weights", "refuse", "dropped", "would be dropped", "master_weights=True",
         saved={"master_weights_kept": True}),
    case("master_weights", "refuse", "new", "rounded weights", "master_weights=False",
         current={"master_weights_kept": True}),
    case("master_weights", None, "not recorded", saved={"master_weights_kept": None}),
    case("reduce", "ok"),
    case("reduce", "convert", "wider", saved={"policy__reduce": "bf16"}),
    case("reduce", "refuse", "narrower", "reduce='fp32'", current={"policy__reduce": "bf16"}),
    case("reduce", "refuse", "BF16 to FP16", saved={"policy__reduce": "bf16"}, current={"policy__reduce": "fp16"}),
    case("reduce", None, "not recorded", saved={"policy": None}),
    case("buffers", "ok"),
    case("buffers", "convert", "wider", saved={"policy__buffers": "bf16"}, current={"policy__buffers": "fp32"}),
    case("buffers", "refuse", "narrower", "buffers='fp32'",
         saved={"policy__buffers": "fp32"}, current={"policy__buffers": "bf16"}),
    case("buffers", "refuse", "as the parameters before", saved={"policy__buffers": None},
         current={"policy__buffers": "bf16"}),
    case("buffers", None, "not recorded", saved={"policy": None}),
    case("policy", "ok"),
    case("policy", "note", "written otherwise", "ffff", saved={"fingerprint": "f" * 64}),
    case("policy", None, "another precision", now="bf16-mixed"),
    case("policy", None, "not recorded", saved={"fingerprint": None}),
    # ---- the loss scale
    case("loss_scale", "ok"),
    case("loss_scale", "ok", "none on either side", precision="bf16-mixed"),
    case("loss_scale", "ok", "the same static one", **both(STATIC)),
    case("loss_scale", "convert", "another static one", "512", "64", saved=STATIC,
         current={**STATIC, "loss_scale__init": 64.0}),
    case("loss_scale", "convert", "another static one, a little higher", saved={**STATIC, "loss_scale__init": 1000000.0},
         current={**STATIC, "loss_scale__init": 1000001.0}),
    case("loss_scale", "convert", "dynamic to static", "static", current=STATIC),
    case("loss_scale", "convert", "static to dynamic", "dynamic", saved=STATIC),
    case("loss_scale", "refuse", "lost", "loss scale", current={"loss_scale": None, "scaler": None}),
    case("loss_scale", "refuse", "gained", "starts anew", saved={"loss_scale": None, "scaler": None}),
    case("loss_scale", "convert", "lost with the precision", now="bf16-mixed"),
    case("loss_scale", "convert", "gained with the precision", precision="bf16-mixed", now="16-mixed"),
    case("loss_scale", "ok", "of stock Lightning", saved={"loss_scale": None, "scaler": TORCH_SCALER}),
    case("loss_scale_rule", "ok"),
    *(
        case("loss_scale_rule", "note", name, name, saved={f"loss_scale__{name}": value})
        for name, value in {
            "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 7, "min": 1.0, "max": 2048.0,
            "hysteresis": 3, "backoff_on_forward_overflow": False,
        }.items()
    ),
    case("loss_scale_rule", "ok", "another first scale", saved={"loss_scale__init": 64.0}),
    case("loss_scale_rule", None, "a static scale", saved=STATIC),
    case("loss_scale_rule", None, "a static scale now", current=STATIC),
    case("scaler", "ok", "the same", "scale 1024"),
    case("scaler", "ok", "of torch", saved={"loss_scale": None, "scaler": TORCH_SCALER}),
    case("scaler", "refuse", "missing", "missing", "starts at 512", saved={"scaler": None}),
    case("scaler", "refuse", "partial", "_growth_tracker", saved={"scaler___growth_tracker": DELETED}),
    case("scaler", "convert", "above the limit", "1024", "256", "moved into it", current={"loss_scale__max": 256.0}),
    case("scaler", "convert", "below the limit", "1024", "4096", current={"loss_scale__min": 4096.0}),
    case("scaler", "ok", "outside the limits of a static scale", current={**STATIC, "loss_scale__max": 256.0}),
    case("scaler", None, "no scale now", now="bf16-mixed"),
    case("scaler", None, "no scale before", precision="bf16-mixed", now="16-mixed"),
    # ---- FP8
    *(
        case(row, "ok", precision="fp8-mixed")
        for row in ("fp8_recipe", "fp8_history", "fp8_clock", "fp8_backend", "fp8_amax_group")
    ),
    *(
        case(row, None, "no FP8 before", precision="bf16-mixed", now="fp8-mixed")
        for row in ("fp8_recipe", "fp8_history", "fp8_clock", "fp8_backend", "fp8_amax_group")
    ),
    case("fp8_recipe", "refuse", "another", "second delayed", "second current", precision="fp8-mixed",
         current={"fp8__modules__second__recipe": "current"}),
    case("fp8_recipe", "ok", "only in modules that are not in FP8 any more", precision="fp8-mixed",
         saved={"fp8__modules__second__recipe": "current"}, current={"fp8__modules__second": DELETED}),
    case("fp8_history", "refuse", "longer", "first 16", "first 64", "another number of steps", precision="fp8-mixed",
         current={"fp8__modules__first__history_length": 64}),
    case("fp8_history", "refuse", "shorter", precision="fp8-mixed", current={"fp8__modules__first__history_length": 4}),
    case("fp8_clock", "refuse", "another", "window", "micro_batch", precision="fp8-mixed",
         current={"fp8__amax_clock": "micro_batch"}),
    case("fp8_clock", None, "another, but nothing is delayed", precision="fp8-mixed",
         saved={"fp8__modules__first__recipe": "current", "fp8__modules__second__recipe": "current"},
         current={"fp8__modules__first__recipe": "current", "fp8__modules__second__recipe": "current",
                  "fp8__amax_clock": "micro_batch"}),
    case("fp8_start", "ok", "on from the beginning", "stays on", precision="fp8-mixed"),
    case("fp8_start", None, "no FP8 before", precision="bf16-mixed", now="fp8-mixed"),
    case("fp8_start", "ok", "on, and now it would wait", "on since step 9", "stays on", precision="fp8-mixed",
         saved={"fp8_start__begun_at": 9}, current={"policy__fp8_when_stable": True, "policy__fp8_after_steps": 9}),
    case("fp8_start", "note", "on, and later steps named", "on since step 9", "waits for step 20", precision="fp8-mixed",
         saved={"fp8_start__begun_at": 9}, current={"policy__fp8_after_steps": 20}),
    case("fp8_start", "ok", "waiting on for both", "waits for step 20 and for stability", precision="fp8-mixed",
         saved={"fp8_start__begun_at": None},
         current={"policy__fp8_after_steps": 20, "policy__fp8_when_stable": True}),
    case("fp8_start", "ok", "waiting on", "waits for stability", precision="fp8-mixed",
         saved={"fp8_start__begun_at": None, "policy__fp8_when_stable": True},
         current={"policy__fp8_when_stable": True}),
    case("fp8_start", "ok", "waiting for a log point", "begins", precision="fp8-mixed",
         saved={"fp8_start__begun_at": None, "policy__fp8_after_steps": 4}, current={"policy__fp8_after_steps": 4}),
    case("fp8_start", "note", "waiting no longer", "begins", "waits no longer", precision="fp8-mixed",
         saved={"fp8_start__begun_at": None, "policy__fp8_when_stable": True}),
    case("fp8_backend", "note", "another", "first torchao", "first transformer_engine", precision="fp8-mixed",
         current={"fp8__modules__first__backend": "transformer_engine"}),
    case("fp8_amax_group", "note", "another", "world", "data_parallel", precision="fp8-mixed",
         current={"fp8__modules__first__amax_group": "data_parallel"}),
    # ---- windows
    case("accumulation", "ok"),
    case("accumulation", "note", "another", "4", "8", current={"accumulation__batches": 8}),
    case("accumulation", "refuse", "another under delayed scaling", "accumulate_grad_batches=4", precision="fp8-mixed",
         current={"accumulation__batches": 8}),
    case("accumulation", "note", "another under current scaling", precision="fp8-mixed",
         saved={"fp8__modules__first__recipe": "current", "fp8__modules__second__recipe": "current"},
         current={"fp8__modules__first__recipe": "current", "fp8__modules__second__recipe": "current",
                  "accumulation__batches": 8}),
    case("accumulation", None, "not recorded", saved={"accumulation": None}),
    case("partial_window", "ok"),
    case("partial_window", "note", "another", "lightning", "mean", current={"accumulation__partial_window": "mean"}),
    case("partial_window", None, "not recorded", saved={"accumulation": None}),
    case("window", None, "none open"),
    case("window", "ok", "stored", "2 of 4 micro-batches done", saved=open_window("stored")),
    case("window", "ok", "stored, manual optimization", "2 micro-batches done", saved=open_window("stored", None)),
    case("window", "convert", "stored, other ranks", "gradients dropped",
         saved={**open_window("stored"), "strategy__world_size": 4}),
    case("window", "convert", "stored, another window", "gradients dropped", saved=open_window("stored"),
         current={"accumulation__batches": 8}),
    case("window", "convert", "lost", "save_window=True", "gradients lost", saved=open_window("lost")),
    case("window", None, "only open in this run", current=open_window("lost")),
    # ---- what surrounds it
    case("clipping", "ok"),
    case("clipping", "note", "another threshold", "1", "2", "by norm", current={"clipping__value": 2.0}),
    case("clipping", "note", "a threshold a little higher", current={"clipping__value": 1.0000001}),
    case("clipping", "note", "another algorithm", "by value", current={"clipping__algorithm": "value"}),
    case("clipping", "note", "none any more", "none", current={"clipping": None}),
    case("clipping", "ok", "none on either side", **both({"clipping": None})),
    case("clipping", None, "without a Trainer", saved={"strategy": None}),
    case("check_finite", "ok"),
    case("check_finite", "note", "another", "yes", "no", current={"settings__check_finite": False}),
    case("check_finite", None, "not recorded", saved={"settings": None}),
    case("advance_scheduler_on_skip", "ok"),
    case("advance_scheduler_on_skip", "note", "another", current={"settings__advance_scheduler_on_skip": True}),
    case("advance_scheduler_on_skip", None, "not recorded", saved={"settings": None}),
    case("world_size", "ok"),
    case("world_size", "convert", "another", "2", "8", current={"strategy__world_size": 8}),
    case("world_size", None, "without a Trainer", current={"strategy": None}),
    case("strategy", "ok"),
    case("strategy", "note", "another", "ModelParallelStrategy", current={"strategy__name": "ModelParallelStrategy"}),
    case("strategy", None, "without a Trainer", current={"strategy": None}),
    case("mesh", "ok"),
    case("mesh", "note", "another", "data_parallel 2", "tensor_parallel 2",
         current={"strategy__mesh": {"tensor_parallel": 2}}),
    case("mesh", "note", "none any more", "none", current={"strategy__mesh": None}),
    case("mesh", None, "without a Trainer", current={"strategy": None}),
    case("data", None, "between two epochs"),
    case("data", "ok", "a stateful loader", saved={"data": {"mid_epoch": True, "stateful": True}}),
    case("data", "note", "a plain loader", "starts over", "state_dict",
         saved={"data": {"mid_epoch": True, "stateful": False}}),
    case("data", None, "not recorded", saved={"data": None}),
    case("random_state", "ok", "the same", "device, numpy, python, torch"),
    case("random_state", "note", "of a CPU, on a GPU", "but for the device",
         saved={"random__generators": ["numpy", "python", "torch"]}),
    case("optimizer", "ok"),
    case("optimizer", "refuse", "another class", "AdamW", "SGD",
         current={"optimizers": [{"name": "SGD", "fused": True, "state_dtypes": {}}]}),
    case("optimizer", "note", "another kernel", "AdamW (fused)",
         current={"optimizers": [{"name": "AdamW", "fused": False, "state_dtypes": {"fp32": 8}}]}),
    case("optimizer", None, "not made yet", current={"optimizers": []}),
    case("sync_each_microbatch", "ok"),
    case("sync_each_microbatch", "note", "once a window", current={"accumulation__sync_each_microbatch": False}),
    case("buffers", "refuse", "no longer kept", "inv_freq kept", "stored in bf16", precision="bf16-true",
         current={"kept_buffers": []}),
    case("buffers", "ok", "no longer kept where nothing is rounded", current={"kept_buffers": []}),
    case("window", "convert", "stored under another strategy", "gradients dropped",
         saved={**open_window("stored"), "strategy__name": "ModelParallelStrategy"}),
    case("random_state", "note", "other ranks", "2 ranks", "1 rank",
         current={"strategy__world_size": 1}, saved={}),
    case("random_state", "note", "none saved", "draw other numbers", saved={"random": None}),
    case("random_state", None, "none saved by stock Lightning", saved={**UNKNOWN, "random": None}, now="32-true"),
    case("random_state", None, "without a Trainer", current={"strategy": None}),
    case("compiled", "ok"),
    case("compiled", "note", "another", current={"flags__compiled": True}),
    case("compiled", None, "not recorded", saved={"flags": None}),
    case("activation_checkpointing", "ok"),
    case("activation_checkpointing", "note", "another", current={"flags__activation_checkpointing": True}),
    case("activation_checkpointing", None, "not recorded", saved={"flags": None}),
    *(case(f"version_{name}", "ok") for name in VERSIONS),
    *(case(f"version_{name}", "note", "another", "9.9", current={f"versions__{name}": "9.9"}) for name in VERSIONS),
    *(case(f"version_{name}", None, "not recorded", saved={"versions": None}) for name in VERSIONS),
    case("hardware", "ok"),
    case("hardware", "note", "another device", "H200", "A100", current={"hardware__name": "A100"}),
    case("hardware", "note", "another capability", "10.0", current={"hardware__capability": "10.0"}),
    case("hardware", None, "not recorded", saved={"hardware": None}),
]  # fmt: skip
REFUSING = sorted({c.row for c in CASES if c.verdict == "refuse"} | {"weights"})  # `weights` is judged by `health`


@pytest.mark.parametrize("example", CASES, ids=str)
def test_the_rule_for(example: Case) -> None:
    finding = example.finding()
    assert (finding and finding.verdict) == example.verdict
    if finding is not None:
        said = " ".join((finding.saved, finding.current, finding.why, finding.remedy))
        assert [part for part in example.says if part not in said] == []


@pytest.mark.parametrize("example", [c for c in CASES if c.verdict not in (None, "ok")], ids=str)
def test_every_difference_is_shown_and_explained_by(example: Case) -> None:
    finding = example.finding()
    assert finding is not None
    assert finding.saved and finding.current and finding.saved != finding.current
    assert finding.why[0].isupper() and finding.why.endswith(".")
    assert not finding.remedy or finding.remedy.endswith(".")
    if finding.verdict == "refuse":
        assert finding.remedy


@pytest.mark.parametrize("check", TABLE, ids=lambda check: check.field)
def test_every_verdict_that_the_table_names_has_an_example_here(check: Any) -> None:
    shown = {c.verdict for c in CASES if c.row == check.field} - {None}
    if check.field == "weights":
        assert check.judge(manifest(), manifest()) is None and not shown
        return
    assert "ok" in shown
    for verdict in ("note", "convert", "refuse"):
        assert (verdict in check.rule) == (verdict in shown), f"{verdict}: {check.rule}"


@pytest.mark.parametrize("check", TABLE, ids=lambda check: check.field)
def test_what_refuses_can_be_allowed_and_nothing_else_can(check: Any) -> None:
    assert check.waivable == (check.field in REFUSING)


def test_fields_are_named_once() -> None:
    names = [check.field for check in TABLE]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("name", [check.field for check in TABLE if check.waivable])
def test_allowing_a_field_turns_its_refusal_into_a_conversion(name: str) -> None:
    assert AmpPrecision("bf16-mixed", allow=[name]).allow == (name,)
    refused = [Finding(other, "a", "b", "refuse", "Why.", "Do.") for other in (name, "something_else")]
    waived = waive(refused, [name])
    assert [(f.field, f.verdict) for f in waived] == [(name, "convert"), ("something_else", "refuse")]
    assert waived[0].remedy == f"Allowed by allow=[{name!r}]."
    assert waived[0].why == "Why."
    assert refusals(waived) == [refused[1]]


@pytest.mark.parametrize("verdict", ["ok", "note", "convert"])
def test_allowing_changes_nothing_that_was_not_refused(verdict: Any) -> None:
    finding = Finding("precision", "a", "b", verdict)
    assert waive([finding], ["precision"]) == [finding]


@pytest.mark.parametrize(
    "precision", ["32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "fp8-mixed"], ids=str
)
def test_a_run_agrees_with_itself(precision: str) -> None:
    findings = compare(manifest(precision), manifest(precision))
    assert {finding.verdict for finding in findings} == {"ok"}
    # Only what needs something saved in between, or a scale, or FP8, is not compared.
    silent = {check.field for check in TABLE} - {finding.field for finding in findings}
    assert silent <= {
        "moves", "weights", "window", "data", "loss_scale_rule", "scaler",
        *(() if precision == "fp8-mixed" else (c.field for c in TABLE if c.field.startswith("fp8_"))),
    }  # fmt: skip
    assert ("scaler" in silent) == (not precision.startswith("16"))


def test_findings_come_in_the_order_of_the_table_whatever_differs() -> None:
    order = [check.field for check in TABLE]
    found = [f.field for f in compare(manifest("fp8-mixed"), manifest("16-true", clipping=None))]
    assert found == sorted(found, key=order.index)


def test_evaluation_refuses_nothing_and_hides_nothing() -> None:
    findings = compare(manifest("16-mixed"), manifest("bf16-true", strategy__world_size=4))
    evaluated = in_evaluation(findings)
    assert refusals(findings) and not refusals(evaluated)
    assert [f.field for f in evaluated] == [f.field for f in findings]
    for before, after in zip(findings, evaluated, strict=True):
        assert after.verdict == ("note" if before.verdict == "refuse" else before.verdict)
        assert (after.saved, after.current, after.why) == (before.saved, before.current, before.why)


@pytest.mark.parametrize("name", IMPOSSIBLE_SCALERS)
def test_an_impossible_state_of_the_scale_is_named_and_refused(name: str) -> None:
    changes, fault = IMPOSSIBLE_SCALERS[name]
    saved = manifest(scaler=scaler_state(**changes))
    assert saved.scaler is not None and scaler_fault(saved.scaler) == fault
    [finding] = [f for f in compare(saved, manifest()) if f.field == "scaler"]
    assert (finding.verdict, finding.saved) == ("refuse", fault)


@pytest.mark.parametrize(
    "state",
    [
        scaler_state(),
        scaler_state(_hysteresis=DELETED),
        {"scale": 2.0, "_growth_tracker": 0},
        scaler_state(scale=2.0**-126),
        scaler_state(_growth_tracker=3.0),
        scaler_state(_hysteresis=-2),  # overflows beyond it, where growth has not refilled it yet
        scaler_state(scale=4096),
    ],
    ids=str,
)
def test_a_possible_state_of_the_scale_has_no_fault(state: dict[str, Any]) -> None:
    assert scaler_fault(state) is None


def test_long_lists_of_modules_are_cut_and_counted() -> None:
    wide = {f"layer{i}": route("fp16") for i in range(20)}
    narrow = {f"layer{i}": route("bf16") for i in range(20)}
    [finding] = [f for f in compare(manifest(routes=wide), manifest(routes=narrow)) if f.field == "routes"]
    assert finding.saved.endswith("layer5 fp16 and 14 more")


# ---------------------------------------------------------------- as text


def findings_of_all_kinds() -> list[Finding]:
    return compare(
        manifest("16-mixed", strategy__world_size=4, versions__torch="2.13.0"),
        manifest("bf16-mixed", versions__torch="2.14.0"),
    )


def test_the_refusal_shows_what_differs_and_what_to_paste() -> None:
    text = refusal_text("last.ckpt", findings_of_all_kinds(), allowed=["routes"])
    assert "last.ckpt" in text
    assert "allow=['precision', 'routes']" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["precision", "16-mixed", "bf16-mixed", "refuse"] in lines
    assert ["version_torch", "2.13.0", "2.14.0", "note"] in lines
    assert not any(line[-1:] == ["ok"] for line in lines)
    assert "Training has not begun" in text


def test_conversions_and_notes_are_told_apart() -> None:
    findings = findings_of_all_kinds()
    assert "world_size" in conversions_text("a", findings) and "version_torch" not in conversions_text("a", findings)
    assert "version_torch" in notes_text("a", findings) and "world_size" not in notes_text("a", findings)


def test_long_cells_are_folded_below_the_head_of_their_column() -> None:
    long = Finding("routes", "word " * 30, "b", "refuse", "Why.", "Do.")
    lines = plain_table([long, Finding("precision", "a", "b", "ok")]).splitlines()
    assert max(map(len, lines)) < 120
    start = lines[0].index("saved")
    folded = [line for line in lines if "word" in line]
    assert len(folded) > 1
    assert {line.index("word") for line in folded} == {start}
    assert sum(line.count("word") for line in folded) == 30


def test_the_rich_table_shows_brackets_as_they_are() -> None:
    from rich.console import Console

    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(rich_table("[a]", [Finding("precision", "list[int] [red]", "[/]", "refuse", "Why [x].", "Do [y].")]))
    text = console.export_text()
    for part in ("list[int] [red]", "[/]", "Why [x].", "Do [y]."):
        assert part in text


def test_a_manifest_is_not_changed_by_being_compared() -> None:
    saved, current = manifest("fp8-mixed"), manifest("16-true")
    compare(saved, current)
    assert (saved.to_dict(), current.to_dict()) == (document("fp8-mixed"), document("16-true"))


# What no rule compares, each with the reason.
UNCOMPARED = {
    "schema_version": "migrated before",
    "save_id": "of one save",
    "writer": "shown",
    "windows": "continued",
    "history": "continued",
    "progress": "continued by Lightning",
    "device_type": "hardware says more",
    "settings.max_consecutive_skips": "its default follows the loss scale",
    "loss_scale.init": "the scale goes on from where it was",
    "optimizers.state_dtypes": "dtypes says the same of all",
    "dtypes": "as found; routes say what was meant",
    "weights_only": "refused before",
    "random.generators": "compared by the device's alone",
    "data": "judged alone, in mid-epoch",
    "window.gradients": "judged together with the micro-batches",
    "window.size": "shown",
    "policy": "compared by its fields and its fingerprint",
    "moves": "made again",
    "scaler": "judged alone",
    "routes": "compared by column",
    "kept_buffers": "compared where buffers are rounded",
    "fp8": "compared where it ran",
    "fp8_start": "judged by whether it had begun",
    "census": "compared with the resumed run's own, after its first step",
}


def leaves(plain: Any, path: str = "") -> Any:
    for key, value in plain.items():
        name = f"{path}{key}"
        if name in UNCOMPARED:
            continue
        if isinstance(value, dict):
            yield from leaves(value, f"{name}.")
        else:
            yield name, value


def another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return "fp8-mixed" if value == "16-mixed" else f"another {value or ''}"


@pytest.mark.parametrize("path", [name for name, _ in leaves(document())])
def test_every_field_of_the_manifest_is_compared_or_listed_with_a_reason(path: str) -> None:
    before = document()
    for section, attribute in (("optimizers", "name"), ("optimizers", "fused")):
        if path == section:  # a list of sections
            now = document(
                optimizers=[{**before["optimizers"][0], attribute: another(before["optimizers"][0][attribute])}]
            )
            assert {f.verdict for f in compare(manifest(), Manifest.from_dict(now, "x"))} != {"ok"}
            return
    value = dict(leaves(before))[path]
    changes = {"loss_scale__kind": "static"} if path == "loss_scale.kind" else {path.replace(".", "__"): another(value)}
    pair = manifest(), manifest(**changes)
    found = [finding.verdict for sides in (pair, pair[::-1]) for finding in compare(*sides)]
    assert set(found) != {"ok"}
