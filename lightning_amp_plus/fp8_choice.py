"""Which modules that are to compute in FP8 do: :class:`Fp8Choice` turns ``matching``'s wishes into decisions."""

from collections.abc import Mapping

from torch import nn

from lightning_amp_plus.decision import Decision, Wish
from lightning_amp_plus.fp8.backends import BACKENDS, choose
from lightning_amp_plus.fp8.backends.base import Backend
from lightning_amp_plus.fp8.obstacle import Obstacle
from lightning_amp_plus.fp8.recipes import GEMMS, Gemm, Recipe
from lightning_amp_plus.fp8.selection import NOT_LINEAR, Fp8Route, better_high, default_recipe, obstacle, too_small
from lightning_amp_plus.naming import ModelNames
from lightning_amp_plus.policy import PrecisionPolicy, Rule


def embedding_weights(names: ModelNames) -> set[int]:
    """Ids of the parameters that embeddings look up in."""
    embeddings = [module for module in names.module.values() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    return {id(weight) for module in embeddings if (weight := module._parameters.get("weight")) is not None}


class Fp8Choice:
    """Turns wishes into decisions, and remembers which wishes for FP8 came to what."""

    def __init__(self, names: ModelNames, policy: PrecisionPolicy, device_type: str) -> None:
        self._names = names
        self._policy = policy
        self._device_type = device_type
        self._granted: set[int] = set()  # modules
        self._asked: dict[Rule | None, list[tuple[str, Obstacle]]] = {}  # by what asks, who was denied and why
        self._elsewhere: dict[int, Rule | None] = {}  # layers that could, and the rule that keeps them out
        self._embeddings = embedding_weights(names)

    def of(self, module: nn.Module, wish: Wish) -> Decision:
        """The decision on one module."""
        rule = wish.rule
        match = "" if rule is None else rule.match
        if wish.compute != "fp8" and not self._policy.uses_fp8:
            return Decision(wish.compute, match, wish.reason, False)
        given = None if rule is None else rule.recipe
        recipe = default_recipe(self._device_type) if given is None else Recipe.of(given)
        aliases = self._names.aliases[id(module)]
        why = obstacle(module, recipe)
        if wish.compute != "fp8":
            if why is None and better_high(aliases, module, self._embeddings, "", own=False) is None:
                self._elsewhere[id(module)] = rule
            return Decision(wish.compute, match, wish.reason, False)
        self._asked.setdefault(rule, [])
        named = rule is not None and rule.match in aliases and not any(True for _ in module.children())
        if why is not None and rule is not None and named and self._policy.fallback == "error":
            raise ValueError(
                f"Rule {rule.match!r} asks for FP8 of {aliases[0]!r}, which cannot compute in it: {why}. Remove the "
                "rule, or set fallback='bf16' in the policy to have it listed and computed in BF16."
            )
        if why is None:
            why = better_high(aliases, module, self._embeddings, match, wish.own)
        gemms = tuple(rule.gemms) if rule is not None and rule.gemms is not None else GEMMS
        if why is None:
            why = self._obstacle_of_named_backend(rule, recipe, gemms)
        if why is not None:
            return self._denial(module, rule, why)
        backend, chosen = self._backend(rule, recipe, gemms)
        small = None if backend.emulated or self._device_type == "cpu" or wish.own else too_small(module, recipe)
        if small is not None:
            return self._denial(module, rule, small)
        self._granted.add(id(module))
        route = Fp8Route(recipe, gemms, backend.name, self._policy.fp8_in_evaluation)
        return Decision("fp8", match, f"{wish.reason}; {chosen}", False, route)

    def _denial(self, module: nn.Module, rule: Rule | None, why: Obstacle) -> Decision:
        if not any(True for _ in module.children()):  # of a container it is what is inside that counts
            name = self._names.aliases[id(module)][0] or "(model)"
            self._asked[rule].append((name, why))
        match = "" if rule is None else rule.match
        return Decision(self._policy.base_compute, match, str(why), False, None, why.kind)

    def _backend(self, rule: Rule | None, recipe: Recipe, gemms: tuple[Gemm, ...]) -> tuple[Backend, str]:
        """What multiplies, and why that."""
        if rule is None or rule.backend is None:
            return choose(recipe, gemms, self._device_type)
        return BACKENDS[rule.backend], f"{rule.backend}: as the rule says"

    def _obstacle_of_named_backend(self, rule: Rule | None, recipe: Recipe, gemms: tuple[Gemm, ...]) -> Obstacle | None:
        """Why the backend that a rule names cannot, where the policy takes BF16 then; an error where it does not."""
        if rule is None or rule.backend is None:
            return None
        why = BACKENDS[rule.backend].obstacle(recipe, gemms, self._device_type)
        if why is not None and self._policy.fallback == "error":
            raise ValueError(
                f"Rule {rule.match!r} asks for backend={rule.backend!r}, which cannot compute it here: {why.text}. "
                "Leave backend out to have one chosen, or set fallback='bf16' in the policy to have its layers listed "
                "and computed in BF16."
            )
        return why

    def refuse_wishes_that_came_to_nothing(self, matched: Mapping[Rule, set[int]]) -> None:
        """Raises where FP8 was asked for and nothing will run in it, unless later rules take it away.

        Args:
            matched: Ids of the modules that each rule matches.

        Raises:
            ValueError: Naming what was asked, and why the candidates cannot.
        """
        for rule, denied in self._asked.items():
            if rule is not None and (rule.compute != "fp8" or self._policy.fallback == "bf16"):
                continue  # of its own it asks for nothing; or it is listed in the plan, as the policy allows
            reached = set(self._names.aliases) if rule is None else self._with_all_inside(matched[rule])
            if reached & self._granted or any(self._elsewhere[key] != rule for key in reached & set(self._elsewhere)):
                continue
            linear = [(name, why) for name, why in denied if why != NOT_LINEAR]
            asked = "The policy" if rule is None else f"Rule {rule.match!r}"
            reasons = "; ".join(f"{name}: {why}" for name, why in (linear or denied)[:4])
            found = reasons or "there is no Linear layer in it that is called by itself"
            raise ValueError(
                f"{asked} asks for FP8, but no module would compute in it ({found}). Widen the layers, name one of "
                "them in a rule, or leave FP8 out."
            )

    def _with_all_inside(self, modules: set[int]) -> set[int]:
        return {
            id(module)
            for name, module in self._names.module.items()
            if id(module) in modules
            or any(id(self._names.module[above]) in modules for above in self._names.above(name))
        }
