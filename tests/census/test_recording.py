"""What is seen of a step: module by module, forward and backward, compiled, recomputed, and without changing a number."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_amp_plus import AmpPrecision, PrecisionPolicy, Rule
from lightning_amp_plus.callbacks import DtypeCensus
from lightning_amp_plus.census import Census
from lightning_amp_plus.census.recording import Recorder
from lightning_amp_plus.fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, RowwiseScaling
from lightning_amp_plus.integration.watched_step import watch_step
from tests.support.training import loader, make_trainer, same, weights

WIDTH = 32


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.dropout(self.up(x).relu())


class Model(L.LightningModule):
    """Two blocks; ``call`` says how a block is called."""

    def __init__(self, block: Callable[[], nn.Module] = Block, call: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.embed = nn.Linear(4, WIDTH)
            self.blocks = nn.ModuleList(block() for _ in range(2))
            self.head = nn.Linear(WIDTH, 1)
        self.call = call or (lambda module, x: module(x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self(batch), batch.sum(-1, keepdim=True))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def batches(count: int = 3) -> list[Tensor]:
    return list(torch.randn(count, 2, 16, 4, generator=torch.Generator().manual_seed(0)))


def fitted(model: L.LightningModule, policy: PrecisionPolicy | str = "bf16-mixed", watch: bool = True) -> Any:
    """The census, and the weights at the end."""
    callback = DtypeCensus()
    torch.manual_seed(5)
    trainer = make_trainer(AmpPrecision(policy), callbacks=[callback] if watch else [])
    trainer.fit(model, loader(batches()))
    return callback.last, weights(model)


def census_of(model: L.LightningModule, policy: PrecisionPolicy | str = "bf16-mixed") -> Census:
    found, _ = fitted(model, policy)
    assert isinstance(found, Census)
    return found


def columns(census: Census, module: str, *names: str) -> tuple[str, ...]:
    return tuple(census.modules[module][name] for name in names)


def backward_of(census: Census) -> set[tuple[str, str, str]]:
    return {(op.module, op.op, op.dtypes) for op in census.ops if op.phase == "backward"}


@pytest.mark.parametrize(
    ("policy", "compute", "stored"),
    [
        ("32-true", "fp32", "fp32"),
        ("16-mixed", "fp16", "fp32"),
        ("bf16-mixed", "bf16", "fp32"),
        ("bf16-true", "bf16", "bf16"),
        ("16-true", "fp16", "fp16"),
    ],
)
def test_every_module_is_as_planned(policy, compute, stored):
    census = census_of(Model(), policy)
    assert census.as_planned == len(census.modules) == 18 and not census.flags, str(census)
    assert columns(census, "blocks.1.up", "input", "weight", "output") == (compute,) * 3
    assert columns(census, "blocks.1.up", "parameter", "gradient", "optimizer") == (stored,) * 3
    assert columns(census, "blocks.1.up", "accumulator", "reduction") == ("fp32 measured", "-")


@dataclass
class State:
    x: Tensor


class Stateful(Block):
    def forward(self, state: Any) -> Any:
        return State(super().forward(state.x))


def test_what_modules_hand_on_in_a_dataclass_is_seen():
    census = census_of(Model(Stateful, lambda block, x: block(State(x)).x))
    assert columns(census, "blocks.0", "input", "output") == columns(census_of(Model()), "blocks.0", "input", "output")
    assert "-" not in columns(census, "blocks.0", "input", "output")


def test_operations_of_functions_are_listed_with_their_module_and_dtype():
    ops = {(op.kind, op.module, op.phase): op.dtypes for op in census_of(Model()).ops}
    assert ops["attention", "blocks.0.attention", "forward"].startswith("bf16 -> bf16")
    assert ops["attention", "blocks.1.attention", "backward"].endswith("-> bf16")
    assert ops["loss", "", "forward"] == "fp32 -> fp32"
    assert ops["norm", "blocks.0.norm", "forward"] == "bf16+fp32 -> bf16+fp32"  # its weight is FP32
    assert ("gemm", "blocks.0.up", "forward") in ops and ("in place", "(optimizer)", "optimizer") in ops


RECOMPUTED = [partial(checkpoint, use_reentrant=False), partial(checkpoint, use_reentrant=True)]


@pytest.mark.parametrize("call", RECOMPUTED, ids=["non-reentrant", "reentrant"])
def test_recomputation_changes_no_blame(call):
    plain, recomputed = census_of(Model()), census_of(Model(call=call))
    assert recomputed.modules == plain.modules
    assert backward_of(recomputed) == backward_of(plain)
    assert not recomputed.flags


@pytest.mark.parametrize("call", [None, *RECOMPUTED], ids=["plain", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("policy", ["16-mixed", "bf16-mixed", "fp8-mixed", "bf16-true"])
def test_the_look_changes_no_number(policy, call):
    _, bare = fitted(Model(call=call), policy, watch=False)
    _, watched = fitted(Model(call=call), policy)
    assert same(bare, watched)


@pytest.mark.parametrize("recipe", [CurrentScaling(), DelayedScaling(), RowwiseScaling(), BlockScaling(), MXScaling()])
@pytest.mark.parametrize("backend", ["reference", "torchao"])
def test_fp8_gemms_say_their_formats(recipe, backend):
    if backend == "torchao" and not isinstance(recipe, (CurrentScaling, RowwiseScaling)):
        pytest.skip("torchao does not have the recipe")
    rules = [Rule("blocks.*.up", compute="fp8", recipe=recipe, backend=backend)]
    census = census_of(Model(), PrecisionPolicy("bf16", rules=rules))
    assert columns(census, "blocks.0.up", "input", "weight", "output", "accumulator") == (
        *("e4m3", "e4m3", "bf16", "fp32 assumed"),
    )
    gemms = [op for op in census.ops if op.kind == "gemm" and op.module == "blocks.0.up"]
    assert {op.phase for op in gemms} == {"forward", "backward"} and all(" x " in op.dtypes for op in gemms)
    assert all("emulated" in op.op for op in gemms) == (backend == "reference")
    assert not census.flags, str(census)


def test_a_gemm_left_in_bf16_by_the_rule_is_no_flag():
    rules = [Rule("blocks.*.up", compute="fp8", gemms=("fprop", "dgrad"))]
    census = census_of(Model(), PrecisionPolicy("bf16", rules=rules))
    found = {
        op.dtypes for op in census.ops if op.module == "blocks.0.up" and op.phase == "backward" and op.kind == "gemm"
    }
    assert "bf16 -> bf16" in found and "e5m2 x e4m3 -> bf16" in found
    assert not census.flags


def test_a_meta_device_is_watched_without_a_look_at_a_number():
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1)).to("meta")
    optimizer = torch.optim.AdamW(model.parameters(), fused=False, foreach=False, capturable=False)
    recorder = Recorder({name: module for name, module in model.named_modules()})
    x = torch.randn(2, 4, device="meta")
    parts = SimpleNamespace(
        training_step=lambda: model(x).sum(), backward=lambda loss: loss.backward(), optimizer_step=optimizer.step
    )
    end = watch_step(parts, recorder, [optimizer])
    parts.backward(parts.training_step())
    recorder.see_gradients()
    parts.optimizer_step()
    end()
    recorder.see_rest([optimizer])
    assert recorder.record.stepped
    assert recorder.record.columns["0"]["weight"] == recorder.record.columns["2"]["optimizer"] == {"fp32"}
    assert not model[0]._forward_hooks and vars(parts).keys() == {"training_step", "backward", "optimizer_step"}


def test_flex_attention_runs_and_is_listed():
    from torch.nn.attention.flex_attention import flex_attention

    class Flexible(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            q = self.embed(batch)[:, None].detach()
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it is slow where it is not compiled
                flex_attention(q, q, q)
            return loss

    assert not census_of(Flexible()).flags


# ---------------------------------------------------------------- what is flagged


class Odd(Block):
    """A block whose ``odd`` computes something in FP32, 16 bits or twice."""

    def __init__(self, odd: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.odd = Wrapped(odd)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.odd(self.up(x))


class Wrapped(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("table", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def outside_autocast(module: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return nn.functional.linear(x.float(), torch.eye(WIDTH))


def in_autocast(module: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return nn.functional.linear(x, torch.eye(WIDTH))


def own_norm(module: Any, x: Tensor) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def twice(module: Any, x: Tensor) -> Tensor:
    return x.float().to(torch.bfloat16)


FLAGGED = {
    "autocast off": (outside_autocast, "bf16-mixed", "off route", "addmm|mm"),
    "autocast on": (in_autocast, "32-true", "off route", "addmm|mm"),
    "a norm by hand": (own_norm, "bf16-mixed", "fp32 island", "mul"),
    "an fp32 parameter": (lambda module, x: x * module.scale, "bf16-mixed", "fp32 island", "mul"),
    "an fp32 buffer": (lambda module, x: x + module.table, "bf16-mixed", "fp32 island", "add"),
    "two casts": (twice, "bf16-mixed", "double cast", "_to_copy"),
    "a cast down": (lambda module, x: x.half().float(), "32-true", "cast against route", "_to_copy"),
    "a long sum": (lambda module, x: x.repeat(1, 300, 1).sum(1, keepdim=True), "bf16-true", "16-bit reduction", "sum"),
    "a long softmax": (
        lambda module, x: x.repeat(1, 1, 200).softmax(-1)[..., :WIDTH],
        *("bf16-true", "16-bit reduction", "softmax"),
    ),
}


@pytest.mark.parametrize("case", FLAGGED)
def test_what_costs_digits_is_flagged_with_module_op_and_remedy(case):
    odd, policy, kind, op = FLAGGED[case]
    census = census_of(Model(block=partial(Odd, odd)), policy)
    mine = [flag for flag in census.flags if flag.module == "blocks.0.odd"]
    assert kind in {flag.kind for flag in mine}, str(census)
    [flag] = [flag for flag in mine if flag.kind == kind][:1]
    assert any(part in flag.op for part in op.split("|")) and flag.found and flag.remedy
    assert {flag.module for flag in census.flags} == {"blocks.0.odd", "blocks.1.odd"}, str(census)


FINE = {
    "a softmax in fp32": lambda module, x: x.float().softmax(-1).to(x.dtype),
    "torch's own softmax": lambda module, x: x.softmax(-1),
    "a sum": lambda module, x: x + x.sum(-1, keepdim=True),
    "in place": lambda module, x: x.clone().mul_(2.0),
    "an out": lambda module, x: x + torch.add(x.detach(), 1.0, out=torch.empty_like(x)),
}


@pytest.mark.parametrize("case", FINE)
def test_what_is_usual_is_not_flagged(case):
    assert not census_of(Model(block=partial(Odd, FINE[case]))).flags


def test_what_was_written_to_between_two_casts_was_not_cast_twice():
    census = census_of(Model(block=partial(Odd, lambda module, x: x.float().add_(1.0).to(x.dtype))))
    assert {flag.kind for flag in census.flags} == {"fp32 island"}


def test_in_place_and_out_are_listed():
    def both(module: Any, x: Tensor) -> Tensor:
        return x + torch.add(x.detach(), 1.0, out=torch.empty_like(x)).mul_(2.0)

    ops = {op.op: op.dtypes for op in census_of(Model(block=partial(Odd, both))).ops if op.module == "blocks.1.odd"}
    assert ops["aten.add.out"] == ops["aten.mul_.Tensor"] == "bf16 -> bf16"


def test_a_route_into_fp32_ends_the_flag():
    model = Model(block=partial(Odd, own_norm))
    rules = [Rule("blocks.*.odd", compute="fp32")]
    assert [flag.kind for flag in census_of(model, PrecisionPolicy("bf16", rules=rules)).flags] in ([], ["double cast"])


class Zoo(L.LightningModule):
    """Many of torch's layers, losses among them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, groups=4), nn.GroupNorm(4, 16), nn.SiLU(), nn.ConvTranspose2d(16, 8, 2),
            nn.InstanceNorm2d(8, affine=True), nn.Upsample(scale_factor=2, mode="bilinear"), nn.AdaptiveAvgPool2d(4),
            nn.PReLU(), nn.Flatten(2), nn.Linear(16, WIDTH),
        )  # fmt: skip
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout, batch_first=True)
        self.lstm, self.gru = nn.LSTM(WIDTH, 16, bidirectional=True), nn.GRUCell(WIDTH, WIDTH)
        self.norm, self.words, self.pair = nn.RMSNorm(WIDTH), nn.Embedding(4, WIDTH), nn.Bilinear(WIDTH, WIDTH, WIDTH)
        self.last = nn.Sequential(nn.GELU(), nn.Softplus(), nn.Dropout(0.1), nn.Linear(WIDTH, 5))
        self.losses = nn.ModuleList([nn.MSELoss(), nn.BCEWithLogitsLoss(), nn.SmoothL1Loss()])
        self.entropy, self.softmax = nn.CrossEntropyLoss(), nn.Softmax(-1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.image(batch)
        x = self.layer(x + self.attention(x, x, x, need_weights=False)[0])
        x, _ = self.lstm(x)
        h = self.norm(self.gru(x[:, 0], x[:, 1])) + self.words(torch.arange(4))
        y = self.last(self.pair(h, h))
        zeros = torch.zeros_like(y)
        total = sum(loss(y, zeros) for loss in self.losses) + self.softmax(y).sum()
        return total + self.entropy(y, torch.zeros(4, dtype=torch.long)) + nn.functional.normalize(h, dim=-1).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), eps=1e-4)


def zoo(policy: Any, dropout: float) -> Census:
    callback = DtypeCensus()
    scale = {"loss_scale": 8.0} if str(policy).startswith("16") else {}
    trainer = make_trainer(AmpPrecision(policy, **scale), callbacks=[callback])
    trainer.fit(Zoo(dropout), loader([torch.randn(4, 3, 16, 16)]))
    assert callback.last is not None
    return callback.last


MASTERS = PrecisionPolicy("bf16", params="bf16", master_weights=True)


@pytest.mark.parametrize("policy", ["32-true", "16-mixed", "bf16-mixed", "bf16-true", "16-true", MASTERS])
def test_torchs_own_layers_run_as_planned(policy):
    census = zoo(policy, 0.0)
    assert not census.flags, str(census)


def test_attention_without_a_fused_kernel_is_an_fp32_island_of_torchs():
    flags = zoo("bf16-mixed", 0.1).flags
    assert {(flag.kind, flag.module) for flag in flags} == {
        ("off route", "attention"),
        ("off route", "layer.self_attn"),
    }
    assert all("fused kernels" in flag.remedy for flag in flags)


# ---------------------------------------------------------------- compiled models


def test_compiled_blocks_stay_compiled_and_are_seen_by_their_gemms():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = Model()
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True)
    census = census_of(model)
    watched = counter.frame_count
    torch._dynamo.reset()
    counter.frame_count = 0
    bare = Model()
    for block in bare.blocks:
        block.compile(backend=counter, fullgraph=True)
    _, weights_without = fitted(bare, watch=False)
    assert watched == counter.frame_count
    assert same(weights(model), weights_without)
    assert columns(census, "blocks.0.up", "parameter", "gradient", "optimizer") == ("fp32",) * 3
    assert columns(census, "embed", "input", "weight", "output") == ("bf16",) * 3
    assert any("are compiled" in note for note in census.notes)
    assert not census.flags


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_watched_and_none_of_it_stays_in_its_graph(backend):
    torch._dynamo.reset()
    model = Model()
    compiled = torch.compile(model, backend=backend)
    callback = DtypeCensus()
    make_trainer(AmpPrecision("bf16-mixed"), callbacks=[callback]).fit(compiled, loader(batches()))
    assert callback.last is not None and callback.last.as_planned == 18
    assert {op.dtypes for op in callback.last.ops if op.kind == "gemm"} == {"bf16 -> bf16"}


def test_a_function_that_the_model_compiles_for_itself_keeps_its_graph():
    torch._dynamo.reset()
    seen: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(len(graph.graph.nodes))
        return graph

    call = torch.compile(lambda block, x: block(x), backend=backend, fullgraph=True)
    census = census_of(Model(call=call))
    assert columns(census, "blocks.0.up", "parameter", "gradient") == ("fp32", "fp32")
    assert seen and len(set(seen)) <= 2
