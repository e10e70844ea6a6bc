"""What a module's main operation really computes in, found out by running it on tiny constant tensors.

Autocast decides operation by operation, and differently from device to device and release to release, so
`routing.plan` asks the machine instead of a list. A probe needs no weight of the model (it works for meta devices),
draws no random number and is remembered for each (class, formats, device).
"""

import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp_plus.casts import DTYPES, dtype_name
from lightning_amp_plus.routed import base_class

UNKNOWN = "-"
AS_GIVEN = "as given"


class Region(NamedTuple):
    """The circumstances that a module computes in.

    Attributes:
        autocast: Format of the surrounding autocast, None where there is none.
        given: Formats that floating inputs may arrive in.
        weight: Format that parameters are handed to the operation in, before autocast.
        device_type: Where it runs.
    """

    autocast: str | None
    given: tuple[str, ...]
    weight: str
    device_type: str


class Probe(NamedTuple):
    """Formats of one operation: ``as given`` where they follow the input, ``-`` where nothing could be measured.

    Attributes:
        input: What the operation reads its input in, after autocast's casts.
        weight: The same for its weight.
        output: What the module returns.
        accumulator: What a GEMM sums in; ``-`` for other operations.
        error: Why the operation cannot run at all in this region; empty if it can.
    """

    input: str = UNKNOWN
    weight: str = UNKNOWN
    output: str = UNKNOWN
    accumulator: str = UNKNOWN
    error: str = ""


class _Sample(NamedTuple):
    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    gemm: bool = True


# How to build the smallest instance of each class that holds parameters, and the shapes that it takes. These are shapes
# only: what autocast makes of the operation is measured. GEMMs get three input features, which the accumulator needs.
_SAMPLES: dict[type[nn.Module], _Sample] = {
    nn.Linear: _Sample(lambda: nn.Linear(3, 1, bias=False, device="meta"), ((6, 3),)),
    nn.Bilinear: _Sample(lambda: nn.Bilinear(3, 1, 1, bias=False, device="meta"), ((6, 3), (6, 1))),
    nn.Conv1d: _Sample(lambda: nn.Conv1d(3, 1, 1, bias=False, device="meta"), ((6, 3, 1),)),
    nn.Conv2d: _Sample(lambda: nn.Conv2d(3, 1, 1, bias=False, device="meta"), ((6, 3, 1, 1),)),
    nn.Conv3d: _Sample(lambda: nn.Conv3d(3, 1, 1, bias=False, device="meta"), ((6, 3, 1, 1, 1),)),
    nn.ConvTranspose1d: _Sample(lambda: nn.ConvTranspose1d(3, 1, 1, bias=False, device="meta"), ((6, 3, 1),)),
    nn.ConvTranspose2d: _Sample(lambda: nn.ConvTranspose2d(3, 1, 1, bias=False, device="meta"), ((6, 3, 1, 1),)),
    nn.ConvTranspose3d: _Sample(lambda: nn.ConvTranspose3d(3, 1, 1, bias=False, device="meta"), ((6, 3, 1, 1, 1),)),
    nn.MultiheadAttention: _Sample(lambda: nn.MultiheadAttention(1, 1, device="meta"), ((1, 1, 1),) * 3, gemm=False),
    nn.RNN: _Sample(lambda: nn.RNN(1, 1, device="meta"), ((1, 1, 1),), gemm=False),
    nn.LSTM: _Sample(lambda: nn.LSTM(1, 1, device="meta"), ((1, 1, 1),), gemm=False),
    nn.GRU: _Sample(lambda: nn.GRU(1, 1, device="meta"), ((1, 1, 1),), gemm=False),
    nn.RNNCell: _Sample(lambda: nn.RNNCell(1, 1, device="meta"), ((1, 1),), gemm=False),
    nn.LSTMCell: _Sample(lambda: nn.LSTMCell(1, 1, device="meta"), ((1, 1),), gemm=False),
    nn.GRUCell: _Sample(lambda: nn.GRUCell(1, 1, device="meta"), ((1, 1),), gemm=False),
    nn.LayerNorm: _Sample(lambda: nn.LayerNorm(2, device="meta"), ((1, 2),), gemm=False),
    nn.RMSNorm: _Sample(lambda: nn.RMSNorm(2, device="meta"), ((1, 2),), gemm=False),
    nn.GroupNorm: _Sample(lambda: nn.GroupNorm(1, 1, device="meta"), ((1, 1, 2),), gemm=False),
    nn.BatchNorm1d: _Sample(lambda: nn.BatchNorm1d(1, device="meta"), ((2, 1),), gemm=False),
    nn.BatchNorm2d: _Sample(lambda: nn.BatchNorm2d(1, device="meta"), ((1, 1, 1, 2),), gemm=False),
    nn.BatchNorm3d: _Sample(lambda: nn.BatchNorm3d(1, device="meta"), ((1, 1, 1, 1, 2),), gemm=False),
    nn.InstanceNorm1d: _Sample(lambda: nn.InstanceNorm1d(1, True, device="meta"), ((1, 1, 2),), gemm=False),
    nn.InstanceNorm2d: _Sample(lambda: nn.InstanceNorm2d(1, True, device="meta"), ((1, 1, 1, 2),), gemm=False),
    nn.InstanceNorm3d: _Sample(lambda: nn.InstanceNorm3d(1, True, device="meta"), ((1, 1, 1, 1, 2),), gemm=False),
    nn.Embedding: _Sample(lambda: nn.Embedding(1, 1, device="meta"), ((1,),), gemm=False),
    nn.EmbeddingBag: _Sample(lambda: nn.EmbeddingBag(1, 1, device="meta"), ((1, 1),), gemm=False),
    nn.PReLU: _Sample(lambda: nn.PReLU(device="meta"), ((1, 1),), gemm=False),
}
_GEMM_INSIDE = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
_LEAF_SHAPES = ((2, 2, 2, 2), (2, 2, 2), (2, 2), (2,), (2, 2, 2, 2, 2), (1, 16, 32, 32))


def probe(module: nn.Module, region: Region) -> Probe:
    """Formats of the module's main operation in a region.

    Args:
        module: Any module; only its class, and for classes without parameters its settings, are looked at.
        region: Surroundings to run in.

    Returns:
        Measured formats. All ``-`` for containers, user-written modules and devices that are not present.
    """
    kind = _torch_class(module)
    if kind is None or not _present(region.device_type):
        return Probe()
    if kind not in _SAMPLES and any(True for _ in itertools.chain(module.children(), module.parameters())):
        return Probe()
    if (kind, region) not in _probed:
        sampled = kind in _SAMPLES
        _probed[kind, region] = _probe_sample(kind, region) if sampled else _probe_leaf(module, kind, region)
    return _probed[kind, region]


_probed: dict[tuple[type[nn.Module], Region], Probe] = {}


def _torch_class(module: nn.Module) -> type[nn.Module] | None:
    """The class of torch whose forward this module runs; None for a forward written elsewhere."""
    lineage: list[type[nn.Module]] = [cls for cls in base_class(module).__mro__ if issubclass(cls, nn.Module)]
    owner = next((cls for cls in lineage if "forward" in vars(cls)), nn.Module)
    if owner is nn.Module or not owner.__module__.startswith("torch.nn."):
        return None
    candidates = [cls for cls in lineage if issubclass(cls, owner)]
    sampled = next((cls for cls in candidates if cls in _SAMPLES), None)
    return sampled or next(cls for cls in candidates if cls.__module__.startswith("torch.nn."))


@functools.cache
def _present(device_type: str) -> bool:
    """Whether operations and autocast can be run on the device here."""
    if not torch.amp.is_autocast_available(device_type):
        return False
    try:
        torch.empty(1, device=device_type)
    except (RuntimeError, AssertionError):
        return False
    return True


def _probe_sample(kind: type[nn.Module], region: Region) -> Probe:
    sample = _SAMPLES[kind]

    def run(given: str) -> Probe:
        tiny = _materialize(sample.make(), region, 1.0).train(issubclass(kind, nn.MultiheadAttention))
        integer = issubclass(kind, (nn.Embedding, nn.EmbeddingBag))
        dtype = torch.int64 if integer else DTYPES[given]
        inputs = tuple(
            torch.full(shape, 0 if integer else 1, dtype=dtype, device=region.device_type) for shape in sample.shapes
        )
        return _watch(tiny, inputs)

    with _quiet(region):
        seen = _merge(run, region.given)
    if seen.error or not (sample.gemm or issubclass(kind, _GEMM_INSIDE)):
        return seen
    return seen._replace(
        accumulator=_accumulator(kind if sample.gemm else nn.Linear, region._replace(given=region.given[:1]))
    )


def _probe_leaf(module: nn.Module, kind: type[nn.Module], region: Region) -> Probe:
    try:
        tiny = kind() if any(True for _ in module.buffers()) else copy.copy(module)
    except TypeError:
        return Probe()
    tiny.training = False
    loss = kind.__module__ == "torch.nn.modules.loss"
    for shape in _LEAF_SHAPES:

        def run(given: str, shape: tuple[int, ...] = shape) -> Probe:
            value = torch.full(shape, 0.5, dtype=DTYPES[given], device=region.device_type)
            if not loss:
                return _watch(tiny, (value,))
            as_float = _watch(tiny, (value, value))
            if not as_float.error:
                return as_float
            return _watch(tiny, (value, torch.zeros(shape[:1], dtype=torch.int64, device=region.device_type)))

        with _quiet(region):
            seen = _merge(run, region.given)
        if not seen.error:
            return seen
    # Which shapes a module without parameters accepts is not known here, so a failure says nothing about formats.
    return Probe()


def _merge(run: Callable[[str], Probe], given: tuple[str, ...]) -> Probe:
    """One probe out of a run for each format the input may arrive in."""
    runs = [run(name) for name in given]
    good = [seen for seen in runs if not seen.error]
    if not good:
        return runs[0]
    return Probe(*(column[0] if len(set(column)) == 1 else AS_GIVEN for column in zip(*good, strict=True)))


def _materialize(module: nn.Module, region: Region, value: float) -> nn.Module:
    """Real constant parameters for a module built on the meta device, where initialization draws no random number."""
    module = module.to_empty(device=region.device_type)
    with torch.no_grad():
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            tensor.fill_(value)
    return module.to(DTYPES[region.weight])


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the tensors that operations get below autocast, and follows input and weight through casts and views."""

    def __init__(self, inputs: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.roles: dict[int, str] = {id(tensor): "input" for tensor in inputs} | {
            id(tensor): "weight" for tensor in weights
        }
        self.kept_alive: list[Any] = []
        self.first: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        arguments = list(_tensors((args, kwargs or {})))
        results = list(_tensors(result))
        self.kept_alive += arguments + results
        if func is torch.ops.aten._to_copy.default or func.is_view:
            role = self.roles.get(id(arguments[0]))
            if role is not None:
                self.roles.update((id(tensor), role) for tensor in results)
        else:
            for tensor in arguments:
                if id(tensor) in self.roles:
                    self.first.setdefault(self.roles[id(tensor)], dtype_name(tensor.dtype))
        return result


def _watch(module: nn.Module, inputs: tuple[Tensor, ...]) -> Probe:
    weights = tuple(parameter for parameter in module.parameters() if parameter.dim() > 0)
    try:
        with torch.no_grad(), _Watcher(inputs, weights) as watcher:
            result = module.forward(*inputs)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        return Probe(error=str(error).partition("\n")[0] or type(error).__name__)
    output = next(_tensors(result), None)
    return Probe(
        watcher.first.get("input", UNKNOWN),
        watcher.first.get("weight", UNKNOWN),
        UNKNOWN if output is None else dtype_name(output.dtype),
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _accumulator(kind: type[nn.Module], region: Region) -> str:
    """Format that a GEMM sums in, from the widest gap that it bridges.

    The sum 2^k + 1 - 2^k is exactly 1 only in an accumulator of more than k significant bits. The order of summation is
    the kernel's affair, so every order of the three terms is tried and all must come out right.
    """
    sample = _SAMPLES[kind]
    with _quiet(region):
        # The weights carry a factor of 2^12, so that terms up to 2^27 are formed from FP16 factors.
        tiny = _materialize(sample.make(), region, 2.0**12)
        bits = 0
        for exponent in range(0, 27):
            terms = (2.0 ** (exponent - 12), 2.0**-12, -(2.0 ** (exponent - 12)))
            rows = torch.tensor(list(itertools.permutations(terms)), device=region.device_type).to(
                DTYPES[region.given[0]]
            )
            inputs = [rows.reshape(sample.shapes[0])]
            inputs += [torch.ones(shape, dtype=rows.dtype, device=rows.device) for shape in sample.shapes[1:]]
            with torch.no_grad():
                sums = tiny.forward(*inputs)
            if not bool((sums == 1).all()):
                break
            bits = exponent + 1
    known = {8: "bf16", 11: "fp16", 24: "fp32", 27: "fp64"}
    return known.get(bits, f"{bits}-bit")


@contextmanager
def _quiet(region: Region) -> Iterator[None]:
    """Runs in the region's autocast, without warnings and with the random state put back."""
    devices = [] if region.device_type == "cpu" else [torch.accelerator.current_device_index()]
    with warnings.catch_warnings(), torch.random.fork_rng(devices, device_type=_rng_device(region.device_type)):
        warnings.simplefilter("ignore")
        dtype = None if region.autocast is None else DTYPES[region.autocast]
        with torch.autocast(region.device_type, dtype=dtype, enabled=dtype is not None, cache_enabled=False):
            yield


def _rng_device(device_type: str) -> str:
    return "cuda" if device_type == "cpu" else device_type
