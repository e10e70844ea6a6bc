"""Backend ``transformer_engine``: delayed, current, block and MX scaling by NVIDIA's Transformer Engine, on its GPUs.

Transformer Engine has layers of its own. Here each of our layers holds one of those out of sight (it is no submodule, so no
name, no ``state_dict`` and no walk over the model knows of it), which is lent the layer's parameters for each call.

Under delayed scaling it is Transformer Engine that keeps histories and advances them: forward ones when the outermost
``te.autocast`` ends, backward ones in the backward of the first layer, so once a micro-batch, and those of layers that did
not run too. :func:`region` is that outermost context, entered around a training step.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_amp_plus.fp8.backends.base import (
    Backend,
    Forward,
    as_output,
    as_tokens,
    linear_in_bf16,
    native_obstacle,
)
from lightning_amp_plus.fp8.delayed import OPERANDS
from lightning_amp_plus.fp8.obstacle import Obstacle
from lightning_amp_plus.fp8.quantize import scale_of
from lightning_amp_plus.fp8.recipes import (
    GEMMS,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Gemm,
    MXScaling,
    Operand,
    Recipe,
    RowwiseScaling,
)

_ENGINE = "_amp_transformer_engine"  # a plain attribute of a module: its Engine
_FORWARD = ("input", "weight")  # order of a Linear's operands in Transformer Engine's forward state
_RECOMPUTE = (
    "A layer with delayed scaling by Transformer Engine was recomputed in backward by torch.utils.checkpoint, which knows "
    "nothing of amax histories and scales: they would advance twice, and the second computation would use other scales "
    "than the first. Use lightning_amp_plus.fp8.activation_checkpoint in its place, on a module or a bound method of "
    "one, or another recipe."
)
_NO_REGION = (
    "A layer with delayed scaling by Transformer Engine was trained outside of a training step, where nobody says when "
    "amax histories advance. Train with AmpPrecision in a Trainer, or enter transformer_engine.pytorch.autocast around the "
    "whole model."
)


class TransformerEngine(Backend):
    """NVIDIA's Transformer Engine."""

    name: ClassVar[str] = "transformer_engine"
    clock: ClassVar[str] = "micro_batch"

    def obstacle(self, recipe: Recipe, gemms: tuple[Gemm, ...], device_type: str) -> Obstacle | None:
        """Transformer Engine is missing or broken, lacks the recipe, or the GPU is too old for it."""
        if isinstance(recipe, RowwiseScaling):
            return Obstacle("backend", "Transformer Engine has no rowwise scaling")
        if gemms != GEMMS:
            which = "+".join(gemms)
            return Obstacle("backend", f"Transformer Engine cannot leave single GEMMs in BF16 (gemms={which})")
        if find_spec("transformer_engine") is None:
            return Obstacle("backend", "Transformer Engine is not installed (pip install transformer-engine[pytorch])")
        obstacle = native_obstacle(recipe, device_type)
        return obstacle or _why_not_importable() or _why_refused(recipe)

    def forward_of(self, recipe: Recipe, gemms: tuple[Gemm, ...]) -> Forward:
        """The forward of the layer that Transformer Engine has for it."""
        tile = recipe.multiple
        delayed = isinstance(recipe, DelayedScaling)

        def forward(module: Any, input: Tensor) -> Tensor:
            if not input.numel():
                return linear_in_bf16(input, module.weight, module.bias)
            engine = engine_of(module)
            assert engine is not None
            tokens = _spoil(as_tokens(input, tile), True)
            run = engine.run_delayed if delayed else engine.run
            return as_output(_spoil(run(module, tokens), False), input)

        return forward

    def prepare(self, module: nn.Module, recipe: Recipe) -> None:
        """Gives a module its engine; one with the same recipe goes on, with its histories."""
        engine = engine_of(module)
        if engine is None or engine.recipe != recipe:
            vars(module)[_ENGINE] = Engine(recipe)

    def release(self, module: nn.Module) -> None:
        """Takes the engine away."""
        vars(module).pop(_ENGINE, None)


def engine_of(module: nn.Module) -> Engine | None:
    """What Transformer Engine keeps for a module, if anything."""
    engine: Engine | None = vars(module).get(_ENGINE)
    return engine


def delayed_engines(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, Engine]:
    """The engines that keep amax histories, by the name of their module; a shared module counts once.

    Raises:
        ValueError: If two recipes differ only in what Transformer Engine does not tell apart.
    """
    found = {id(engine): (name, engine) for name, module in modules if (engine := engine_of(module)) is not None}
    engines = {name: engine for name, engine in found.values() if isinstance(engine.recipe, DelayedScaling)}
    recipes = {engine.recipe for engine in engines.values()}
    if len(recipes) != len({str(_recipe_of(recipe)) for recipe in recipes}):  # the key it knows them by
        raise ValueError(
            "Transformer Engine takes delayed scaling with amax='max' and with amax='most_recent' for one recipe where all "
            "else is equal, and would advance all layers by the one that ran last. Give them different history lengths, or "
            "the same amax."
        )
    return engines


@contextmanager
def region(engines: Iterable[Engine], group: Any) -> Generator[None, None, None]:
    """The step of one micro-batch: at its end Transformer Engine advances its forward histories.

    Args:
        engines: Those with delayed scaling. Without any, nothing is entered.
        group: Ranks that share amax values; ``None`` means all.
    """
    outer = None
    for outer in engines:
        outer.group = group  # of every one: layers of one recipe with another group advance apart
    if outer is None:
        yield
        return
    te = _te()
    # Off again inside: a user's own te layers must not find themselves in FP8 because ours are.
    with te.autocast(enabled=True, recipe=outer.theirs(), amax_reduction_group=group), te.autocast(enabled=False):
        yield


class Engine:
    """What Transformer Engine keeps for one of our layers.

    Args:
        recipe: How scales are chosen.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.group: Any = None
        self._layer: Any = None
        self._waiting: tuple[Tensor, Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy makes a layer of its own, with the histories of this one.
        return {"recipe": self.recipe, "group": None, "_layer": None, "_waiting": self.histories()}

    def theirs(self) -> Any:
        """The recipe in Transformer Engine's terms."""
        return _recipe_of(self.recipe)

    def run(self, module: Any, tokens: Tensor) -> Tensor:
        """``[tokens, in]`` to ``[tokens, out]``, without anything to remember."""
        # Not the outermost: the end of that would advance the histories of other layers.
        with _te().autocast(enabled=False):
            return self._call(module, tokens)

    def run_delayed(self, module: Any, tokens: Tensor) -> Tensor:
        """The same under delayed scaling.

        Raises:
            RuntimeError: In training outside of a step's region, or recomputed by torch's own checkpoint.
        """
        manager = _manager()
        outside = manager.quantization_state.autocast_depth == 0
        if not module.training or (outside and not torch.is_grad_enabled()):
            return self._run_without_trace(module, tokens)
        if torch._C._current_graph_task_id() != -1 and not _in_their_recompute():
            raise RuntimeError(_RECOMPUTE)
        if outside and not _in_their_recompute():
            raise RuntimeError(_NO_REGION)
        return self._call(module, tokens)

    def _run_without_trace(self, module: Any, tokens: Tensor) -> Tensor:
        """In evaluation, or without gradients outside of a step: what Transformer Engine notes is taken back."""
        self._layer_for(module)
        noted = self._states()[0].amax_history[0]
        before = noted.clone()
        try:
            return self.run(module, tokens)
        finally:
            noted.copy_(before)

    def _call(self, module: Any, tokens: Tensor) -> Tensor:
        layer, state = self._layer_for(module), _manager().quantization_state
        with (
            _te().autocast(enabled=True, recipe=self.theirs(), amax_reduction_group=self.group),
            torch.autocast(tokens.device.type, dtype=torch.bfloat16, cache_enabled=False),
        ):
            output: Tensor = layer(tokens)
            first = state.is_first_fp8_module
        # The end of an inner autocast puts back that the first layer is still to come. The next one would then be taken for
        # it, and backward histories would advance in the backward of every layer.
        state.is_first_fp8_module = first
        return output

    def _layer_for(self, module: Any) -> Any:
        te = _te()
        weight = module.weight  # once: making a parametrized one may have effects
        if self._layer is None:
            self._layer = te.Linear(
                module.in_features,
                module.out_features,
                bias=module.bias is not None,
                params_dtype=weight.dtype,
                device="meta",
            )
            if isinstance(self.recipe, DelayedScaling):
                self._begin(te)
        parameters = self._layer._parameters
        parameters["weight"] = weight
        if module.bias is not None:
            parameters["bias"] = module.bias
        return self._layer

    def _begin(self, te: Any) -> None:
        """Lets Transformer Engine allocate its state before the first forward, so that there is a place for histories."""
        with (
            te.autocast(enabled=False),
            te.autocast(enabled=True, recipe=self.theirs(), amax_reduction_group=self.group),
        ):
            self._layer.init_fp8_metadata(num_gemms=1)
        if self._waiting is not None:
            self.take_histories(*self._waiting)
            self._waiting = None

    @property
    def layer(self) -> Any:
        """Transformer Engine's own layer, which holds the parameters of the last call; ``None`` before the first."""
        return self._layer

    def _states(self) -> tuple[Any, Any]:
        meta = self._layer.fp8_meta
        return meta["scaling_fwd"], meta["scaling_bwd"]

    def scale_in_force(self, operand: Operand) -> Tensor | None:
        """A copy of the scale that delayed scaling multiplies an operand by just now, 0-dim FP32, on the device.

        ``None`` with other recipes, or where nothing was computed yet.
        """
        if self._layer is None or not isinstance(self.recipe, DelayedScaling):
            return None
        forward, backward = self._states()
        scale: Tensor = forward.scale[_FORWARD.index(operand)] if operand in _FORWARD else backward.scale[0]
        return scale.clone()

    def histories(self) -> tuple[Tensor, Tensor] | None:
        """Amax values ``[3, history]``, newest first, and the three scales; operands as in ``fp8.delayed``.

        ``None`` where nothing was computed yet.
        """
        if self._layer is None or not isinstance(self.recipe, DelayedScaling):
            return self._waiting
        forward, backward = self._states()
        past = torch.cat([forward.amax_history[:, : len(_FORWARD)], backward.amax_history[:, :1]], dim=1)
        scales = torch.cat([forward.scale[: len(_FORWARD)], backward.scale[:1]])
        # Theirs: row 0 is for what is being noted, behind it the oldest first. So the last of ours is empty between steps.
        return past.flip(0).t().cpu().contiguous(), scales.clone().cpu()

    def take_histories(self, past: Tensor, scales: Tensor | None) -> None:
        """Goes on from what :meth:`histories` gave. Of a longer history the newest part is kept.

        Args:
            past: Amax values ``[3, history]``, newest first.
            scales: The three scales; ``None`` for those that follow from ``past``, which another backend has kept.
        """
        scales = self._scales_of(past) if scales is None else scales
        if self._layer is None:
            self._waiting = past, scales
            return
        forward, backward = self._states()
        for columns, state in ((slice(0, len(_FORWARD)), forward), (slice(len(_FORWARD), None), backward)):
            length, count = state.amax_history.shape[0], past[columns].shape[0]
            kept = past[columns, : length - 1]  # the last place is for what will be noted
            newest_first = torch.zeros(count, length, dtype=torch.float32)
            newest_first[:, : kept.shape[1]] = kept
            state.amax_history[:, :count].copy_(newest_first.t().flip(0))
            state.scale[:count].copy_(scales[columns])

    def _scales_of(self, past: Tensor) -> Tensor:
        assert isinstance(self.recipe, DelayedScaling)
        amax = past[:, 0] if self.recipe.amax == "most_recent" else past.amax(dim=1)
        scales = [
            scale_of(amax[row], self.recipe.format_of(operand), margin=self.recipe.margin)
            for row, operand in enumerate(OPERANDS)
        ]
        return torch.stack(scales)

    def forget(self) -> None:
        """Begins anew, as a layer that has not run yet."""
        self._layer = self._waiting = None


class _Spoil(torch.autograd.Function):
    """Makes an infinity NaN, in the forward or in the backward pass.

    Quantizing clamps an infinity to the largest finite number, where nobody sees it any more; NaN comes through.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: bool) -> Tensor:
        ctx.forward = forward
        return torch.add(x, x, alpha=0.0) if forward else x.view_as(x)  # inf * 0 is NaN, anything finite * 0 is 0

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return gradient if ctx.forward else torch.add(gradient, gradient, alpha=0.0), None


def _spoil(x: Tensor, forward: bool) -> Tensor:
    spoiled: Tensor = _Spoil.apply(x, forward)  # type: ignore[no-untyped-call]
    return spoiled


@cache
def _recipe_of(recipe: Recipe) -> Any:
    from transformer_engine.common import recipe as theirs

    if isinstance(recipe, DelayedScaling):
        return theirs.DelayedScaling(
            margin=recipe.margin,
            fp8_format=theirs.Format.HYBRID,
            amax_history_len=recipe.history,
            amax_compute_algo=recipe.amax,
            reduce_amax=recipe.reduce_amax,
        )
    if isinstance(recipe, CurrentScaling):
        current = theirs.Float8CurrentScaling(fp8_format=theirs.Format.HYBRID)
        # Its own argument for it (use_power_2_scales) changes nothing that its layers read: these are class attributes.
        for operand in ("fwd_inp", "fwd_weight", "bwd_grad"):
            setattr(current, f"fp8_quant_{operand}", theirs.QParams(power_2_scale=recipe.power_of_two))
        return current
    if isinstance(recipe, BlockScaling):
        return theirs.Float8BlockScaling(fp8_format=theirs.Format.E4M3, use_f32_scales=False)
    assert isinstance(recipe, MXScaling)
    return theirs.MXFP8BlockScaling(fp8_format=theirs.Format.E4M3)


def _te() -> Any:
    import transformer_engine.pytorch

    return transformer_engine.pytorch


def _manager() -> Any:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    return FP8GlobalStateManager


def their_checkpoint() -> Any:
    """Transformer Engine's activation checkpointing."""
    return _te().checkpoint


def _in_their_recompute() -> bool:
    from transformer_engine.pytorch.distributed import in_fp8_activation_recompute_phase

    return bool(in_fp8_activation_recompute_phase())


@cache
def _why_not_importable() -> Obstacle | None:
    try:
        _te()
    except (ImportError, RuntimeError, OSError) as error:  # without its binary the package raises RuntimeError
        first = str(error).strip().partition("\n")[0]
        return Obstacle("backend", f"Transformer Engine cannot be imported ({type(error).__name__}: {first})")
    return None


def _why_refused(recipe: Recipe) -> Obstacle | None:
    manager = _manager()
    asked = {BlockScaling: "is_fp8_block_scaling_available", MXScaling: "is_mxfp8_available"}
    available, reason = getattr(manager, asked.get(type(recipe), "is_fp8_available"))()
    return None if available else Obstacle("hardware", str(reason))
