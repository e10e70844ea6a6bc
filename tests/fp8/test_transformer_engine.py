"""Backend ``transformer_engine``: Transformer Engine's Python over emulated kernels, in processes of their own."""

from __future__ import annotations

import contextlib
import copy
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_amp_plus import AmpPrecision, IncompatiblePrecisionError, PrecisionPolicy, Rule, plan
from lightning_amp_plus.callbacks import DtypeCensus
from lightning_amp_plus.fp8 import CurrentScaling, DelayedScaling, Recipe, activation_checkpoint
from lightning_amp_plus.fp8.fit.watch import FitWatch
from tests.distributed.test_fp8_over_ranks import train
from tests.fp8.test_training import Regressor, batches
from tests.support.fp8_contract import CONTRACT, error, grads, layer, routed, run, tokens
from tests.support.training import ResumableLoader, make_trainer, same, weights
from tests.support.transformer_engine import MISSING, run_in_transformer_engine

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

NAME = "transformer_engine"
DELAYED = DelayedScaling(history=4)


def as_if_on_a_gpu() -> Any:
    """Makes the backend available on a CPU; returns its module, which is imported after the stand-in is in place."""
    from lightning_amp_plus.fp8.backends import transformer_engine

    transformer_engine.native_obstacle = lambda *_: None  # type: ignore[assignment]
    return transformer_engine


def policy(recipe: Recipe = DELAYED, **arguments: Any) -> PrecisionPolicy:
    return PrecisionPolicy("bf16", rules=[Rule("body.*", compute="fp8", recipe=recipe, backend=NAME)], **arguments)


def fit(model: Regressor, count: int = 6, plugin: Any = None, ckpt: Any = None, **arguments: Any) -> Any:
    trainer = make_trainer(plugin or AmpPrecision(policy()), max_epochs=-1, max_steps=count, **arguments)
    trainer.fit(model, ResumableLoader(batches()), ckpt_path=ckpt)
    return trainer


def histories(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    engines = as_if_on_a_gpu().delayed_engines(model.named_modules())
    return {name: engine.histories() for name, engine in engines.items()}


def run_checks(*names: str) -> dict[str, str]:
    as_if_on_a_gpu()
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    failures = {}
    for name in names:
        FP8GlobalStateManager.reset()
        try:
            CHECKS[name]()
        except Exception:
            failures[name] = traceback.format_exc()
    return failures


# -------------------------------------------------------------------- what is checked there


def the_contract_under_current_scaling() -> None:
    for check in CONTRACT.values():
        check(NAME, CurrentScaling())


def it_agrees_with_the_reference() -> None:
    for recipe in (CurrentScaling(), CurrentScaling(power_of_two=True)):
        theirs, ours = (run(routed(layer(), name, recipe), tokens(), grads()) for name in (NAME, "reference"))
        for mine, reference in zip(theirs, ours, strict=True):
            assert error(mine, reference) < (2e-3 if recipe.power_of_two else 8e-3)


def it_trains_and_advances_once_a_micro_batch() -> None:
    model, plugin = Regressor(), AmpPrecision(policy())
    ran: list[bool] = []
    trainer = fit(model, 2, plugin, accumulate_grad_batches=2)
    assert plugin.plan is not None and plugin.plan["body.0"].reason.endswith("transformer_engine: as the rule says")
    for past, scales in histories(model).values():
        # Four micro-batches, of which the oldest has left: Transformer Engine keeps a place for what is being noted.
        assert (past > 0).sum(dim=1).tolist() == [3, 3, 3] and not past[:, 3].any() and (scales != 1).all()
    inputs = [batch.abs().max() for batch in batches()[:4]]
    assert torch.allclose(histories(model)["body.0"][0][0, :3], torch.stack(inputs[:0:-1]), rtol=0.01)
    assert trainer.callback_metrics is not None and not ran
    learned = Regressor()
    fit(learned, 60)
    assert sum(learned.losses[-10:]) < 0.5 * sum(learned.losses[:10])


def the_layers_really_run_in_fp8() -> None:
    model = Regressor()
    ran: list[bool] = []

    class Watched(Regressor):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            ran.append(as_if_on_a_gpu().engine_of(self.body[0])._layer.fp8)
            return loss

    model = Watched()
    fit(model, 3)
    assert ran == [True] * 3
    assert list(model.state_dict()) == list(Regressor().state_dict())
    assert {type(value) for value in model.state_dict().values()} == {Tensor}


def a_resume_goes_on_bit_for_bit(folder: Path | None = None) -> None:
    with tempfile.TemporaryDirectory() as directory:
        whole = Regressor()
        fit(whole, 9)
        wanted = histories(whole)  # now, since later runs advance them too: theirs advances all that it has ever seen
        first = Regressor()
        fit(first, 4).save_checkpoint(Path(directory, "a.ckpt"))
        saved = torch.load(Path(directory, "a.ckpt"), weights_only=True)["lightning_amp_plus"]
        assert saved["fp8"]["amax_clock"] == "micro_batch"
        assert saved["fp8_histories"]["body.0"].shape == (3, 4) and saved["fp8_scales"]["body.0"].shape == (3,)
        second = Regressor()
        fit(second, 9, ckpt=Path(directory, "a.ckpt"))
        assert first.losses + second.losses == whole.losses and same(weights(second), weights(whole))
        kept = histories(second)
        assert all(torch.equal(a, b) for name in wanted for a, b in zip(kept[name], wanted[name], strict=True))


def evaluation_touches_no_history() -> None:
    model, plugin = Regressor(), AmpPrecision(policy(fp8_in_evaluation=True))
    trainer = fit(model, 3, plugin)
    before = histories(model)
    trainer.validate(model, ResumableLoader([batch * 100 for batch in batches(3)]), verbose=False)
    after = histories(model)
    assert all(torch.equal(a, b) for name in before for a, b in zip(before[name], after[name], strict=True))


def what_is_not_finite_skips_the_window() -> None:
    plugin, model = AmpPrecision(policy()), Regressor(spoil=2)
    fit(model, 6, plugin)
    assert plugin.history.skipped == 1 and all(value.isfinite().all() for value in model.parameters())
    assert all(scales.isfinite().all() for _, scales in histories(model).values())


def torch_checkpoint_is_refused_and_ours_advances_once() -> None:
    class Checkpointed(Regressor):
        through: Any = None

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            out = batch if self.through is None else self.through(self.body, batch.requires_grad_())
            out = self.body(batch) if self.through is None else out
            return nn.functional.mse_loss(self.head(out).float(), batch.sum(1, keepdim=True).detach())

    plain = Checkpointed()
    fit(plain, 3)
    wanted = histories(plain)
    model = Checkpointed()
    model.through = activation_checkpoint
    fit(model, 3)
    found = histories(model)
    assert same(weights(model), weights(plain))
    assert all(torch.equal(a, b) for name in wanted for a, b in zip(found[name], wanted[name], strict=True))
    for reentrant in (True, False):
        refused = Checkpointed()
        refused.through = lambda f, x, reentrant=reentrant: checkpoint(f, x, use_reentrant=reentrant)
        with pytest.raises(RuntimeError, match="activation_checkpoint"):
            fit(refused, 3)


def every_layer_gets_the_group() -> None:
    group = dist.new_group([0])
    model = Regressor()
    fit(model, 2, AmpPrecision(policy(), process_group=group))
    engines = as_if_on_a_gpu().delayed_engines(model.named_modules())
    assert len(engines) == 2 and all(engine.group is group for engine in engines.values())


def outside_of_a_step_it_is_refused() -> None:
    import transformer_engine.pytorch as te

    model = routed(layer(), NAME, DELAYED)
    with pytest.raises(RuntimeError, match="nobody says when"):
        model(tokens())
    with te.autocast(enabled=True):
        model(tokens()).float().sum().backward()


def a_users_own_te_layer_is_not_drawn_into_fp8() -> None:
    import transformer_engine.pytorch as te

    class Mixed(Regressor):
        def __init__(self) -> None:
            super().__init__()
            self.theirs = te.Linear(16, 16, device="cpu")
            self.in_fp8: list[bool] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            out = self.theirs(batch)
            self.in_fp8.append(self.theirs.fp8)
            return super().training_step(batch, batch_idx) + 0 * out.float().sum()

    model = Mixed()
    fit(model, 2)
    assert model.in_fp8 == [False, False]


def copies_have_engines_of_their_own() -> None:
    import transformer_engine.pytorch as te

    model: Any = nn.Sequential(nn.Linear(64, 64))
    plan(model, PrecisionPolicy("bf16", rules=[Rule("0", compute="fp8", recipe=DELAYED, backend=NAME)])).apply(model)
    for _ in range(2):
        with te.autocast(enabled=True):
            model(tokens()).float().sum().backward()
    twin = copy.deepcopy(model)
    before = histories(model)["0"]
    for a, b in zip(histories(twin)["0"], before, strict=True):
        assert torch.equal(a, b)
    with te.autocast(enabled=True):
        twin(10 * tokens())
    assert (histories(model)["0"][0] <= before[0].max()).all()  # theirs advances all that it knows, by what each noted


def another_backend_s_histories_go_on_where_that_is_allowed() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "a.ckpt")
        rules = [Rule("body.*", compute="fp8", recipe=DELAYED, backend="reference")]
        fit(Regressor(), 4, AmpPrecision(PrecisionPolicy("bf16", rules=rules))).save_checkpoint(path)
        saved = torch.load(path, weights_only=True)["lightning_amp_plus"]["fp8_histories"]
        with pytest.raises(IncompatiblePrecisionError, match="fp8_clock"):
            fit(Regressor(), 6, ckpt=path)
        for steps in (4, 5):
            model = Regressor()
            fit(model, steps, AmpPrecision(policy(), allow=["fp8_clock"]), ckpt=path)
            for name, (past, scales) in histories(model).items():
                if steps == 4:
                    exact = torch.tensor([448.0, 448.0, 57344.0]) / saved[name].amax(dim=1)
                    assert torch.equal(past, saved[name]) and torch.allclose(scales, exact)
                else:  # one step on; theirs has the place of the oldest for what will be noted
                    assert torch.equal(past[:, 1:3], saved[name][:, :2]) and not past[:, 3].any()


def a_search_for_a_learning_rate_leaves_no_history() -> None:
    from lightning.pytorch.tuner import Tuner

    class Searched(Regressor):
        lr = 3e-3

    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        model = Searched()
        trainer = make_trainer(AmpPrecision(policy()), max_epochs=-1, max_steps=4)
        Tuner(trainer).lr_find(model, ResumableLoader(batches()), num_training=10, update_attr=False)
    assert not histories(model)["body.0"]


def a_forward_without_gradients_between_steps_leaves_no_trace() -> None:
    class Looked(Regressor):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            with torch.no_grad():
                self.body(1000 * batch)

    looked, plain = Looked(), Regressor()
    fit(looked, 4)
    wanted = histories(looked)
    fit(plain, 4)
    assert looked.losses == plain.losses
    assert all(torch.equal(a, b) for a, b in zip(wanted["body.0"], histories(plain)["body.0"], strict=True))


def the_census_says_what_it_ran_in() -> None:
    for recipe in (DELAYED, CurrentScaling()):
        census = DtypeCensus()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*dtypes differ")
            fit(Regressor(), 2, AmpPrecision(policy(recipe)), callbacks=[census])
        assert census.last is not None
        for name, row in census.last.modules.items():
            if row["compute"] == "fp8":
                assert (row["input"], row["weight"], row["output"]) == ("e4m3", "e4m3", "bf16"), (name, row)
        assert any(row["compute"] == "fp8" for row in census.last.modules.values())
        assert not census.last.flags, str(census.last)


def fits_are_measured_with_the_scale_in_force() -> None:
    backend, model = as_if_on_a_gpu(), routed(layer(), NAME, DELAYED)
    engine, watch = backend.engine_of(model), FitWatch({"layer": model}, torch.device("cpu"))
    assert engine is not None and engine.scale_in_force("input") is None  # nothing ran yet
    for size, saturates in ((1.0, False), (1.0, False), (100.0, True)):
        _, scales = engine.histories() or (None, torch.ones(3))
        watch.begin()
        with backend.region([engine], None):
            output = model(size * tokens())
        output.backward(grads().to(output.dtype))
        watch.end()
        fits = watch.fits(watch.numbers()).own["layer"]
        assert [fits[operand].scale for operand in ("input", "weight", "grad_output")] == scales.tolist()
        assert (fits["input"].saturation > 0.5) == saturates and fits["input"].updates is None
        assert fits["input"].amax == (size * tokens()).bfloat16().abs().max().item()
    assert scales.min() > 10  # it did advance


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        the_contract_under_current_scaling,
        it_agrees_with_the_reference,
        it_trains_and_advances_once_a_micro_batch,
        the_layers_really_run_in_fp8,
        a_resume_goes_on_bit_for_bit,
        evaluation_touches_no_history,
        what_is_not_finite_skips_the_window,
        torch_checkpoint_is_refused_and_ours_advances_once,
        every_layer_gets_the_group,
        outside_of_a_step_it_is_refused,
        a_users_own_te_layer_is_not_drawn_into_fp8,
        copies_have_engines_of_their_own,
        another_backend_s_histories_go_on_where_that_is_allowed,
        a_search_for_a_learning_rate_leaves_no_history,
        a_forward_without_gradients_between_steps_leaves_no_trace,
        the_census_says_what_it_ran_in,
        fits_are_measured_with_the_scale_in_force,
    )
}


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    found: dict[str, str] = run_in_transformer_engine(run_checks, *CHECKS)
    return found


@pytest.mark.parametrize("check", CHECKS)
def test_over_emulated_kernels(failures: dict[str, str], check: str) -> None:
    assert check not in failures, failures[check]


def histories_of_rank() -> tuple[dict[str, tuple[Tensor, Tensor]], list[float]]:
    as_if_on_a_gpu()
    mine = [pair[dist.get_rank()] for pair in (batch.chunk(2) for batch in batches(4))]
    model = Regressor()
    trainer = make_trainer(AmpPrecision(policy()), strategy="ddp", devices=2, max_epochs=1)
    trainer.fit(model, ResumableLoader(mine))
    return histories(model), [batch.abs().max().item() for batch in batches(4)]


def sharded_and_replicated() -> list[dict[str, Any]]:
    as_if_on_a_gpu()
    rules = [Rule("net.[02]", compute="fp8", recipe=DELAYED, backend=NAME)]
    return [train(sharded, PrecisionPolicy("bf16", rules=rules)) for sharded in (True, False)]


def test_fsdp2_and_ddp_train_the_same_model_over_emulated_kernels() -> None:
    for sharded, replicated in run_in_transformer_engine(sharded_and_replicated, ranks=2):
        assert sharded["fp8"] == replicated["fp8"] == ["net.0", "net.2"]
        for name, weight in replicated["weights"].items():
            assert torch.allclose(sharded["weights"][name], weight, rtol=2e-3, atol=2e-3), name


def test_two_ranks_share_amax_values_over_emulated_kernels() -> None:
    (first, amax), (second, _) = run_in_transformer_engine(histories_of_rank, ranks=2)
    for name in first:
        assert all(torch.equal(a, b) for a, b in zip(first[name], second[name], strict=True))
    assert torch.allclose(first["body.0"][0][0, :3], torch.tensor(amax[:0:-1]), rtol=0.01)
