"""FP8 where only a GPU can show it. Skipped where there is none that has FP8; sized for two minutes of one GPU."""

from __future__ import annotations

import statistics
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn

from lightning_amp_plus import AmpPrecision, PrecisionPolicy, Rule, plan
from lightning_amp_plus.formats import E4M3
from lightning_amp_plus.fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, Recipe, RowwiseScaling
from lightning_amp_plus.fp8.backends import BACKENDS, choose
from lightning_amp_plus.fp8.delayed import histories_of
from lightning_amp_plus.fp8.quantize import quantize
from lightning_amp_plus.fp8.recipes import GEMMS
from lightning_amp_plus.fp8.reference import multiply, prepare
from tests.support.fp8_contract import CONTRACT, error, grads, layer, normal, routed, run, tokens
from tests.support.training import loader, make_trainer


def why_not() -> str:
    if not torch.cuda.is_available():
        return "needs a CUDA GPU; this machine has none"
    if torch.cuda.get_device_capability() < (8, 9):
        return f"needs a GPU of compute capability 8.9; found {torch.cuda.get_device_name()}"
    return ""


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not()), reason=why_not())]


def needs(backend: str, recipe: Recipe) -> None:
    """Skips a test where the backend cannot compute so here."""
    obstacle = BACKENDS[backend].obstacle(recipe, GEMMS, "cuda")
    if obstacle is not None:
        pytest.skip(str(obstacle))


def identify(value: Any) -> str:
    return value if isinstance(value, str) else value.name + ("-2" if getattr(value, "power_of_two", False) else "")


# -------------------------------------------------------------------- numbers

NATIVE: list[tuple[str, Recipe]] = [
    *(("torchao", recipe) for recipe in (CurrentScaling(), CurrentScaling(power_of_two=True), RowwiseScaling())),
    *(("transformer_engine", recipe) for recipe in (CurrentScaling(), CurrentScaling(power_of_two=True))),
]
EMULATED: list[tuple[str, Recipe]] = [
    *(("reference", recipe) for recipe in (CurrentScaling(), RowwiseScaling(), BlockScaling(), MXScaling())),
    ("reference", DelayedScaling(history=4)),
]


@pytest.mark.parametrize("check", CONTRACT)
@pytest.mark.parametrize(("backend", "recipe"), [*EMULATED, *NATIVE], ids=identify)
def test_contract(backend: str, recipe: Recipe, check: str) -> None:
    needs(backend, recipe)
    with torch.device("cuda"):
        CONTRACT[check](backend, recipe)


@pytest.mark.parametrize(("backend", "recipe"), EMULATED, ids=identify)
def test_the_reference_computes_what_it_computes_on_a_cpu(backend: str, recipe: Recipe) -> None:
    there = run(routed(layer(), backend, recipe), tokens(), grads())
    with torch.device("cuda"):
        here = run(routed(layer(), backend, recipe), tokens(), grads())
    for mine, theirs in zip(here, there, strict=True):
        assert error(mine.cpu(), theirs) < 4e-3  # the order of summation, and a last bit of a scale now and then


@pytest.mark.parametrize(("backend", "recipe"), NATIVE, ids=identify)
def test_a_native_backend_agrees_with_the_reference(backend: str, recipe: Recipe) -> None:
    needs(backend, recipe)
    with torch.device("cuda"):
        found, wanted = (run(routed(layer(), name, recipe), tokens(), grads()) for name in (backend, "reference"))
    for mine, reference in zip(found, wanted, strict=True):
        # torchao adds up the output fast, which gives up digits on Hopper.
        assert error(mine, reference) < (8e-3 if recipe.power_of_two_scales else 0.015)


def test_power_of_two_scales_give_what_the_tensor_cores_give() -> None:
    recipe = CurrentScaling(power_of_two=True)
    with torch.device("cuda"):
        x, w = normal(64, 256, seed=1).bfloat16(), normal(128, 256, seed=2)
    ours = multiply(prepare(x, "input", recipe), prepare(w, "weight", recipe), "fprop")
    left, right = (quantize(t, E4M3, power_of_two=True) for t in (x, w))
    theirs = torch._scaled_mm(
        left.values.to(torch.float8_e4m3fn),
        right.values.to(torch.float8_e4m3fn).t(),
        scale_a=left.scale_inv.reshape(()),
        scale_b=right.scale_inv.reshape(()),
        out_dtype=torch.bfloat16,
    )
    assert error(theirs, ours) < 2**-8


# -------------------------------------------------------------------- the choice


def test_the_choice_is_a_native_backend() -> None:
    needs("torchao", CurrentScaling())
    backend, why = choose(CurrentScaling(), GEMMS, "cuda")
    assert backend.name == "torchao" and not backend.emulated and why == "torchao: native"


def test_layers_that_are_large_enough_get_it_and_others_say_why_not() -> None:
    needs("torchao", CurrentScaling())
    if torch.cuda.get_device_capability() >= MXScaling.capability:
        pytest.skip("fp8-mixed means MX on this GPU")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(256, 2048), nn.Linear(256, 256))
    routes = plan(model, "fp8-mixed", hardware="cuda")
    assert routes["0"].fp8 is not None and routes["0"].fp8.backend == "torchao"
    assert routes["1"].compute == "bf16" and "too small" in routes["1"].reason


# -------------------------------------------------------------------- training


class Net(L.LightningModule):
    """Two layers for FP8 and a head; its losses stay on the device until asked for."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 64))
            self.head = nn.Linear(64, 1)
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.head(self.body(batch)).float(), batch.sum(1, keepdim=True) / 8)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, fused=True)


def batches(count: int = 60) -> list[Tensor]:
    return list(torch.randn(count, 64, 64, generator=torch.Generator().manual_seed(1)))


def fit(plugin: AmpPrecision, model: Net | None = None, count: int = 60, **arguments: Any) -> Net:
    model = model or Net()
    make_trainer(plugin, accelerator="gpu", **arguments).fit(model, loader(batches(count)))
    return model


def policy(backend: Any, recipe: Recipe) -> PrecisionPolicy:
    names = ("body.0", "body.2")  # by name, since layers this small would stay in BF16
    return PrecisionPolicy("bf16", rules=[Rule(n, compute="fp8", recipe=recipe, backend=backend) for n in names])


@pytest.mark.parametrize(
    ("backend", "recipe"),
    [*EMULATED, *NATIVE, ("transformer_engine", DelayedScaling(history=4))],
    ids=identify,
)
def test_it_learns_as_bf16_does(backend: str, recipe: Recipe) -> None:
    needs(backend, recipe)
    plugin = AmpPrecision(policy(backend, recipe))
    losses, in_bf16 = (torch.stack(fit(p).losses).tolist() for p in (plugin, AmpPrecision("bf16-mixed")))
    assert plugin.plan is not None and plugin.history.skipped == 0
    assert {r.fp8.backend for n in ("body.0", "body.2") if (r := plugin.plan[n]).fp8 is not None} == {backend}
    assert statistics.fmean(losses[-10:]) < 0.5 * losses[0]
    assert statistics.fmean(losses[-10:]) == pytest.approx(statistics.fmean(in_bf16[-10:]), rel=0.2, abs=0.01)
    assert losses != in_bf16


def test_fp8_mixed_trains_in_what_was_chosen() -> None:
    plugin = AmpPrecision("fp8-mixed")
    model = fit(plugin, Net(width=2048), 20)
    assert plugin.plan is not None and plugin.plan["body.0"].compute == "fp8"
    assert plugin.plan["head"].compute == "bf16" and plugin.plan["head"].fp8 is None
    losses = torch.stack(model.losses)
    assert bool(losses.isfinite().all()) and losses[-5:].mean() < losses[0]


class NoWait(L.Callback):
    """From the sixth step on, between its first and its last hook, whatever waits for the device raises."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx >= 5:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("backend", "recipe"),
    [("reference", DelayedScaling(history=8)), ("reference", CurrentScaling()), ("torchao", CurrentScaling())],
    ids=identify,
)
@pytest.mark.parametrize("check_finite", [True, False])
def test_a_step_never_waits_for_the_device(backend: str, recipe: Recipe, check_finite: bool) -> None:
    needs(backend, recipe)
    plugin = AmpPrecision(policy(backend, recipe), check_finite=check_finite)
    try:
        fit(plugin, count=12, callbacks=[NoWait()], log_every_n_steps=1000)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert plugin.applied_steps == 12


def test_delayed_histories_live_on_the_device_and_fill_once_a_window() -> None:
    model = fit(AmpPrecision(policy("reference", DelayedScaling(history=8))), count=12, accumulate_grad_batches=2)
    [history] = histories_of(model.modules())
    assert history.noted().device.type == history._past.device.type == history._scales.device.type == "cuda"
    for past in history.state_dict().values():
        assert past.device.type == "cpu" and (past > 0).sum(dim=1).tolist() == [6, 6, 6]


def test_what_never_runs_costs_no_wait_either() -> None:
    class Unused(Net):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(64, 64)

    recipe = DelayedScaling(history=8)
    rules = [Rule(name, compute="fp8", recipe=recipe, backend="reference") for name in ("body.0", "spare")]
    try:
        model = fit(AmpPrecision(PrecisionPolicy("bf16", rules=rules)), Unused(), 12, callbacks=[NoWait()])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    [history] = histories_of(model.modules())
    assert not history.state_dict()["spare"].any()
