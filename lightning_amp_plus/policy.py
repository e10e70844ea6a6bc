"""What the user wants: a precision policy and its rules, as frozen data.

`routing.plan` turns a policy and a model into routes; the plugin, the manifest and the command line read and print it.
Nothing here looks at a model or a device, so a policy can be written, compared, stored and hashed anywhere.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from lightning_amp_plus.fp8.recipes import Gemm, Recipe

StorageFormat = Literal["fp32", "bf16", "fp16"]
ComputeFormat = Literal["fp32", "bf16", "fp16", "fp8"]
BackendName = Literal["reference", "torchao", "transformer_engine"]

_LIGHTNING_STRINGS: dict[str, dict[str, Any]] = {
    "32-true": {"compute": "fp32"},
    "16-mixed": {"compute": "fp16"},
    "bf16-mixed": {"compute": "bf16"},
    "16-true": {"compute": "fp16", "params": "fp16"},
    "bf16-true": {"compute": "bf16", "params": "bf16"},
    "fp8-mixed": {"compute": "fp8"},
}
_ALIASES = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true"}
_LEFT_TO_LIGHTNING = ("64", "64-true", "transformer-engine", "transformer-engine-float16")


@dataclass(frozen=True)
class Rule:
    """One line of a policy: which modules it means and what they shall compute in.

    Args:
        match: Case-sensitive glob on a module's qualified name (``blocks.*.mlp``), or ``type:`` and a glob on a class
            name (``type:LayerNorm``). A glob that meets no module may name buffers, which then keep their dtype.
        compute: Format of the computation; None means that of the policy.
        recipe: How FP8 scales are chosen: a recipe of `lightning_amp_plus.fp8`, its name, or its plain form; None means
            what `fp8-mixed` means on the hardware. FP8 only.
        gemms: Which of a layer's three GEMMs run in FP8: `fprop` (output), `dgrad` (gradient of the input), `wgrad`
            (gradient of the weight); None means all. FP8 only.
        reason: Free text, shown in the plan.
        backend: What multiplies: `reference` (pure torch, emulated in BF16), `torchao` or `transformer_engine`; None
            means the fastest that is there and has the recipe. FP8 only.

    Raises:
        ValueError: If `match` is empty, a value is unknown, or an FP8 setting meets another compute format.
    """

    match: str
    compute: ComputeFormat | None = None
    recipe: Recipe | str | dict[str, Any] | None = None
    gemms: Sequence[Gemm] | None = None
    reason: str = ""
    backend: BackendName | None = None

    def __post_init__(self) -> None:
        pattern = self.match.removeprefix("type:") if isinstance(self.match, str) else ""
        if not pattern.strip():
            raise ValueError(
                f"A rule's match must be a glob on a module name, such as 'blocks.*', or 'type:' and a class name; "
                f"found {self.match!r}. To set the format of the whole model, set the policy's compute."
            )
        where = f"rule {self.match!r}"
        if self.compute is not None:
            _one_of(f"compute of {where}", self.compute, get_args(ComputeFormat))
        if self.recipe is not None:
            try:
                object.__setattr__(self, "recipe", Recipe.of(self.recipe))
            except ValueError as error:
                raise ValueError(f"recipe of {where}: {error}") from None
        if self.gemms is not None:
            if isinstance(self.gemms, str) or not self.gemms:
                raise ValueError(
                    f"gemms of {where} must be a non-empty list out of {list(get_args(Gemm))}; found {self.gemms!r}."
                )
            for gemm in self.gemms:
                _one_of(f"gemms of {where}", gemm, get_args(Gemm))
            object.__setattr__(self, "gemms", tuple(self.gemms))
        if self.backend is not None:
            _one_of(f"backend of {where}", self.backend, get_args(BackendName))
        if self.compute not in (None, "fp8"):
            self._refuse_fp8_settings(f"the {where} computes in {self.compute!r}")

    def _refuse_fp8_settings(self, found: str) -> None:
        for name in ("recipe", "gemms", "backend"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} of rule {self.match!r} is a setting of FP8, but {found}. "
                    f"Give the rule compute='fp8' or leave {name} out."
                )


@dataclass(frozen=True)
class PrecisionPolicy:
    """Which formats a model stores, computes and communicates in.

    Args:
        compute: Format of every module that no rule names.
        params: Storage of floating parameters. A 16-bit format must be that of `compute`, and means a model without a
            surrounding autocast, like Lightning's ``bf16-true``.
        reduce: Format of gradient communication.
        buffers: Storage of floating buffers; None means that they follow `params`, as under `torch.nn.Module.to`.
        master_weights: Keep an FP32 copy of 16-bit parameters for the optimizer.
        rules: Exceptions, the last match wins. Mappings are accepted in place of `Rule`.
        fallback: What happens where a format cannot run: an error, or BF16, counted and named.
        fp8_after_steps: Applied steps before FP8 begins.
        fp8_when_stable: Let FP8 begin only once loss and gradient norm have been quiet for 100 applied steps, but not
            before ``fp8_after_steps``; ``docs/fp8.md`` says what that means.
        fp8_in_evaluation: Evaluate in FP8 too, rather than in BF16.

    Raises:
        ValueError: For an unknown value or a combination that cannot be meant.

    Example:
        >>> policy = PrecisionPolicy(compute="bf16", rules=[Rule("head", compute="fp32")])
        >>> policy.lightning_precision
        'bf16-mixed'
    """

    compute: ComputeFormat
    params: StorageFormat = "fp32"
    reduce: StorageFormat = "fp32"
    buffers: StorageFormat | None = None
    master_weights: bool = False
    rules: Sequence[Rule] = ()
    fallback: Literal["error", "bf16"] = "error"
    fp8_after_steps: int = 0
    fp8_when_stable: bool = False
    fp8_in_evaluation: bool = False

    def __post_init__(self) -> None:
        _one_of("compute", self.compute, get_args(ComputeFormat))
        for name in ("params", "reduce", "buffers"):
            value = getattr(self, name)
            if value is not None or name != "buffers":
                _one_of(name, value, get_args(StorageFormat))
        _one_of("fallback", self.fallback, ("error", "bf16"))
        for name in ("master_weights", "fp8_when_stable", "fp8_in_evaluation"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False; found {getattr(self, name)!r}.")
        if (
            isinstance(self.fp8_after_steps, bool)
            or not isinstance(self.fp8_after_steps, int)
            or self.fp8_after_steps < 0
        ):
            raise ValueError(f"fp8_after_steps must be a count of steps, 0 or more; found {self.fp8_after_steps!r}.")
        object.__setattr__(self, "rules", _as_rules(self.rules))
        self._check_storage()
        self._check_fp8()

    def _check_storage(self) -> None:
        if self.params != "fp32" and self.params != self.base_compute:
            wanted = "'bf16' or 'fp8'" if self.params == "bf16" else repr(self.params)
            raise ValueError(
                f"params={self.params!r} with compute={self.compute!r}: parameters stored in 16 bits must be computed "
                f"with in the same format. Set compute to {wanted}, or params='fp32'."
            )
        if self.master_weights and self.params == "fp32":
            raise ValueError(
                "master_weights=True with params='fp32': the parameters are FP32 themselves, so there is nothing to "
                "keep a master of. Set params='bf16' or 'fp16', or leave master_weights out."
            )

    def _check_fp8(self) -> None:
        if self.compute != "fp8":
            for rule in self.rules:
                if rule.compute is None:
                    rule._refuse_fp8_settings(
                        f"the rule has no compute of its own and the policy computes in {self.compute!r}"
                    )
        if self.uses_fp8 and self.compute == "fp16":
            raise ValueError(
                "compute='fp16' with FP8 in a rule: FP8 layers compute with BF16 around them, and a loss scale made for "
                "FP16 would scale what BF16 and FP8 need no scale for. Use compute='bf16'."
            )
        if self.uses_fp8:
            return
        for name in ("fp8_after_steps", "fp8_when_stable", "fp8_in_evaluation"):
            if getattr(self, name):
                raise ValueError(
                    f"{name}={getattr(self, name)!r}, but nothing in this policy computes in FP8: "
                    f"compute={self.compute!r} and no rule has compute='fp8'. Leave {name} out or ask for FP8."
                )

    @property
    def uses_fp8(self) -> bool:
        """Whether the policy or one of its rules asks for FP8."""
        return self.compute == "fp8" or any(rule.compute == "fp8" for rule in self.rules)

    @property
    def base_compute(self) -> StorageFormat:
        """Format around the GEMMs: that of the surrounding autocast, BF16 around FP8."""
        return "bf16" if self.compute == "fp8" else self.compute

    @property
    def is_true(self) -> bool:
        """Whether parameters are stored in the 16-bit format they compute in, with no autocast around the step."""
        return self.params != "fp32"

    @property
    def lightning_precision(self) -> Literal["32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true"]:
        """The nearest of Lightning's own precision strings."""
        if self.base_compute == "fp32":
            return "32-true"
        if self.base_compute == "fp16":
            return "16-true" if self.is_true else "16-mixed"
        return "bf16-true" if self.is_true else "bf16-mixed"

    @property
    def precision_name(self) -> str:
        """What the whole run computes and stores in, FP8 told apart: Lightning's strings, ``fp8-mixed``, ``fp8-true``."""
        digits = {"fp32": "32", "bf16": "bf16", "fp16": "16", "fp8": "fp8"}[self.compute]
        return f"{digits}-true" if self.is_true or self.compute == "fp32" else f"{digits}-mixed"

    @classmethod
    def from_string(cls, precision: str | int) -> "PrecisionPolicy":
        """The policy that a Lightning precision string means.

        Args:
            precision: ``32-true 16-mixed bf16-mixed 16-true bf16-true``, ``fp8-mixed``, or Lightning's short forms
                32, 16, ``bf16``.

        Raises:
            ValueError: For anything else, with the list of what is known.
        """
        name = _ALIASES.get(str(precision), str(precision))
        if name in _LIGHTNING_STRINGS:
            return cls(**_LIGHTNING_STRINGS[name])
        known = ", ".join(_LIGHTNING_STRINGS)
        hint = ""
        if name in _LEFT_TO_LIGHTNING:
            hint = f" {name!r} is one of Lightning's own: pass it as Trainer(precision={name!r}) without this plugin."
        raise ValueError(f"Unknown precision {precision!r}. Known are {known}, and 32, 16, bf16 for short.{hint}")

    @staticmethod
    def knows(precision: object) -> bool:
        """Whether `from_string` takes `precision`."""
        return not isinstance(precision, bool) and _ALIASES.get(str(precision), str(precision)) in _LIGHTNING_STRINGS

    def to_dict(self) -> dict[str, Any]:
        """The policy in plain types, fit for JSON, YAML and a `weights_only` checkpoint."""
        plain = asdict(self)
        plain["rules"] = [asdict(rule) for rule in self.rules]
        for rule, described in zip(self.rules, plain["rules"], strict=True):
            described["gemms"] = None if rule.gemms is None else list(rule.gemms)
            described["recipe"] = None if rule.recipe is None else Recipe.of(rule.recipe).to_dict()
        return plain

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "PrecisionPolicy":
        """The policy that `to_dict` described.

        Raises:
            ValueError: If a key is not one of this version's, naming it, or if `compute` is missing.
        """
        _refuse_unknown_keys("PrecisionPolicy", cls, values)
        if "compute" not in values:
            raise ValueError(f"A PrecisionPolicy needs the key 'compute'; found the keys {sorted(values)}.")
        return cls(**values)

    def fingerprint(self) -> str:
        """SHA-256 (hex) of all that changes a route or its numerics; the rules' reasons, being prose, do not count."""
        plain = self.to_dict()
        for rule in plain["rules"]:
            del rule["reason"]
            if rule["backend"] is None:  # younger than checkpoints: unset, it leaves their fingerprints as they are
                del rule["backend"]
        canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def _one_of(what: str, found: object, allowed: Sequence[str]) -> None:
    if not isinstance(found, str) or found not in allowed:
        raise ValueError(f"{what} must be one of {', '.join(map(repr, allowed))}; found {found!r}.")


def _as_rules(rules: Any) -> tuple[Rule, ...]:
    if isinstance(rules, (str, Mapping, Rule)) or not isinstance(rules, Sequence):
        raise ValueError(f"rules must be a list of Rule (or of mappings with a rule's fields); found {rules!r}.")
    return tuple(_as_rule(index, rule) for index, rule in enumerate(rules))


def _as_rule(index: int, rule: Any) -> Rule:
    if isinstance(rule, Rule):
        return rule
    if not isinstance(rule, Mapping):
        raise ValueError(f"rules[{index}] must be a Rule or a mapping with its fields; found {rule!r}.")
    _refuse_unknown_keys(f"rules[{index}]", Rule, rule)
    if "match" not in rule:
        raise ValueError(f"rules[{index}] needs the key 'match'; found the keys {sorted(rule)}.")
    return Rule(**rule)


def _refuse_unknown_keys(what: str, cls: type[Any], values: Mapping[str, Any]) -> None:
    known = [field.name for field in fields(cls)]
    unknown = [key for key in values if key not in known]
    if unknown:
        raise ValueError(f"{what} has unknown keys {unknown}. Known are {known}.")
