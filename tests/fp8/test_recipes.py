from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from lightning_amp_plus.formats import E4M3, E5M2
from lightning_amp_plus.fp8.recipes import (
    RECIPES,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXScaling,
    Recipe,
    RowwiseScaling,
)

SOME = [
    DelayedScaling(),
    DelayedScaling(history=16, amax="most_recent", margin=1, reduce_amax=False),
    CurrentScaling(),
    CurrentScaling(power_of_two=True),
    RowwiseScaling(),
    RowwiseScaling(weight_grad="high", power_of_two=False),
    BlockScaling(),
    MXScaling(),
]


@pytest.mark.parametrize("recipe", SOME, ids=repr)
def test_a_recipe_comes_back_from_json(recipe: Recipe) -> None:
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert Recipe.of(recipe.to_dict()) == recipe and Recipe.of(recipe) is recipe


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_name_means_the_recipe_with_its_defaults(name: str) -> None:
    assert Recipe.of(name) == RECIPES[name]()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"name": "delayed", "histroy": 8}, ["histroy", "history"]),
        ({"name": "mx", "history": 8}, ["MXScaling", "history"]),
        ({"name": "hybrid"}, ["hybrid", "current", "delayed"]),
        ({"history": 8}, ["'name'"]),
        ("e4m3", ["e4m3", "rowwise"]),
        (3, ["3", "CurrentScaling()"]),
    ],
)
def test_what_is_no_recipe_is_named(values: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        Recipe.of(values)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DelayedScaling(history=0), ["history=0", "at least 1"]),
        (lambda: DelayedScaling(history=True), ["history=True"]),
        (lambda: DelayedScaling(margin=0.5), ["margin=0.5"]),  # type: ignore[arg-type]
        (lambda: DelayedScaling(amax="mean"), ["amax='mean'", "most_recent"]),  # type: ignore[arg-type]
        (lambda: DelayedScaling(reduce_amax=1), ["reduce_amax=1"]),  # type: ignore[arg-type]
        (lambda: CurrentScaling(power_of_two="yes"), ["power_of_two='yes'"]),  # type: ignore[arg-type]
        (lambda: RowwiseScaling(weight_grad="bf16"), ["weight_grad='bf16'", "high"]),  # type: ignore[arg-type]
    ],
)
def test_settings_out_of_range_are_refused(make: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("recipe", SOME, ids=repr)
def test_a_recipe_is_frozen_and_hashable(recipe: Recipe) -> None:
    with pytest.raises(FrozenInstanceError):
        recipe.margin = 3  # type: ignore[attr-defined]
    assert len({recipe, Recipe.from_dict(recipe.to_dict())}) == 1


@pytest.mark.parametrize("recipe", SOME, ids=repr)
def test_gradients_are_e5m2_where_a_tensor_shares_its_scale_and_e4m3_elsewhere(recipe: Recipe) -> None:
    shared = recipe.name in ("delayed", "current")
    assert recipe.format_of("grad_output") == (E5M2 if shared else E4M3)
    assert recipe.format_of("input") == recipe.format_of("weight") == E4M3
    assert recipe.one_scale_a_tensor == shared


def test_power_of_two_scales_are_the_default_of_rows_blocks_and_mx() -> None:
    assert [RECIPES[name]().power_of_two_scales for name in ("delayed", "current", "rowwise", "block", "mx")] == [
        *(False, False, True, True, True)
    ]
