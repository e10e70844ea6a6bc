"""Backends: one contract for all that run here, who is chosen and why, and torchao against plain torchao."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import nn

from lightning_amp_plus import PrecisionPolicy, Rule, plan
from lightning_amp_plus.fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, Recipe, RowwiseScaling
from lightning_amp_plus.fp8.backends import BACKENDS, base, choose
from lightning_amp_plus.fp8.backends.torchao import config_of
from lightning_amp_plus.fp8.recipes import GEMMS
from tests.support import fp8_contract
from tests.support.fp8_contract import CONTRACT, grads, layer, routed, run, tokens

FULL: list[tuple[str, Recipe]] = [
    *(("reference", recipe) for recipe in (CurrentScaling(), RowwiseScaling(), BlockScaling(), MXScaling())),
    ("reference", DelayedScaling(history=4)),
    *(("torchao", recipe) for recipe in (CurrentScaling(), CurrentScaling(power_of_two=True), RowwiseScaling())),
]


@pytest.mark.parametrize("check", CONTRACT)
@pytest.mark.parametrize(("backend", "recipe"), FULL, ids=lambda value: getattr(value, "name", value))
def test_contract(backend: str, recipe: Recipe, check: str) -> None:
    CONTRACT[check](backend, recipe)


# -------------------------------------------------------------------- torchao


def converted(config: Any) -> nn.Module:
    from torchao.float8 import convert_to_float8_training

    return convert_to_float8_training(nn.Sequential(layer()), config=config)[0]  # type: ignore[no-any-return, index]


@pytest.mark.parametrize(
    ("recipe", "name"), [(CurrentScaling(), "tensorwise"), (RowwiseScaling(), "rowwise")], ids=["current", "rowwise"]
)
def test_torchao_computes_bit_for_bit_what_its_own_conversion_does(recipe: Recipe, name: str) -> None:
    from torchao.float8 import Float8LinearConfig

    theirs: Any = converted(Float8LinearConfig.from_recipe_name(name))
    x = tokens().bfloat16().requires_grad_()
    y = theirs(x)
    y.backward(grads().bfloat16())
    ours = run(routed(layer(), "torchao", recipe), tokens(), grads())
    assert torch.equal(ours[0], y) and torch.equal(ours[2], theirs.weight.grad)
    assert torch.equal(ours[1], x.grad.float())


@pytest.mark.parametrize("recipe", [CurrentScaling(power_of_two=True), RowwiseScaling()], ids=["current", "rowwise"])
def test_torchao_and_the_reference_agree(recipe: Recipe) -> None:
    one, other = (run(routed(layer(), name, recipe), tokens(), grads()) for name in ("torchao", "reference"))
    for mine, theirs in zip(one, other, strict=True):
        # Power-of-two scales round nothing: what is left is the order of summation and one rounding to BF16.
        assert fp8_contract.error(mine, theirs) < 2e-3


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("recipe", [CurrentScaling(), RowwiseScaling()], ids=["current", "rowwise"])
def test_torchao_leaves_the_gemms_in_bf16_that_are_switched_off(recipe: Recipe, gemm: Any) -> None:
    others = [other for other in GEMMS if other != gemm]
    whole = run(routed(layer(), "torchao", recipe), tokens(), grads())
    mixed = run(routed(layer(), "torchao", recipe, gemms=others), tokens(), grads())
    in_bf16 = run(layer(), tokens(), grads())
    for position, name in enumerate(GEMMS):
        expected = in_bf16 if name == gemm else whole
        assert fp8_contract.error(mixed[position], expected[position]) < (4e-3 if name == gemm else 0.02), name
    assert not torch.equal(mixed[GEMMS.index(gemm)], whole[GEMMS.index(gemm)])


def test_torchao_keeps_the_weight_gradient_high_where_the_recipe_says_so() -> None:
    config = config_of(RowwiseScaling(weight_grad="high"), ("fprop", "dgrad"))
    assert config.cast_config_input_for_grad_weight.scaling_type.value == "disabled"
    found = run(routed(layer(), "torchao", RowwiseScaling(weight_grad="high")), tokens(), grads())
    assert fp8_contract.error(found[2], run(layer(), tokens(), grads())[2]) < 1e-6


@pytest.mark.parametrize("recipe", [CurrentScaling(), RowwiseScaling()], ids=["current", "rowwise"])
def test_torchao_compiles_without_a_break(recipe: Recipe) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    routed(model, "torchao", recipe)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    for net in (model, compiled):
        net(tokens(17)).float().sum().backward()
    assert torch.equal(compiled(tokens(17)), model(tokens(17)))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), compiled.parameters(), strict=True))


# -------------------------------------------------------------------- who is chosen, and why


def policy(fallback: Any = "error", **rule: Any) -> PrecisionPolicy:
    return PrecisionPolicy("bf16", fallback=fallback, rules=[Rule("0", compute="fp8", **rule)])


def test_a_cpu_gets_the_reference_and_the_plan_says_why() -> None:
    routes = plan(nn.Sequential(nn.Linear(32, 32)), policy())
    assert routes["0"].fp8 is not None and routes["0"].fp8.backend == "reference"
    assert "reference: no FP8 GEMM on cpu is faster" in routes["0"].reason and "current, reference" in str(routes)


def test_a_rule_names_its_backend() -> None:
    routes = plan(nn.Sequential(nn.Linear(32, 32)), policy(backend="torchao"))
    assert routes["0"].fp8 is not None and routes["0"].fp8.backend == "torchao"
    assert routes["0"].reason == "matches '0'; torchao: as the rule says"


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"backend": "torchao", "recipe": DelayedScaling()}, ["torchao has current and rowwise", "no delayed"]),
        ({"backend": "torchao", "recipe": MXScaling()}, ["no mx"]),
        ({"backend": "transformer_engine", "recipe": RowwiseScaling()}, ["no rowwise"]),
        ({"backend": "transformer_engine", "gemms": ["fprop"]}, ["single GEMMs", "gemms=fprop"]),
        ({"backend": "transformer_engine"}, ["transformer-engine[pytorch]"]),
    ],
)
def test_a_backend_that_cannot_is_an_error_or_a_fallback_with_its_reason(rule: Any, words: list[str]) -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(ValueError, match="fallback='bf16'") as caught:
        plan(model, policy(**rule))
    assert all(word in str(caught.value) for word in ("Rule '0'", "Leave backend out", *words))
    routes = plan(model, policy("bf16", **rule))
    assert routes["0"].compute == "bf16" and routes["0"].reason.startswith("backend: ")


def test_a_missing_torchao_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    assert BACKENDS["torchao"].obstacle(CurrentScaling(), GEMMS, "cpu") == (
        "backend",
        "torchao is not installed (pip install torchao)",
    )


class Gpu:
    """A GPU that is asked about and not used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA Test")


def test_a_hopper_gets_torchao_where_it_has_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch, (9, 0))
    backend, why = choose(CurrentScaling(), GEMMS, "cuda")
    assert backend.name == "torchao" and why == "torchao: native"
    backend, why = choose(DelayedScaling(), GEMMS, "cuda")
    assert backend.name == "reference"
    assert "emulated, since" in why and "no delayed" in why and "Transformer Engine is not installed" in why


def test_too_old_a_gpu_emulates_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch, (8, 0))
    backend, why = choose(CurrentScaling(), GEMMS, "cuda")
    assert backend.name == "reference" and "NVIDIA Test has compute capability 8.0, and current needs 8.9" in why
    with pytest.raises(ValueError, match=r"compute capability 8\.0"):
        plan(nn.Sequential(nn.Linear(32, 32)), policy(backend="torchao"), hardware="cuda")


def test_no_driver_is_said() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a driver here")
    with pytest.raises(ValueError, match="no CUDA driver"):
        plan(nn.Sequential(nn.Linear(32, 32)), policy(backend="torchao"), hardware="cuda")


def test_rocm_is_refused_by_the_names_of_its_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch, (9, 4))
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert "e4m3fnuz" in str(base.native_obstacle(CurrentScaling(), "cuda"))


@pytest.mark.parametrize(
    ("recipe", "small", "large"),
    [(CurrentScaling(), (1024, 4096), (2048, 1024)), (RowwiseScaling(), (2048, 8192), (8192, 2048))],
    ids=["current", "rowwise"],
)
def test_layers_too_small_to_gain_stay_in_bf16_on_a_gpu_unless_named(
    monkeypatch: pytest.MonkeyPatch, recipe: Recipe, small: tuple[int, int], large: tuple[int, int]
) -> None:
    Gpu(monkeypatch, (9, 0))
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(inner, outer) for outer, inner in (small, large)))
    rules = [Rule("type:Linear", compute="fp8", recipe=recipe)]
    routes = plan(model, PrecisionPolicy("bf16", rules=rules), hardware="cuda")
    assert routes["0"].reason.startswith("shape: ") and "too small to be faster" in routes["0"].reason
    assert [routes[name].compute for name in "01"] == ["bf16", "fp8"]
    named = [*rules, Rule("0", compute="fp8", recipe=recipe)]
    assert plan(model, PrecisionPolicy("bf16", rules=named), hardware="cuda")["0"].compute == "fp8"


def test_a_te_module_is_left_to_transformer_engine() -> None:
    theirs = type("Linear", (nn.Module,), {"__module__": "transformer_engine.pytorch.module.linear"})
    model = nn.Sequential(theirs(), nn.Linear(32, 32))
    routes = plan(model, PrecisionPolicy("fp8"))
    assert "Transformer Engine's own" in routes["0"].reason and routes["1"].compute == "fp8"


def test_a_backend_belongs_to_fp8() -> None:
    with pytest.raises(ValueError, match=r"backend='torchao' of rule 'a'.*setting of FP8"):
        Rule("a", compute="bf16", backend="torchao")
    with pytest.raises(ValueError, match="backend of rule 'a' must be one of"):
        Rule("a", compute="fp8", backend="cutlass")  # type: ignore[arg-type]
    assert Rule("a", compute="fp8", backend="torchao") == Rule(**{"match": "a", "compute": "fp8", "backend": "torchao"})
