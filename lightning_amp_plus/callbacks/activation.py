"""ActivationMonitor: how large activations and parameters are, layer by layer, and how much room their formats leave."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_amp_plus.callbacks.folding import MAXIMA, SUMS
from lightning_amp_plus.callbacks.layer_health import LayerHealth, Taken
from lightning_amp_plus.callbacks.layers import LayerHistory
from lightning_amp_plus.callbacks.monitor import Monitor, batches_that_stepped
from lightning_amp_plus.callbacks.parameter_amax import ParameterAmax
from lightning_amp_plus.callbacks.readout import Measurement
from lightning_amp_plus.callbacks.sightings import Sightings
from lightning_amp_plus.callbacks.watched import Watch
from lightning_amp_plus.naming import ROOT
from lightning_amp_plus.watching.modules import Watchable, watchable

_HEADROOM = "headroom of activations (bits)"
_PLENTY = 24.0  # bits, beyond which a picture need not tell layers apart: FP32's range would leave one color for FP16's
_FLOOR = 1.0  # bits; below, one doubling overflows


class ActivationMonitor(Monitor):
    """Logs the largest magnitude of each layer's output and parameters, and warns before a format overflows.

    At a log point it looks at what modules take and return in all micro-batches of the window, and at the parameters
    after the step. What one module hands on to the next is looked at once; small tensors are looked at together, for
    which up to 2 MiB to 4 MiB of activations on a CPU, and 16 times that on a GPU, are held until backward begins. In
    between there is no hook on the model. What backward recomputes (activation checkpointing) does not count again.

    Inside a compiled region nothing can be seen, since hooks would become part of it: its own inputs and outputs are
    looked at from outside, and the layers within it have no number. Hooks go neither on a module that ``torch.compile``
    or ``module.compile()`` compiled nor below one whose ``forward`` was compiled; a compiled function that calls modules
    cannot be recognized, and is compiled twice if it is first called at a log point.

    Args:
        every_n_steps: Length of an interval in steps; by default the Trainer's ``log_every_n_steps``. Where that is 0,
            nothing is logged.
        modules: A glob or several on qualified names as in the plan (``net.blocks.*.mlp``): of these modules activations
            and parameters are looked at. By default the activations of all modules without children, and all parameters.
        detail: Also log what is otherwise in ``last`` alone.

    Raises:
        ValueError: If an argument is out of range; when training starts, if a glob matches no module.
        MisconfigurationException: In ``setup``, if the Trainer's precision plugin is not an ``AmpPrecision``.

    Example::

        trainer = L.Trainer(plugins=[AmpPrecision("16-mixed")], callbacks=[ActivationMonitor(modules="net.blocks.*")])

    Logged keys, in the loggers, in ``trainer.callback_metrics`` and in ``trainer.logged_metrics``:

    =============================================== ================================================= ===============
    key                                             value                                             where
    =============================================== ================================================= ===============
    ``precision/activation_amax/NAME``              largest magnitude of what the module returned;    it ran
                                                    infinity or NaN if there is one
    ``precision/parameter_amax/NAME``               largest magnitude in its own parameters, after    it has any
                                                    the step
    ``precision/activation_headroom/NAME``          ``log2(largest finite number of its dtype /       ``detail=True``
                                                    amax)``, in bits
    ``precision/activation_nonfinite/NAME``         share of elements that are infinite or NaN        ``detail=True``
    ``precision/activation_smallest/NAME``          smallest magnitude but zero                       ``detail=True``
    ``precision/activation_input_amax/NAME``, and   the same four of what the module was given        ``detail=True``
    ``..._headroom ..._nonfinite ..._smallest``
    =============================================== ================================================= ===============

    NAME is the qualified name, ``(model)`` for the LightningModule itself. A module that did not run, or whose output was
    changed in place before it was looked at (which happens once: from then on it is looked at in time), has no key; the
    reason is in ``last``. A module called several times has one number over all calls. Over ranks the largest, the
    smallest, and shares of all elements are taken. ``last`` holds all that is known of each layer at the last log point,
    ``layer_histories()`` the headroom of outputs over the run.
    """

    by_layer = True

    def __init__(
        self,
        every_n_steps: int | None = None,
        modules: str | Sequence[str] | None = None,
        detail: bool = False,
    ) -> None:
        globs = None if modules is None else (modules,) if isinstance(modules, str) else tuple(modules)
        if globs is not None and (not globs or not all(isinstance(glob, str) and glob for glob in globs)):
            raise ValueError(
                f"ActivationMonitor(modules={modules!r}): expected a glob on module names, such as 'net.blocks.*', or a "
                "list of globs."
            )
        self.modules = globs
        self.detail = detail
        self._warned: set[str] = set()
        self._forget_numbers()
        super().__init__(every_n_steps)

    @override
    def settings(self) -> dict[str, Any]:
        """See :class:`Monitor`."""
        return {"every_n_steps": self.every_n_steps, "modules": self.modules, "detail": self.detail}

    @override
    def forget_run(self) -> None:
        """See :class:`Monitor`."""
        super().forget_run()
        self._watches: list[Watch] = []
        self._sightings: Sightings | None = None
        self._parameters: ParameterAmax | None = None
        self._in_window = False

    def _forget_numbers(self) -> None:
        self._names: list[str] = []
        self._layers: list[str] = []
        self._output_keys: list[str] = []
        self._parameter_keys: list[str] = []
        self._hidden: dict[str, str] = {}
        self._history = LayerHistory(_HEADROOM, ceiling=_PLENTY)
        self._taken: Taken | None = None

    # ---------------------------------------------------------------- binding to a run

    @override
    def begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Finds the modules to watch."""
        history = self._history
        found = watchable(pl_module)
        self._forget_numbers()
        if history.steps and history.steps[-1] < batches_that_stepped(trainer):
            self._history = history  # the same run goes on
        names, layers = self._choose(found)
        self._hidden = {name: region or ROOT for name, region in found.hidden.items()}
        self._names, self._layers = [name or ROOT for name in names], [name or ROOT for name in layers]
        self._output_keys = [f"precision/activation_amax/{name}" for name in self._names]
        self._parameter_keys = [f"precision/parameter_amax/{name}" for name in self._layers]
        self._sightings = seen = Sightings(len(names), pl_module.device)
        self._parameters = ParameterAmax([found.layers[name] for name in layers], pl_module.device)
        self._watches = [Watch(found.module[name], number, seen) for number, name in enumerate(names)]
        if self._hidden and "hidden" not in self._warned:
            self._warned.add("hidden")
            rank_zero_warn(_cannot_see(self._hidden, set(self._names)))

    def _choose(self, found: Watchable) -> tuple[list[str], list[str]]:
        if self.modules is None:
            return list(found.leaves), list(found.layers)
        every = [*dict.fromkeys((*found.module, *found.hidden, *found.layers))]
        for glob in self.modules:
            if not any(fnmatchcase(name, glob) for name in every):
                raise ValueError(
                    f"ActivationMonitor(modules=...): {glob!r} matches no module. Names are case-sensitive and relative to "
                    f"the LightningModule, as in trainer.precision_plugin.plan; there are {', '.join(every[1:6])}, ..."
                )
        wanted = {name for name in every if any(fnmatchcase(name, glob) for glob in self.modules)}
        return [n for n in found.module if n in wanted], [n for n in found.layers if n in wanted]

    # ---------------------------------------------------------------- the windows

    @override
    def before_batch(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Puts the hooks on."""
        assert self._sightings is not None
        if self._in_window:
            self._sightings.end_micro_batch()
        else:
            self._sightings.begin_window()
        self._in_window = True
        for watch in self._watches:
            watch.begin()

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Looks at what was held back, which backward could not free otherwise."""
        if self.looking and self._sightings is not None:
            self._sightings.look()

    @override
    def after_batch(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes the hooks off. Runs nothing on the device, which may be unable to after an exception."""
        for watch in self._watches:
            watch.end()

    @override
    def measure(self) -> Sequence[Measurement]:
        """Reads parameters, and adds up."""
        assert self._sightings is not None and self._parameters is not None
        self._in_window = False
        maxima, sums = self._sightings.totals()
        return (
            Measurement(maxima, MAXIMA),
            Measurement(sums, SUMS),
            Measurement(self._parameters.measure(), ("max",)),
        )

    @override
    def take(self, numbers: Sequence[Tensor], step: int) -> Mapping[str, float]:
        """Gives what the table of the class says, and warns."""
        seen = self._sightings
        assert seen is not None
        self._taken = taken = Taken(numbers, seen)
        names, ran, amaxes = self._names, taken.known(1), taken.column("amax", 1)
        values = {key: amax for key, amax, known in zip(self._output_keys, amaxes, ran, strict=True) if known}
        values.update(zip(self._parameter_keys, taken.parameters, strict=True))
        if self.detail:
            for side, what in ((1, "activation"), (0, "activation_input")):
                known = taken.known(side)
                for column in ("amax", "headroom", "nonfinite", "smallest"):
                    values.update(_keys(f"{what}_{column}", names, taken.column(column, side), known))
        room = taken.column("headroom", 1)
        self._history.add(step, {name: bits for name, bits, known in zip(names, room, ran, strict=True) if known})
        self._warn(taken, step)
        return values

    def _warn(self, taken: Taken, step: int) -> None:
        amaxes, room, known = taken.column("amax", 1), taken.column("headroom", 1), taken.known(1)
        if "nonfinite" not in self._warned and any(taken.column("not_finite", 1)):
            self._warned.add("nonfinite")
            rank_zero_warn(self._not_finite(taken, step))
        if "headroom" in self._warned:
            return
        rows = range(len(self._names))
        tight = [
            row
            for row in rows
            if known[row] and room[row] < _FLOOR and math.isfinite(amaxes[row])
            if "fp16" in taken.dtypes[2 * row + 1]
        ]
        if tight:
            self._warned.add("headroom")
            row = min(tight, key=room.__getitem__)
            name = self._names[row]
            others = f" So does that of {len(tight) - 1} other modules." if len(tight) > 1 else ""
            rank_zero_warn(
                f"The output of {name!r} reached {amaxes[row]:.5g} in {taken.dtypes[2 * row + 1]} at step {step}: "
                f"{room[row]:.2f} bits below 65504, where FP16 ends, so one doubling overflows.{others} Let "
                f"it compute in a format with a wider range: {_remedy(name)}. Said once."
            )

    def _not_finite(self, taken: Taken, step: int) -> str:
        rows = [row for row in taken.order if row < len(self._names)]
        rows += [row for row in range(len(self._names)) if row not in set(rows)]
        began, count, shares = (taken.column(name, 1) for name in ("began_here", "not_finite", "nonfinite"))
        first = next((row for row in rows if began[row] > 0), None)
        share = "{:.3%} of its elements".format
        if first is not None:
            name, dtype = self._names[first], taken.dtypes[2 * first + 1] or "unknown"
            remedy = (
                f"In FP16 numbers end at 65504: let it compute in a wider format, {_remedy(name)}."
                if "fp16" in dtype
                else "Look at what it was given (monitor.last), at its parameters and at the learning rate."
            )
            return (
                f"The output of {name!r} ({dtype}) is not finite at step {step} ({share(shares[first])}), "
                f"and its inputs are: there the first infinity or NaN of the forward pass arose. {remedy} Said once."
            )
        row = next(row for row in rows if count[row] > 0)
        return (
            f"The output of {self._names[row]!r} is not finite at step {step} ({share(shares[row])}), but no "
            "module was seen that made it so: infinity or NaN arose between the modules that are watched, in the batch, or "
            "in an activation that could not be read (monitor.last). Said once."
        )

    # ---------------------------------------------------------------- for people

    @property
    def last(self) -> dict[str, LayerHealth]:
        """Everything known of each layer at the last log point, over all ranks; empty before the first."""
        taken = self._taken
        if taken is None:
            return {}
        parameters = dict(zip(self._layers, taken.parameters, strict=True))
        found = {
            name: LayerHealth(taken.side(2 * row + 1), taken.side(2 * row), parameters.pop(name, None), taken.note(row))
            for row, name in enumerate(self._names)
        }
        for name in dict.fromkeys((*self._hidden, *parameters)):
            region = self._hidden.get(name)
            note = "not watched" if region is None else f"inside the compiled {region!r}, where nothing can be seen"
            found.setdefault(name, LayerHealth(parameter_amax=parameters.get(name), note=note))
        return found

    @override
    def layer_histories(self) -> Sequence[LayerHistory]:
        """The headroom of outputs."""
        return (self._history,)

    # ---------------------------------------------------------------- copies

    def __getstate__(self) -> dict[str, Any]:
        """Settings travel; the run they come from does not."""
        return {name: self.__dict__[name] for name in ("every_n_steps", "modules", "detail", "_warned")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_numbers()
        self.forget_run()


def _keys(what: str, names: Sequence[str], values: Sequence[float], known: Sequence[bool]) -> dict[str, float]:
    prefix = f"precision/{what}/"
    return {prefix + name: value for name, value, is_known in zip(names, values, known, strict=True) if is_known}


def _remedy(name: str) -> str:
    return f"Rule({name!r}, compute='bf16'), or 'fp32', in the policy"


def _cannot_see(hidden: Mapping[str, str], watched: set[str]) -> str:
    regions = list(dict.fromkeys(hidden.values()))
    some = ", ".join(map(repr, list(hidden)[:3])) + (", ..." if len(hidden) > 3 else "")
    outside = [region for region in regions if region in watched]
    seen = f" Looked at from outside: {', '.join(map(repr, outside[:3]))}." if outside else ""
    return (
        f"ActivationMonitor cannot see inside what is compiled ({', '.join(map(repr, regions[:3]))}): the "
        f"{len(hidden)} modules in it ({some}) will have no activations in the log, only parameters.{seen} To see them, "
        "run without torch.compile. Said once."
    )
