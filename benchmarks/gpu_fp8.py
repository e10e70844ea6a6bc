"""FP8 on one Hopper GPU: is it right, which kernels run, how fast is it, does it train. Under five minutes, unattended.

- parity: the reference backend on the GPU against itself on the CPU and against FP64, other backends against it, and
  torch's FP8 GEMM of the operands that it quantized against its BF16 GEMM (bar: equal but for the order of summation)
- kernels: the GEMM kernels of one forward and backward by name, and whether they are FP8
- speed: time and memory of a Linear's forward and backward over BF16 eager
- training: the byte transformer of the examples in BF16 and FP8

torchao and Transformer Engine are used where they can be imported. Without a GPU of compute capability 8.9 it says so and
ends. Results are printed, and written to ``$OUT/gpu_fp8.json`` where OUT is set. The exit code is 1 if something failed or
is not right.

    PYTHONPATH=. python benchmarks/gpu_fp8.py
    PYTHONPATH=. python benchmarks/gpu_fp8.py --device cpu --tiny      # all parts that make sense there, in seconds
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from support.runs import quiet
from support.unattended import RIGHT, Part, all_well, do_part, run_parts
from torch import Tensor, nn

from lightning_amp_plus import AmpPrecision, PrecisionPolicy, Rule, plan
from lightning_amp_plus.formats import E4M3, E5M2
from lightning_amp_plus.fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, Recipe, RowwiseScaling
from lightning_amp_plus.fp8.backends import BACKENDS
from lightning_amp_plus.fp8.backends.transformer_engine import delayed_engines, region
from lightning_amp_plus.fp8.delayed import histories_of
from lightning_amp_plus.fp8.quantize import quantize
from lightning_amp_plus.fp8.recipes import GEMMS
from lightning_amp_plus.fp8.reference import multiply, prepare

CAPABILITY = (8, 9)
TENSORS = ("output", "input gradient", "weight gradient")


@dataclass(frozen=True)
class Sizes:
    """How large everything is.

    Attributes:
        layer: Tokens, in and out of the layer whose numbers are compared.
        layers: In and out of the layers that are timed, with ``tokens`` tokens.
        samples: Times that each is timed, ``repeat`` steps at once.
        text: Arguments of the byte transformer.
        batch: Windows in a batch of text.
        steps: Of training.
    """

    layer: tuple[int, int, int] = (512, 1024, 1536)
    layers: tuple[tuple[int, int], ...] = ((4096, 4096), (4096, 14336))
    tokens: int = 8192
    samples: int = 15
    repeat: int = 5
    text: tuple[tuple[str, Any], ...] = (
        ("width", 512),
        ("depth", 6),
        ("heads", 8),
        ("context", 256),
        ("learning_rate", 1e-3),
    )
    batch: int = 32
    steps: int = 300


TINY = Sizes(
    layer=(32, 64, 96),
    layers=((64, 64), (64, 96)),
    tokens=32,
    samples=3,
    repeat=1,
    text=(("width", 32), ("depth", 1), ("heads", 2), ("context", 32)),
    batch=4,
    steps=8,
)


@dataclass(frozen=True)
class Arm:
    """BF16, or a backend with a recipe."""

    backend: str
    recipe: Recipe | None = None

    @property
    def name(self) -> str:
        if self.recipe is None:
            return self.backend
        finer = ", powers of two" if isinstance(self.recipe, CurrentScaling) and self.recipe.power_of_two else ""
        return f"{self.backend}, {self.recipe.name}{finer}"


BF16 = Arm("bf16")
ARMS = [
    Arm("reference", CurrentScaling()),
    Arm("torchao", CurrentScaling()),
    Arm("transformer_engine", CurrentScaling()),
    Arm("torchao", RowwiseScaling()),
    Arm("transformer_engine", DelayedScaling(history=16)),
    Arm("reference", DelayedScaling(history=16)),
    Arm("transformer_engine", BlockScaling()),
    Arm("reference", RowwiseScaling()),
    Arm("reference", CurrentScaling(power_of_two=True)),
    Arm("torchao", CurrentScaling(power_of_two=True)),
    Arm("reference", BlockScaling()),
    Arm("reference", MXScaling()),
]
QUICK = 6  # so many of them, from the first that can run, are timed and trained
RESERVE = 20.0  # seconds that are kept for timing what has been compiled


def obstacle(arm: Arm, device: str) -> str | None:
    """Why an arm cannot run here, or ``None``."""
    if arm.recipe is None:
        return None
    try:
        found = BACKENDS[arm.backend].obstacle(arm.recipe, GEMMS, device)
    except Exception as error:  # a broken installation must not end the whole run
        return f"{type(error).__name__}: {error}"
    return None if found is None else str(found)


def arms_here(device: str) -> list[Arm]:
    return [arm for arm in ARMS if obstacle(arm, device) is None]


# -------------------------------------------------------------------- one layer


def normal(*shape: int, seed: int) -> Tensor:
    """The same numbers on every device: they are drawn on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Layer:
    """A Linear with its batch, as ``AmpPrecision`` would run it.

    Args:
        arm: What it computes with.
        device: Where.
        sizes: Tokens, in, out.
        compile: Whether by torch.compile.
    """

    def __init__(self, arm: Arm, device: str, sizes: tuple[int, int, int], compile: bool = False) -> None:
        tokens, inner, outer = sizes
        self.device = device
        self.model = nn.Sequential(nn.Linear(inner, outer))
        with torch.no_grad():
            self.model[0].weight.copy_(normal(outer, inner, seed=1) / inner**0.5)
            self.model[0].bias.copy_(normal(outer, seed=2))
        self.model.to(device)
        if arm.recipe is not None:
            # By name: a layer that a glob reaches stays in BF16 where FP8 would not be faster.
            rule = Rule("0", compute="fp8", recipe=arm.recipe, backend=arm.backend)
            plan(self.model, PrecisionPolicy("bf16", rules=[rule])).apply(self.model)
        self.histories = histories_of(self.model.modules())
        self.engines = delayed_engines(self.model.named_modules())
        self.x = normal(tokens, inner, seed=3).to(device, torch.bfloat16).requires_grad_()
        self.gradient = (normal(tokens, outer, seed=4) * 1e-3).to(device, torch.bfloat16)
        # aot_eager needs no compiler of C++, and there is nothing to win on a CPU here.
        backend = "aot_eager" if device == "cpu" else "inductor"
        self.call: Callable[[Tensor], Tensor] = torch.compile(self.model, backend=backend) if compile else self.model

    def step(self) -> Tensor:
        """Forward, backward and, under delayed scaling, the window's end; returns the output."""
        self.x.grad = self.model[0].weight.grad = self.model[0].bias.grad = None
        with (
            region(self.engines.values(), None),
            torch.autocast(self.device, torch.bfloat16, cache_enabled=False),
        ):
            y = self.call(self.x)
        y.backward(self.gradient)
        for history in self.histories:
            history.end_window(True, None)
        return y

    def tensors(self) -> list[Tensor]:
        """Output and both gradients of the second step: with delayed scaling the first one has no history."""
        self.step()
        y = self.step()
        assert self.x.grad is not None
        return [tensor.detach().clone() for tensor in (y, self.x.grad, self.model[0].weight.grad)]

    def exact(self) -> list[Tensor]:
        """The same in FP64."""
        layer, x, gradient = self.model[0], self.x.detach().double(), self.gradient.double()
        weight = layer.weight.detach().double()
        return [x @ weight.t() + layer.bias.detach().double(), gradient @ weight, gradient.t() @ x]


def error(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.cpu().double(), wanted.cpu().double()
    return float((found - wanted).norm() / wanted.norm())


def equal_share(found: Tensor, wanted: Tensor) -> float:
    return float((found.cpu() == wanted.cpu().to(found.dtype)).double().mean())


# -------------------------------------------------------------------- parity


def parity(part: Part, device: str, sizes: Sizes) -> None:
    found = part.table(
        "Relative error of a layer, by norm. 'Equal' is the share of elements with the same bits",
        *("arm", "tensor", "over FP64", "of BF16 over FP64", "over reference on CPU", "equal to it"),
        *("over reference here", "equal to it here", RIGHT),
    )
    exact = Layer(BF16, "cpu", sizes.layer).exact()
    in_bf16 = Layer(BF16, device, sizes.layer).tensors()
    for index, tensor in enumerate(TENSORS):
        found.add("bf16", tensor, error(in_bf16[index], exact[index]), *[None] * 6)
    references: dict[tuple[str, Recipe], list[Tensor]] = {}

    def reference(where: str, recipe: Recipe) -> list[Tensor]:
        if (where, recipe) not in references:
            references[where, recipe] = Layer(Arm("reference", recipe), where, sizes.layer).tensors()
        return references[where, recipe]

    for arm in arms_here(device):
        assert arm.recipe is not None
        with part.attempt(arm.name):
            mine = Layer(arm, device, sizes.layer).tensors()
            there, here = reference("cpu", arm.recipe), reference(device, arm.recipe)
            for index, tensor in enumerate(TENSORS):
                over_exact, base = error(mine[index], exact[index]), error(in_bf16[index], exact[index])
                over_here = error(mine[index], here[index])
                # An operand rounded to three bits is off by 2 to 7 %. Backends round the same numbers; where scales are
                # no powers of two, a few of them to a neighbor. Fast accumulation may cost some thousandths.
                right = base < over_exact < 0.09 and over_here < (0.01 if arm.recipe.power_of_two_scales else 0.02)
                on_cpu = error(mine[index], there[index]), equal_share(mine[index], there[index])
                equal_here = equal_share(mine[index], here[index])
                found.add(arm.name, tensor, over_exact, base, *on_cpu, over_here, equal_here, right)
    with part.attempt("torch's FP8 GEMM"):
        scaled_gemms(part, device, sizes.layer)


def scaled_gemms(part: Part, device: str, sizes: tuple[int, int, int]) -> None:
    """FP8 GEMMs of torch over operands that we quantized, against what the reference backend makes of them."""
    found = part.table(
        "torch._scaled_mm of the reference's operands against its BF16 GEMM (equal but for the order of summation)",
        *("scaling", "GEMM", "formats", "fast accumulation", "BF16 may reduce in BF16", "error", "equal", RIGHT),
    )
    tokens, inner, outer = sizes
    x, w = normal(tokens, inner, seed=3).bfloat16(), normal(outer, inner, seed=1) / inner**0.5
    g = (normal(tokens, outer, seed=4) * 1e-3).bfloat16()
    x, w, g = x.to(device), w.to(device), g.to(device)
    gemms = {"fprop": (x, w), "dgrad": (g, w.t()), "wgrad": (g.t(), x.t())}
    operands = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}
    for recipe in (CurrentScaling(power_of_two=True), RowwiseScaling()):
        granularity = recipe.granularity_of("input")
        for role, (left, right) in gemms.items():
            formats = [recipe.format_of(operand) for operand in operands[role]]  # type: ignore[arg-type]
            quantized = [
                quantize(side.contiguous(), format, granularity, power_of_two=True)
                for side, format in zip((left, right), formats, strict=True)
            ]
            first, second = (q.values.to(q.format.dtype) for q in quantized)
            scales = [q.scale_inv if granularity == "row" else q.scale_inv.reshape(()) for q in quantized]
            for reduces in (True, False):
                # On a GPU cuBLAS may add the parts of a split sum in BF16, unless it is told not to.
                with reduced_precision(reduces):
                    one, other = (prepare(t, o, recipe) for t, o in zip((left, right), operands[role], strict=True))  # type: ignore[arg-type]
                    ours = multiply(one, other, role)  # type: ignore[arg-type]
                for fast in (False, True):
                    what = f"{recipe.name} {role}{', fast' if fast else ''}"
                    with part.attempt(what):
                        theirs = torch._scaled_mm(
                            first,
                            second.t(),
                            scale_a=scales[0],
                            scale_b=scales[1].t().contiguous() if granularity == "row" else scales[1],
                            out_dtype=torch.bfloat16,
                            use_fast_accum=fast,
                        )
                        off, equal = error(theirs, ours), equal_share(theirs, ours)
                        names = " x ".join("E5M2" if format is E5M2 else E4M3.name for format in formats)
                        # Fast accumulation gives up digits, and nobody promises how many.
                        as_it_should_be = None if fast else off < 2**-8 and equal > 0.9
                        found.add(recipe.name, role, names, fast, reduces, off, equal, as_it_should_be)


@contextmanager
def reduced_precision(allowed: bool) -> Any:
    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = before


# -------------------------------------------------------------------- kernels

# What the names of GEMM kernels have in them: cuBLAS (nvjet is its newer family, xmma its older one), CUTLASS, Triton.
GEMM_NAME = re.compile(r"gemm|nvjet|xmma|cutlass|cublas|wgmma|_mm|matmul", re.IGNORECASE)
# Of these, the names of FP8 kernels: cuBLAS and CUTLASS spell the format out; nvjet has a letter for each operand, and q
# and r stand for the two FP8 formats. Taken from other people's traces, so a kernel that torch._scaled_mm launched is
# shown as well, whatever its name is.
FP8_NAME = re.compile(r"e4m3|e5m2|fp8|float8|scaled_mm|nvjet_(sm\d+_)?[qr]{2}", re.IGNORECASE)
# What has such words in its name without multiplying: torch.compile's fused kernels, those that add up a split sum.
NOT_A_GEMM = re.compile(r"triton_(poi|red|per|for)|at::native|splitKreduce|memcpy|memset", re.IGNORECASE)
_OPS = ("aten::mm", "aten::addmm", "aten::_scaled_mm")  # on a CPU, which has no kernels with names


def kernels(part: Part, device: str, sizes: Sizes) -> None:
    found = part.table(
        "GEMM kernels of one forward and backward", *("arm", "kernel", "calls", "FP8", "launched by _scaled_mm")
    )
    whole = part.table("FP8 among them", "arm", "GEMMs", "in FP8")
    inner, outer = sizes.layers[0]
    for arm in (BF16, *arms_here(device)):
        with part.attempt(arm.name):
            layer = Layer(arm, device, (sizes.tokens, inner, outer))
            for _ in range(3):
                layer.step()
            counts, scaled = traced(layer, device)
            gemms = {
                name: count
                for name, count in counts.items()
                if name in scaled or name in _OPS or (GEMM_NAME.search(name) and not NOT_A_GEMM.search(name))
            }
            for name, count in gemms.items():
                fp8 = name in scaled or bool(FP8_NAME.search(name))
                found.add(arm.name, name[:110], count, fp8, name in scaled)
            in_fp8 = sum(count for name, count in gemms.items() if name in scaled or FP8_NAME.search(name))
            whole.add(arm.name, sum(gemms.values()), in_fp8)
            part.data.setdefault("every kernel", {})[arm.name] = dict(counts.most_common())


def traced(layer: Layer, device: str) -> tuple[Counter[str], set[str]]:
    """How often each kernel ran in a step, and the names of those that ``_scaled_mm`` launched."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device != "cpu":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        layer.step()
        wait_for(device)
    events = list(profile.events() or [])
    if device == "cpu":
        return Counter(event.name for event in events if event.name in _OPS), {"aten::_scaled_mm"}
    counts = Counter(e.name for e in events if e.device_type == torch.autograd.DeviceType.CUDA)
    scaled = {kernel.name for event in events if "_scaled_mm" in event.name for kernel in event.kernels}
    return counts, {name for name in scaled if not NOT_A_GEMM.search(name)}


def wait_for(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


# -------------------------------------------------------------------- speed


def speed(part: Part, device: str, sizes: Sizes) -> None:
    found = part.table(
        f"Forward and backward of {sizes.tokens:,} tokens; median, the arms taking turns. Memory: what a step adds",
        *("layer", "arm", "mode", "ms", "over BF16 eager", "TFLOP/s", "MiB", "memory over BF16 eager", "graphs"),
    )
    config: Any = torch._dynamo.config
    for name, value in (("recompile_limit", 64), ("fail_on_recompile_limit_hit", True)):  # all arms share one forward
        if hasattr(config, name):
            setattr(config, name, value)
    quick = [BF16, *arms_here(device)[:QUICK]]
    base: dict[tuple[int, int], Layer] = {}
    for compile in (False, True):
        for shape in sizes.layers:
            layers: dict[str, Layer] = {}
            graphs: dict[str, int] = {}
            for arm in quick:
                what = f"{shape[0]} to {shape[1]}, {arm.name}{', compiled' if compile else ''}"
                if compile and arm.backend == "transformer_engine":
                    continue  # its modules break the graph
                if compile and part.left() < RESERVE:
                    print(f"{what}: left out, the time is short", flush=True)
                    continue
                with part.attempt(what):
                    before = graphs_so_far()
                    layer = Layer(arm, device, (sizes.tokens, *shape), compile)
                    for _ in range(3):
                        layer.step()
                    wait_for(device)
                    layers[arm.name], graphs[arm.name] = layer, graphs_so_far() - before
            base.setdefault(shape, layers.get(BF16.name) or Layer(BF16, device, (sizes.tokens, *shape)))
            with part.attempt(f"{shape[0]} to {shape[1]}, timing"):
                seconds = taking_turns({**layers, "": base[shape]}, device, sizes)
                memory = {name: extra_memory(layer, device) for name, layer in {**layers, "": base[shape]}.items()}
                for name in layers:
                    used, usual = memory[name], memory[""]
                    found.add(
                        f"{shape[0]} to {shape[1]}",
                        name,
                        "compiled" if compile else "eager",
                        seconds[name] * 1e3,
                        seconds[name] / seconds[""],
                        3 * 2 * sizes.tokens * shape[0] * shape[1] / seconds[name] / 1e12,
                        used,
                        used / usual if used and usual else None,
                        graphs[name] if compile else None,
                    )


def graphs_so_far() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def extra_memory(layer: Layer, device: str) -> float | None:
    """MiB that a step needs at its height over what lies there between steps, gradients not counted."""
    if device == "cpu":
        return None
    layer.x.grad = layer.model[0].weight.grad = layer.model[0].bias.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layer.step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def taking_turns(steps: dict[str, Layer], device: str, sizes: Sizes) -> dict[str, float]:
    """Median seconds of a step of each."""
    seconds: dict[str, list[float]] = {key: [] for key in steps}
    for turn in range(sizes.samples):
        for key in list(steps) if turn % 2 == 0 else list(steps)[::-1]:
            seconds[key].append(timed(steps[key], device, sizes.repeat))
    return {key: statistics.median(values) for key, values in seconds.items()}


def timed(layer: Layer, device: str, repeat: int) -> float:
    """Seconds of one step, from ``repeat`` of them: on a GPU the first waits for its kernels to be launched."""
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(repeat):
            layer.step()
        return (time.perf_counter() - start) / repeat
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    layer.step()
    begin.record()
    for _ in range(repeat):
        layer.step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeat


# -------------------------------------------------------------------- training


class Losses(L.Callback):
    """Every loss, left on the device until asked for."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach())


def training(part: Part, device: str, sizes: Sizes) -> None:
    found = part.table(
        f"The byte transformer, {sizes.steps} steps from the same start over the same batches",
        *("arm", "layers in FP8", "first loss", "loss of the last tenth", "over BF16", "skipped", "seconds", RIGHT),
    )
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    base = None
    for arm in (BF16, *arms_here(device)[:QUICK]):
        with part.attempt(arm.name):
            start = time.perf_counter()
            plugin, losses = train(arm, device, sizes)
            part.data.setdefault("losses", {})[arm.name] = losses
            last = statistics.fmean(losses[-max(1, sizes.steps // 10) :])
            base = last if arm is BF16 else base
            assert plugin.plan is not None
            count = sum(route.fp8 is not None for route in plugin.plan.routes)
            right = (
                base is not None and abs(last / base - 1) < 0.03 and last < losses[0] and plugin.history.skipped == 0
            )
            seconds = time.perf_counter() - start
            ratio = last / base if base else None
            found.add(arm.name, count, losses[0], last, ratio, plugin.history.skipped, seconds, right)


def train(arm: Arm, device: str, sizes: Sizes) -> tuple[AmpPrecision, list[float]]:
    from train_text import ByteTransformer, StandardLibrary

    text = dict(sizes.text)
    L.seed_everything(1, verbose=False)
    data = StandardLibrary(context=text["context"], batch_size=sizes.batch, validation_windows=sizes.batch)
    layers = ("attention.qkv", "attention.out", "mlp.0", "mlp.2")
    rules = [
        Rule(f"blocks.*.{layer}", compute="fp8", recipe=arm.recipe, backend=arm.backend)  # type: ignore[arg-type]
        for layer in layers
        if arm.recipe is not None
    ]
    plugin, losses = AmpPrecision(PrecisionPolicy("bf16", rules=rules)), Losses()
    trainer = L.Trainer(
        accelerator="cpu" if device == "cpu" else "gpu",
        devices=1,
        plugins=[plugin],
        max_steps=sizes.steps,
        max_epochs=-1,
        gradient_clip_val=1.0,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    trainer.fit(ByteTransformer(**text), data)
    return plugin, torch.stack(losses.losses).float().tolist()


# -------------------------------------------------------------------- the run

PARTS: dict[str, tuple[float, Callable[[Part, str, Sizes], None]]] = {
    "parity": (3, parity),
    "kernels": (3, kernels),
    "speed": (7, speed),
    "training": (6, training),
}


def why_not(device: str) -> str | None:
    """Why there is nothing to measure here, or ``None``."""
    if device == "cpu":
        return None
    if not torch.cuda.is_available():
        return "there is no CUDA device here (or no driver that sees it)"
    found = torch.cuda.get_device_capability()
    if found < CAPABILITY:
        have, need = (".".join(map(str, version)) for version in (found, CAPABILITY))
        return f"{torch.cuda.get_device_name()} has compute capability {have}; FP8 tensor cores begin with {need}"
    return None


def about(device: str) -> dict[str, Any]:
    """What the numbers were found on."""
    versions = {}
    for name in ("torch", "lightning", "torchao", "transformer-engine", "triton"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    gpu = {}
    if device != "cpu":
        properties = torch.cuda.get_device_properties(0)
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        gpu = {"gpu": properties.name, "memory": f"{properties.total_memory / 2**30:.0f} GiB", "capability": capability}
        gpu["cuda"] = str(torch.version.cuda)
    missing = {arm.name: why for arm in ARMS if (why := obstacle(arm, device)) is not None}
    return {"device": device, **gpu, "python": platform.python_version(), **versions, "cannot run": missing}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    parser.add_argument("--seconds", type=float, default=250.0, help="for all parts together (default: 250)")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    # For the processes that this one starts.
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device, sizes = arguments.device, TINY if arguments.tiny else Sizes()
    if arguments.part is not None:
        quiet()
        do_part(partial(PARTS[arguments.part][1], device=device, sizes=sizes), arguments.until, arguments.result)
        return 0
    reason = why_not(device)
    if reason is not None:
        print(f"gpu_fp8: nothing to measure: {reason}.")
        return 0
    machine = about(device)
    for name, value in machine.items():
        if name != "cannot run":
            print(f"{name}: {value}")
    for name, why in machine["cannot run"].items():
        print(f"left out: {name} ({why})")
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--device",
        device,
        *(["--tiny"] if arguments.tiny else []),
    ]
    shares = {name: PARTS[name][0] for name in arguments.parts}
    return 0 if all_well(run_parts("gpu_fp8", shares, arguments.seconds, command, machine)) else 1


if __name__ == "__main__":
    sys.exit(main())
