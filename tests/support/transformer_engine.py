"""Transformer Engine's Python over emulated kernels: the wheel as NVIDIA ships it, on a machine without a GPU.

The wheel ``transformer-engine`` holds all the Python and no binary. ``install_stand_in`` puts a module in the binary's
place whose few kernels are emulated in PyTorch (FP8 GEMMs by ``torch._scaled_mm``), and answers for a GPU of compute
capability 9.0. What such a GPU refuses is refused, and what is not emulated raises. What this can show: what Transformer
Engine's own Python does with modules, recipes, scales and process groups. What it cannot: anything about NVIDIA's kernels.

It changes functions of torch and of Transformer Engine for the whole process. Hence ``run_in_transformer_engine``, which
runs a test's function in processes of its own. The scales of delayed scaling need no emulation: Transformer Engine can
compute them in Python too, and is told to (``NVTE_UNFUSED_FP8_UPDATE``).
"""

from __future__ import annotations
import __future__

import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import os
import sys
import textwrap
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support import transformer_engine_kernels as kernels
from tests.support.ranks import run_on_ranks

VERSION = "2.20.2"
FOLDER = Path(sys.prefix) / "transformer-engine"
MISSING = "" if FOLDER.is_dir() else "the wheel transformer-engine is not installed; `make setup` installs it"

CAPABILITY = (9, 0)
"""The compute capability answered for: Hopper, which multiplies FP8 as ``left @ right.T`` alone."""

# Its modules import these, for parts that are not used here.
_ABSENT = ("triton", "triton.language", "triton.language.core", "triton.language.standard", "onnx", "onnxscript")

# Every function that is replaced or edited, with a hash of its source: what the change relies on is what was read.
_BASE = "transformer_engine.pytorch.module.base:TransformerEngineBaseModule"
_RANDOM = ("transformer_engine.pytorch.distributed", "transformer_engine.pytorch.module.layernorm_mlp")
_SOURCES = {
    "transformer_engine.common:load_framework_extension": "d77851d1e15095bb",
    f"{_BASE}.__init__": "143c6c88590f1b5d",
    f"{_BASE}.prepare_forward": "b2b50c2e45b510af",
    "transformer_engine.pytorch.utils:_empty_tensor": "022897d9483d5bc2",
    "transformer_engine.pytorch.quantization:_compute_fp8_block_scaling_support": "46f15f7491a25880",
    "transformer_engine.pytorch.quantization:DelayedScalingRecipeState.__init__": "ef9811eed73e2061",
    "transformer_engine.pytorch.quantization:FP8GlobalStateManager.reduce_and_update_fp8_tensors": "36a01ab16d6c2319",
    **{f"{module}:_get_cuda_rng_state": "03a1987529c0904e" for module in _RANDOM},
    **{f"{module}:_set_cuda_rng_state": "698c6b35692fd374" for module in _RANDOM},
}


class StandInOutdated(RuntimeError):
    """The installed Transformer Engine is not the one that the stand-in was written for."""


def run_in_transformer_engine(function: Callable[..., Any], *args: Any, ranks: int = 1) -> Any:
    """Calls ``function(*args)`` where ``import transformer_engine.pytorch`` works, on CPU.

    Args:
        function: At the top level of a module. The module is imported after the stand-in is in place.
        args: Picklable.
        ranks: Number of gloo ranks, each a process of its own. A single one has a process group too, of one.

    Returns:
        What ``function`` returned; with more than one rank, a list of it by rank. It must be picklable without
        Transformer Engine.

    Raises:
        RanksFailed: With the output of every rank, where one raised, died or hung.
    """
    results = run_on_ranks(_call, ranks, _address(function), args)
    return results if ranks > 1 else results[0]


def check_in_transformer_engine(*checks: Callable[[], Any]) -> dict[str, str]:
    """Calls functions one after the other in one process, which is much faster than a process for each.

    Before each, Transformer Engine forgets its global state and the random state is seeded.

    Returns:
        The tracebacks of those that raised, by name.
    """
    failures: dict[str, str] = run_in_transformer_engine(_check_all, *[_address(check) for check in checks])
    return failures


def _check_all(*addresses: tuple[str, str]) -> dict[str, str]:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    failures = {}
    for address in addresses:
        FP8GlobalStateManager.reset()
        torch.manual_seed(0)
        try:
            _found(address)()
        except Exception:
            failures[address[1]] = traceback.format_exc()
    return failures


def _call(address: tuple[str, str], args: tuple[Any, ...]) -> Any:
    install_stand_in()
    return _found(address)(*args)


def _address(function: Callable[..., Any]) -> tuple[str, str]:
    return function.__module__, function.__qualname__


def _found(address: tuple[str, str]) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(address[0]), address[1])
    return function


def install_stand_in() -> None:
    """Makes ``transformer_engine.pytorch`` importable in this process, over emulated kernels on CPU.

    To be called before anything imports it. A second call does nothing.

    Raises:
        StandInOutdated: If another version is installed, or a function that is changed has another source.
    """
    if MISSING:
        raise RuntimeError(MISSING)
    if "transformer_engine_torch" in sys.modules:
        return
    sys.path.append(str(FOLDER))
    if (found := importlib.metadata.version("transformer_engine")) != VERSION:
        raise StandInOutdated(f"transformer-engine {found} is installed; the stand-in was written for {VERSION}.")
    os.environ |= {
        "NVTE_PROJECT_BUILDING": "1",  # asks for no CUDA libraries
        "NVTE_FRAMEWORK": "none",  # says nothing of the binary that is not there
        "NVTE_TORCH_COMPILE": "0",
        "NVTE_UNFUSED_FP8_UPDATE": "1",
    }
    # These look for triton when they are first imported, and must not find what stands in for it.
    for name in ("torch._dynamo", "torch.utils.flop_counter", "torch._inductor.utils"):
        importlib.import_module(name)
    absent = {name: _Absent(name) for name in _ABSENT}
    absent["triton"].__version__ = "0"
    sys.modules.update(absent)
    _answer_for_a_gpu()
    import transformer_engine.common  # its own import of the PyTorch part comes to nothing, and tells nobody

    _replace(
        "transformer_engine.common:load_framework_extension",
        lambda framework: sys.modules.update(transformer_engine_torch=_kernels()),
    )
    import transformer_engine.pytorch  # noqa: F401

    for name in absent:  # nobody else is to find them
        del sys.modules[name]
    _edit(f"{_BASE}.__init__", "if not torch.cuda.is_available():", "if False:")
    _edit(f"{_BASE}.prepare_forward", "if not inp.is_cuda:", "if False:")
    _edit("transformer_engine.pytorch.utils:_empty_tensor", "torch.Tensor().cuda()", "torch.Tensor()")
    quantization = "transformer_engine.pytorch.quantization"
    _edit(f"{quantization}:DelayedScalingRecipeState.__init__", 'torch.device("cuda")', 'torch.device("cpu")')
    _edit(f"{quantization}:_compute_fp8_block_scaling_support", "float(torch.version.cuda)", "12.8")  # there is none
    verify_source(f"{quantization}:FP8GlobalStateManager.reduce_and_update_fp8_tensors")
    for module in _RANDOM:  # there is no GPU whose random state a checkpoint could keep
        _replace(f"{module}:_get_cuda_rng_state", lambda **_: torch.empty(0))
        _replace(f"{module}:_set_cuda_rng_state", lambda state, **_: None)


def _answer_for_a_gpu() -> None:
    """Answers of torch that Transformer Engine asks for. ``torch.cuda.is_available()`` stays False for everyone else."""
    major, minor = CAPABILITY
    properties = types.SimpleNamespace(major=major, minor=minor, multi_processor_count=1)
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.get_device_capability = lambda device=None: CAPABILITY
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    # It asks for the autocast of the GPU, which is the default; here the layers run under that of the CPU.
    enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    torch.is_autocast_enabled = lambda device="cuda": enabled("cpu" if device == "cuda" else device)
    torch.get_autocast_dtype = lambda device: dtype("cpu" if device == "cuda" else device)


def _owner(path: str) -> tuple[Any, str]:
    module, _, names = path.partition(":")
    *owners, name = names.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module)), name


def verify_source(path: str) -> str:
    """The source of a function, if it is the one that the stand-in was written for."""
    owner, name = _owner(path)
    source = inspect.getsource(getattr(owner, name))
    if (found := hashlib.sha256(source.encode()).hexdigest()[:16]) != _SOURCES[path]:
        raise StandInOutdated(f"{path} has another source ({found}) than the one that the stand-in was written for.")
    return source


def _replace(path: str, function: Callable[..., Any]) -> None:
    verify_source(path)
    setattr(*_owner(path), function)


def _edit(path: str, old: str, new: str) -> None:
    """Changes one place of a function's source, for everyone who holds the function."""
    source = textwrap.dedent(verify_source(path))
    if source.count(old) != 1:
        raise StandInOutdated(f"{path} has {source.count(old)} times {old!r}, not once.")
    owner, name = _owner(path)
    function = inspect.unwrap(getattr(owner, name))
    # Inside a function with this variable, as super() without arguments needs it; on its own lines of its own file.
    around = "\n" * (function.__code__.co_firstlineno - 2) + "def around(__class__):\n"
    text = f"{around}{textwrap.indent(source.replace(old, new), '    ')}\n    return {name}\n"
    names: dict[str, Any] = {}
    exec(
        compile(text, inspect.getfile(function), "exec", __future__.annotations.compiler_flag),
        function.__globals__,
        names,
    )
    function.__code__ = inspect.unwrap(names["around"](None)).__code__


def _kernels() -> types.ModuleType:
    """The binary's module: what is emulated, and every other name for its own sake."""
    module = _Absent("transformer_engine_torch")
    for name in ("DType", "FP8FwdTensors", "FP8BwdTensors", "NVTE_Fused_Attn_Backend"):
        setattr(module, name, getattr(kernels, name))
    names = (
        "quantize",
        "bgrad_quantize",
        "fp8_transpose",
        "generic_gemm",
        "layernorm_fwd",
        "layernorm_bwd",
        "relu",
        "drelu",
    )
    for name in names:
        setattr(module, name, kernels.out_of_sight(getattr(kernels, name)))
    for name in ("rmsnorm_fwd", "rmsnorm_bwd"):  # looked for beside layernorm's by what imports all names from it
        setattr(module, name, getattr(module, name))
    return module


class _Absent(types.ModuleType):
    """A module or anything in one that is needed for its name alone: as an annotation, a default or a decorator."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")

    def __int__(self) -> int:
        return 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.__name__.startswith("transformer_engine_torch"):
            raise NotImplementedError(f"{self.__name__} is not emulated.")
        return _Absent(self.__name__)
