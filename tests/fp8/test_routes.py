"""FP8 as a policy asks for it: which layers, why the others not, and that the model stays what it is."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn.utils import parametrizations

from lightning_amp_plus import PrecisionPolicy, Rule, plan
from lightning_amp_plus.fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, RowwiseScaling
from lightning_amp_plus.fp8.switch import switch_fp8
from lightning_amp_plus.routing import RoutePlan, undo


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(32, 32)
            self.block = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32, bias=False))
            self.router = nn.Linear(32, 16)
            self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
            self.head = nn.Linear(32, 32)

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.block(x))


class Lora(nn.Linear):
    def forward(self, input: Any) -> Any:
        return super().forward(input) + 1


class Mixed(nn.Module):
    """One layer that fits, and others of every kind that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2)
        self.norm = nn.LayerNorm(32)
        self.lora = Lora(32, 32)
        self.fit, self.narrow, self.plain, self.head = (nn.Linear(inner, 32) for inner in (32, 4, 32, 32))


def fp8(**arguments: Any) -> PrecisionPolicy:
    return PrecisionPolicy("fp8", **arguments)


def computes(routes: RoutePlan) -> dict[str, str]:
    return {route.name: route.compute for route in routes.routes}


def loss_of(model: nn.Module) -> Any:
    tokens = torch.arange(64).reshape(2, 32) % 32
    with torch.autocast("cpu", torch.bfloat16):
        return model(tokens).float().square().mean()


# -------------------------------------------------------------------- which, and why


def test_linear_layers_compute_in_fp8_and_every_other_module_says_why_not() -> None:
    routes = plan(Net(), fp8())
    assert [name for name, compute in computes(routes).items() if compute == "fp8"] == ["block.1", "block.3"]
    assert "only Linear layers" in routes["block.0"].reason and "only Linear layers" in routes["embedding"].reason
    assert "router" in routes["router"].reason and "logits" in routes["head"].reason
    assert "MultiheadAttention" in routes["attention.out_proj"].reason
    row = routes["block.1"]
    assert (row.input, row.weight, row.output, row.accumulator, row.params) == ("e4m3", "e4m3", "bf16", "fp32", "fp32")
    assert "current, reference" in str(routes)


def test_a_layer_that_a_rule_names_computes_in_fp8_whatever_its_name() -> None:
    routes = plan(Net(), PrecisionPolicy("bf16", rules=[Rule("head", compute="fp8", recipe="rowwise")]))
    assert [name for name, compute in computes(routes).items() if compute == "fp8"] == ["head"]
    assert routes["head"].fp8 is not None and routes["head"].fp8.recipe == RowwiseScaling()


def test_a_rule_on_a_container_reaches_the_linear_layers_in_it() -> None:
    routes = plan(Net(), PrecisionPolicy("bf16", rules=[Rule("block", compute="fp8", recipe=BlockScaling())]))
    assert computes(routes)["block.1"] == computes(routes)["block.3"] == "fp8" and computes(routes)["block"] == "bf16"
    assert "inherited from 'block'" in routes["block.1"].reason


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(32, 32)
        self.head = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32))
        self.router = nn.ModuleDict({"base_layer": nn.Linear(32, 16), "lora_A": nn.Linear(32, 16)})


def test_a_head_or_a_router_of_several_layers_stays_in_high_precision_unless_a_rule_names_it() -> None:
    routes = plan(Scored(), fp8())
    assert [route.name for route in routes.routes if route.fp8] == ["body"]
    assert "logits" in routes["head.1"].reason and "router" in routes["router.base_layer"].reason
    for match in ("head", "head.*", "head.1"):
        routes = plan(Scored(), PrecisionPolicy("bf16", rules=[Rule(match, compute="fp8")]))
        assert [route.name for route in routes.routes if route.fp8] == ["head.1"], match


def test_a_rule_takes_a_layer_out_of_fp8() -> None:
    routes = plan(Net(), fp8(rules=[Rule("block.3", compute="bf16", reason="too sensitive")]))
    assert computes(routes)["block.3"] == "bf16" and computes(routes)["block.1"] == "fp8"


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (fp8(), ["The policy asks for FP8", "no module", "in_features=4"]),
        (PrecisionPolicy("bf16", rules=[Rule("0", compute="fp8")]), ["Rule '0'", "in_features=4", "fallback='bf16'"]),
        (PrecisionPolicy("bf16", rules=[Rule("type:Linear", compute="fp8")]), ["Rule 'type:Linear'", "no module"]),
        (PrecisionPolicy("bf16", rules=[Rule("type:ReLU", compute="fp8")]), ["Rule 'type:ReLU'", "only Linear"]),
    ],
    ids=["the policy", "a rule by name", "a rule by class", "a rule on what is no Linear"],
)
def test_fp8_that_would_run_nowhere_is_an_error(policy: PrecisionPolicy, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        plan(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), policy)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("policy", "words"),
    [(fp8(), "The policy"), (PrecisionPolicy("bf16", rules=[Rule("0", compute="fp8")]), "Rule '0'")],
    ids=["policy", "rule"],
)
def test_attention_alone_has_no_layer_for_fp8(policy: PrecisionPolicy, words: str) -> None:
    with pytest.raises(ValueError, match=rf"{words} asks for FP8.*no Linear layer in it that is called by itself"):
        plan(nn.Sequential(nn.MultiheadAttention(32, 2)), policy)


@pytest.mark.parametrize("compute", ["bf16", "fp8"])
def test_a_rule_whose_layers_all_go_by_later_rules_is_content(compute: Any) -> None:
    later = [Rule(f"block.{index}", compute=compute) for index in (1, 3)]
    for match in ("block", "block.*"):
        routes = plan(Net(), PrecisionPolicy("bf16", rules=[Rule(match, compute="fp8", recipe="rowwise"), *later]))
        assert {routes[f"block.{index}"].compute for index in (1, 3)} == {compute}
    assert plan(nn.Linear(16, 16), fp8(rules=[Rule("*", compute="bf16")]))[""].compute == "bf16"
    with pytest.raises(ValueError, match="The policy asks for FP8"):  # what goes by a rule could not have had it
        plan(nn.Sequential(nn.Linear(32, 10), nn.Linear(5, 5)), fp8(rules=[Rule("0", compute="fp32")]))


def test_a_fallback_that_the_policy_allows_is_listed_with_its_reason() -> None:
    policy = PrecisionPolicy("fp8", fallback="bf16", rules=[Rule("0", compute="fp8")])
    routes = plan(nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 32)), policy)
    assert computes(routes) == {"": "bf16", "0": "bf16", "1": "fp8"}
    assert routes["0"].reason == "shape: in_features=4 is no multiple of 16"


def test_layers_in_fp8_and_those_left_out_are_counted_with_what_kept_them_out() -> None:
    policy = PrecisionPolicy("fp8", fallback="bf16", rules=[Rule("1", compute="fp8", recipe="mx", backend="torchao")])
    tied = nn.Linear(32, 32)
    routes = plan(nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 32), tied, tied, nn.ReLU()), policy)
    assert routes.notes == ("1 Linear layer in FP8; 2 that were to do not (backend 1, shape 1; see their reasons).",)
    assert str(routes).endswith(routes.notes[0])
    assert plan(nn.Sequential(nn.Linear(4, 32)), "bf16-mixed").notes == ()


def test_heads_and_forwards_of_their_own_count_as_others_and_what_is_no_layer_of_its_own_does_not() -> None:
    routes = plan(Mixed(), fp8(rules=[Rule("plain", compute="bf16")]))
    assert routes.notes == ("1 Linear layer in FP8; 3 that were to do not (other 2, shape 1; see their reasons).",)


def left_out(policy: PrecisionPolicy) -> dict[str, str]:
    return {route.name: route.left_out for route in plan(Mixed(), policy).routes}


def test_every_module_that_was_to_be_in_fp8_and_is_not_says_of_what_kind_its_obstacle_is() -> None:
    unfit = [Rule("plain", compute="fp8", recipe="mx", backend="torchao"), Rule("norm", compute="fp32")]
    assert left_out(fp8(fallback="bf16", rules=unfit)) == {
        "": "op",
        "attention": "op",
        "attention.out_proj": "op",
        "norm": "",
        "lora": "op",
        "fit": "",
        "narrow": "shape",
        "plain": "backend",
        "head": "rule",
    }


def test_a_module_that_no_rule_wants_in_fp8_is_not_left_out() -> None:
    assert set(left_out(PrecisionPolicy("bf16")).values()) == {""}
    by_rule = left_out(PrecisionPolicy("bf16", rules=[Rule("[!a]*", compute="fp8")]))
    assert {name for name, kind in by_rule.items() if kind} == {"norm", "lora", "narrow", "head"}
    attention = left_out(fp8(rules=[Rule("attention", compute="bf16")]))
    assert attention["attention"] == attention["attention.out_proj"] == "" and attention["norm"] == "op"


def test_mx_asks_for_multiples_of_32() -> None:
    rules = [Rule("type:Linear", compute="fp8", recipe=MXScaling())]
    routes = plan(nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 64)), PrecisionPolicy("bf16", rules=rules))
    assert computes(routes)["0"] == "bf16" and "no multiple of 32" in routes["0"].reason
    assert computes(routes)["1"] == "fp8"


@pytest.mark.parametrize(
    ("settings", "when"),
    [
        ({"fp8_after_steps": 7}, "after 7 applied steps"),
        ({"fp8_when_stable": True}, "once loss and gradient norm are quiet"),
        ({"fp8_after_steps": 7, "fp8_when_stable": True}, "after 7 applied steps, and once loss and gradient norm"),
    ],
)
def test_the_plan_says_what_fp8_waits_for(settings: dict[str, Any], when: str) -> None:
    routes = plan(Net(), fp8(**settings))
    assert f"FP8 begins {when}" in str(routes) and "until then its modules compute in BF16" in str(routes)
    assert RoutePlan.from_json(routes.to_json()) == routes
    assert not any("begins" in note for note in plan(Net(), fp8()).notes)


def test_fp16_around_fp8_is_refused() -> None:
    with pytest.raises(ValueError, match=r"FP8 in a rule.*compute='bf16'"):
        PrecisionPolicy("fp16", rules=[Rule("block", compute="fp8")])


def test_a_linear_with_a_forward_of_its_own_stays_as_it_is() -> None:
    routes = plan(nn.Sequential(Lora(32, 32), nn.Linear(32, 32)), fp8())
    assert computes(routes)["0"] == "bf16" and "Lora has a forward of its own" in routes["0"].reason


def test_a_plan_with_fp8_comes_back_from_json_and_can_be_applied() -> None:
    routes = plan(
        Net(), fp8(rules=[Rule("block.1", recipe=RowwiseScaling(weight_grad="high"), gemms=["fprop", "wgrad"])])
    )
    again = RoutePlan.from_json(routes.to_json())
    assert again == routes
    assert routes["block.1"].fp8 is not None and routes["block.1"].fp8.gemms == ("fprop",)
    again.apply(Net())
    assert json.loads(json.dumps(routes.describe()))["fp8"]["block.3"]["recipe"]["name"] == "current"


def test_a_plan_in_json_keeps_the_kind_of_obstacle_only_where_there_is_one_and_a_manifest_none() -> None:
    routes = plan(Mixed(), fp8())
    written = {route["name"]: route for route in json.loads(routes.to_json())["routes"]}
    assert written["head"]["left_out"] == "rule" and "fp8" not in written["head"]
    assert "left_out" not in written["fit"] and written["fit"]["fp8"]["backend"] == "reference"
    again = RoutePlan.from_json(routes.to_json())
    assert again == routes and again["narrow"].left_out == "shape" and again["fit"].left_out == ""
    assert not any({"left_out", "fp8"} & set(route) for route in routes.describe()["routes"].values())
    assert not any("left_out" in route.to_dict() for route in plan(Mixed(), "bf16-mixed").routes)


# -------------------------------------------------------------------- the model stays what it is


@pytest.mark.parametrize("width", [100, 140])
def test_a_terminal_shows_how_and_why_before_formats(width: int) -> None:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(plan(Net(), fp8()))
    shown = capture.get()
    assert "current, reference" in shown and "small differences" in shown and "computes inside its" in shown
    assert max(map(len, shown.splitlines())) <= width and "no room for: " in shown


def test_conversion_keeps_names_parameters_hooks_flags_and_state() -> None:
    model = Net()
    model.block[1].weight.requires_grad_(False)
    seen: list[int] = []
    model.block[3].register_forward_hook(lambda *_: seen.append(1))
    before, names = dict(model.named_parameters()), list(model.state_dict())
    plan(model, fp8()).apply(model)
    assert list(model.state_dict()) == names
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert isinstance(model.block[1], nn.Linear) and not model.block[1].weight.requires_grad
    loss_of(model).backward()
    assert seen == [1] and model.block[1].weight.grad is None and model.block[3].weight.grad is not None
    assert "compute=fp8 (current, reference)" in repr(model.block[1])
    undo(model)
    assert type(model.block[1]) is nn.Linear


def test_a_root_that_is_a_linear_converts() -> None:
    layer = nn.Linear(32, 32)
    plan(layer, fp8()).apply(layer)
    assert "fp8" in repr(layer) and layer(torch.randn(3, 32)).dtype == torch.bfloat16


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_compute_in_fp8_too(copied: Any) -> None:
    model = Net()
    plan(model, fp8()).apply(model)
    assert torch.equal(loss_of(copied(model)), loss_of(model))


def test_training_is_fp8_and_evaluation_is_bf16_unless_asked() -> None:
    plain, model, asked = Net(), Net(), Net()
    plan(plain, PrecisionPolicy("bf16")).apply(plain)
    plan(model, fp8()).apply(model)
    plan(asked, fp8(fp8_in_evaluation=True)).apply(asked)
    assert not torch.equal(loss_of(model), loss_of(plain)) and torch.equal(loss_of(model), loss_of(asked))
    assert loss_of(model).item() == pytest.approx(loss_of(plain).item(), rel=0.05)
    for net in (plain, model, asked):
        net.eval()
    assert torch.equal(loss_of(model), loss_of(plain)) and not torch.equal(loss_of(asked), loss_of(plain))


def test_fp8_can_be_switched_off_and_on_again() -> None:
    plain, model = Net(), Net()
    plan(plain, PrecisionPolicy("bf16")).apply(plain)
    plan(model, fp8()).apply(model)
    in_fp8 = loss_of(model)
    assert switch_fp8(model, on=False) == 2 and torch.equal(loss_of(model), loss_of(plain))
    assert switch_fp8(model, on=True) == 2 and torch.equal(loss_of(model), in_fp8)


def test_a_shared_layer_is_one_layer_and_a_parametrized_one_computes_from_what_it_makes() -> None:
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": parametrizations.weight_norm(nn.Linear(32, 32))})
    routes = plan(model, fp8())
    routes.apply(model)
    assert model["a"] is model["b"] and computes(routes) == {
        **{"": "bf16", "a": "fp8", "b": "fp8", "c": "fp8"},
        **{name: "bf16" for name in computes(routes) if name.startswith("c.")},
    }
    x = torch.randn(4, 32)
    model["c"](model["b"](model["a"](x))).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("recipe", [CurrentScaling(), DelayedScaling()], ids=repr)
def test_a_compiled_model_has_no_graph_break_and_gives_the_same(recipe: Any) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
    plan(model, PrecisionPolicy("bf16", rules=[Rule("type:Linear", compute="fp8", recipe=recipe)])).apply(model)
    x = torch.randn(4, 32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(x), model(x))


def test_recipes_differ_in_what_they_compute() -> None:
    losses = set()
    for recipe in (CurrentScaling(), CurrentScaling(power_of_two=True), RowwiseScaling(power_of_two=False)):
        model = Net()
        plan(model, PrecisionPolicy("bf16", rules=[Rule("block", compute="fp8", recipe=recipe)])).apply(model)
        losses.add(loss_of(model).item())
    assert len(losses) == 3


def test_a_glob_or_a_class_names_no_layer_in_particular() -> None:
    for match in ("*", "type:Linear"):
        routes = plan(Net(), PrecisionPolicy("bf16", rules=[Rule(match, compute="fp8")]))
        assert [route.name for route in routes.routes if route.fp8] == ["block.1", "block.3"], match
    routes = plan(Net(), PrecisionPolicy("bf16", rules=[Rule("*head", compute="bf16"), Rule("head", compute="fp8")]))
    assert routes["head"].compute == "fp8"


def test_a_policy_whose_layers_all_have_rules_of_their_own_is_content() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))
    assert plan(model, fp8(rules=[Rule("0", recipe="delayed")]))["0"].compute == "fp8"


def test_two_rules_on_a_container_and_on_what_is_in_it_are_both_heard() -> None:
    rules = [Rule("block", compute="fp8"), Rule("block.*", compute="fp8", recipe="rowwise")]
    routes = plan(Net(), PrecisionPolicy("bf16", rules=rules))
    assert routes["block.1"].fp8 is not None and routes["block.1"].fp8.recipe == RowwiseScaling()


def test_a_recipe_that_leaves_no_gemm_in_fp8_is_refused() -> None:
    rules = [Rule("block", compute="fp8", recipe=RowwiseScaling(weight_grad="high"), gemms=["wgrad"])]
    with pytest.raises(ValueError, match="leaves no GEMM in FP8"):
        plan(Net(), PrecisionPolicy("bf16", rules=rules))


@pytest.mark.parametrize("recipe", [CurrentScaling(), DelayedScaling()], ids=repr)
def test_blocks_compiled_one_by_one_train(recipe: Any) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2)))
    plan(model, PrecisionPolicy("bf16", rules=[Rule("type:Linear", compute="fp8", recipe=recipe)])).apply(model)
    for block in model:
        block.compile(backend="aot_eager")
    for _ in range(2):
        model(torch.randn(4, 16)).float().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_plan_makes_no_parametrized_weight() -> None:
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Embedding(16, 32)), parametrizations.spectral_norm(nn.Linear(32, 32))
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert plan(model, fp8())["1"].compute == "fp8"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("backend", ["reference", "torchao", None])
def test_a_parametrized_weight_is_made_once_a_call(backend: Any) -> None:
    models = [nn.Sequential(nn.Linear(32, 32)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        torch.manual_seed(0)
        parametrizations.spectral_norm(model[0])
    rules = [Rule("0", compute="fp8", backend=backend)]
    plan(models[0], PrecisionPolicy("bf16", rules=rules)).apply(models[0])
    for on in (True, False):
        switch_fp8(models[0], on)
        for model in models:
            model(torch.ones(4, 32))
    ours, theirs = (model.state_dict() for model in models)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_undo_leaves_nothing_behind() -> None:
    model = Net()
    before = set(vars(model.block[1]))
    plan(model, PrecisionPolicy("bf16", rules=[Rule("block", compute="fp8", recipe="delayed")])).apply(model)
    undo(model)
    assert set(vars(model.block[1])) == before
