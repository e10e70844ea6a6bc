"""plan() as a pure decision: which rule wins where, what is refused, and how a plan is read and stored."""

import copy
import io
import json
from typing import Any

import pytest
import torch
import torchmetrics
from rich.console import Console
from torch import nn

from lightning_amp_plus.policy import PrecisionPolicy, Rule
from lightning_amp_plus.routing import RoutePlan, apply, outline, plan, undo


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(4, 4)
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(self.attn(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)
        self.register_buffer("inv_freq", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def bf16(*rules: Rule, **options: Any) -> PrecisionPolicy:
    return PrecisionPolicy("bf16", rules=rules, **options)


def computes(model: nn.Module, policy: PrecisionPolicy) -> dict[str, str]:
    return {route.name: route.compute for route in plan(model, policy).routes}


def test_without_rules_every_module_follows_the_policy() -> None:
    made = plan(Net(), bf16())
    assert {route.compute for route in made.routes} == {"bf16"}
    assert {route.reason for route in made.routes} == {"compute of the policy"}
    assert [route.name for route in made.routes] == [name for name, _ in Net().named_modules()]


def test_a_rule_reaches_the_module_and_everything_below_it() -> None:
    found = computes(Net(), bf16(Rule("blocks.0", compute="fp32")))
    assert {name for name, compute in found.items() if compute == "fp32"} == {
        name for name in found if name.startswith("blocks.0")
    }


def test_the_last_matching_rule_wins() -> None:
    made = plan(Net(), bf16(Rule("head", compute="fp32"), Rule("hea*", compute="fp16")))
    assert (made["head"].compute, made["head"].rule) == ("fp16", "hea*")


def test_a_rule_on_a_child_beats_one_on_its_parent_whatever_the_order() -> None:
    rules = [Rule("blocks.0.mlp", compute="fp16"), Rule("blocks.0", compute="fp32")]
    for order in (rules, rules[::-1]):
        found = computes(Net(), bf16(*order))
        assert (found["blocks.0.mlp.0"], found["blocks.0.attn"]) == ("fp16", "fp32")


def test_a_rule_without_compute_means_that_of_the_policy() -> None:
    found = computes(Net(), bf16(Rule("blocks", compute="fp32"), Rule("blocks.1")))
    assert (found["blocks.0.attn"], found["blocks.1.attn"]) == ("fp32", "bf16")


def test_a_class_name_matches_subclasses_too() -> None:
    class OurNorm(nn.LayerNorm):
        pass

    model = nn.Sequential(nn.LayerNorm(2), OurNorm(2), nn.Linear(2, 2))
    assert list(computes(model, bf16(Rule("type:LayerNorm", compute="fp32"))).values()) == [
        "bf16",
        "fp32",
        "fp32",
        "bf16",
    ]
    assert list(computes(model, bf16(Rule("type:*Norm", compute="fp32"))).values()) == ["bf16", "fp32", "fp32", "bf16"]


def test_matching_is_case_sensitive() -> None:
    with pytest.raises(ValueError, match="case-sensitive"):
        plan(Net(), bf16(Rule("Head", compute="fp32")))


def test_reasons_say_where_a_route_comes_from() -> None:
    made = plan(Net(), bf16(Rule("blocks.0.mlp", compute="fp32", reason="outliers"), Rule("head", compute="fp32")))
    assert made["blocks.0.mlp"].reason == "outliers"
    assert made["blocks.0.mlp.2"].reason == "inherited from 'blocks.0.mlp': outliers"
    assert made["blocks.0.mlp.2"].rule == "blocks.0.mlp"
    assert made["head"].reason == "matches 'head'"


def test_any_name_of_a_shared_module_counts_and_all_are_listed() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2)})
    model["b"] = nn.ModuleDict({"same": model["a"]})
    found = computes(model, bf16(Rule("b.same", compute="fp32")))
    assert found == {"": "bf16", "a": "fp32", "b": "bf16", "b.same": "fp32"}


def test_a_shared_module_inherits_from_the_parent_of_its_first_name() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared)})
    assert computes(model, bf16(Rule("a", compute="fp32")))["b.0"] == "fp32"
    assert computes(model, bf16(Rule("b", compute="fp32")))["b.0"] == "bf16"


def test_compiled_modules_go_by_their_own_names() -> None:
    model = Net()
    model.head = torch.compile(model.head, backend="eager")  # type: ignore[assignment]
    made = plan(torch.compile(model, backend="eager"), bf16(Rule("head", compute="fp32")))  # type: ignore[arg-type]
    assert [route.name for route in made.routes] == [name for name, _ in Net().named_modules()]
    assert made["head"].module_type == "Linear"
    assert made["_orig_mod.head._orig_mod"] is made["head"]


@pytest.mark.parametrize(
    ("match", "message"),
    [
        ("haed", "Rule 'haed' matches no module or buffer. Close to it: 'head'"),
        ("blocks.7.attn", "Close to it: 'blocks.[01].attn'"),
        ("type:LayerNrom", "Rule 'type:LayerNrom' matches no class name in the model. Close to it: 'LayerNorm'"),
    ],
)
def test_a_rule_that_matches_nothing_is_refused_with_close_names(match: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(Net(), bf16(Rule(match, compute="fp32")))


def test_the_whole_model_is_matched_only_if_it_is_a_single_layer() -> None:
    assert computes(nn.Linear(2, 2), bf16(Rule("type:Linear", compute="fp32"))) == {"": "fp32"}
    with pytest.raises(ValueError, match=r"only the whole model.*set the policy's compute"):
        plan(Net(), bf16(Rule("type:Net", compute="fp32")))


def test_a_rule_may_be_shadowed_by_later_ones() -> None:
    assert computes(Net(), bf16(Rule("head", compute="fp32"), Rule("head", compute="fp16")))["head"] == "fp16"


def test_a_rule_on_buffers_keeps_them_and_may_not_compute() -> None:
    assert plan(Net(), bf16(Rule("inv_*"), params="bf16")).kept_buffers == ("inv_freq",)
    assert plan(Net(), bf16(Rule("*", compute="bf16"), params="bf16")).kept_buffers == ()
    with pytest.raises(ValueError, match=r"only buffers .'inv_freq'.*leave out compute='fp16'"):
        plan(Net(), bf16(Rule("inv_freq", compute="fp16")))


def test_metrics_stay_in_fp32_and_only_an_exact_name_asking_otherwise_is_refused() -> None:
    model = nn.ModuleDict(
        {
            "head": nn.Linear(2, 2),
            "accuracy": torchmetrics.MeanSquaredError(),
            "more": torchmetrics.MetricCollection([torchmetrics.MeanAbsoluteError()]),
        }
    )
    made = plan(model, bf16(Rule("*", compute="fp16")))
    assert made["head"].compute == "fp16"
    for name in ("accuracy", "more", "more.MeanAbsoluteError"):
        assert made[name].compute == "fp32"
        assert "torchmetrics" in made[name].reason
    plan(model, bf16(Rule("accuracy", compute="fp32")))
    with pytest.raises(ValueError, match=r"compute='bf16' of 'accuracy'.*Metrics always compute in FP32"):
        plan(model, bf16(Rule("accuracy", compute="bf16")))


def test_the_output_projection_of_an_attention_goes_with_the_attention() -> None:
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(4, 2)})
    assert computes(model, bf16(Rule("type:Linear", compute="fp32")))["attn.out_proj"] == "bf16"
    assert computes(model, bf16(Rule("attn", compute="fp32")))["attn.out_proj"] == "fp32"
    with pytest.raises(ValueError, match="never calls its out_proj"):
        plan(model, bf16(Rule("attn.out_proj", compute="fp32")))


def test_planning_changes_nothing_and_draws_no_random_number() -> None:
    model = Net()
    before = copy.deepcopy(model.state_dict())
    classes = [type(module) for module in model.modules()]
    attributes = [dict(vars(module)) for module in model.modules()]
    random_state = torch.get_rng_state()
    plan(model, bf16(Rule("head", compute="fp32")))
    assert torch.equal(random_state, torch.get_rng_state())
    assert [type(module) for module in model.modules()] == classes
    assert [dict(vars(module)) for module in model.modules()] == attributes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_on_the_meta_device_plans_like_a_real_one() -> None:
    with torch.device("meta"):
        model = Net()
    policy = bf16(Rule("head", compute="fp32"))
    assert plan(model, policy) == plan(Net(), policy)


def test_columns_say_what_each_layer_sees_and_gives() -> None:
    made = plan(Net(), bf16(Rule("head", compute="fp32")))
    linear, head, norm = made["blocks.0.attn"], made["head"], made["blocks.0.norm"]
    assert (linear.params, linear.input, linear.weight, linear.output) == ("fp32", "bf16", "bf16", "bf16")
    assert (head.params, head.input, head.weight, head.output) == ("fp32",) * 4
    assert (norm.accumulator, made["blocks"].input, made["blocks.0"].output) == ("-", "-", "-")


@pytest.mark.parametrize(("master_weights", "state"), [(False, "bf16"), (True, "fp32")])
def test_true_policies_show_stored_formats_and_the_optimizer_state(master_weights: bool, state: str) -> None:
    policy = bf16(Rule("head", compute="fp32"), params="bf16", master_weights=master_weights)
    head = plan(Net(), policy)["head"]
    assert (head.params, head.optimizer) == ("bf16", state)
    assert (head.input, head.weight, head.output) == ("fp32", "fp32", "fp32")


def test_a_parameter_found_in_another_format_is_shown_as_found() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2).bfloat16(), "b": nn.Linear(2, 2).double(), "c": nn.Linear(2, 2)})
    model["c"].bias.data = model["c"].bias.data.half()
    made = plan(model, bf16())
    assert [made[name].params for name in "abc"] == ["bf16", "fp64", "fp16+fp32"]


def test_a_device_that_is_not_present_leaves_operations_open() -> None:
    made = plan(Net(), bf16(), hardware=torch.device("xpu"))
    assert made.device_type == "xpu"
    assert (made["head"].compute, made["head"].params, made["head"].weight) == ("bf16", "fp32", "-")


def test_an_operation_that_cannot_run_is_named_in_the_plan() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bilinear = nn.Bilinear(2, 2, 2).bfloat16()

    # CPU autocast leaves bilinear alone, so FP16 inputs would meet BF16 weights.
    found = plan(Inner(), PrecisionPolicy("fp16"))["bilinear"]
    assert "cannot run in fp16 on cpu" in found.reason


def test_a_plan_survives_json_and_unknown_keys_are_refused() -> None:
    made = plan(Net(), bf16(Rule("head", compute="fp32", reason="logits"), Rule("inv_freq")))
    assert RoutePlan.from_json(made.to_json()) == made
    assert RoutePlan.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    with pytest.raises(ValueError, match=r"unknown keys \['extra'\] and lacks \['routes'\]"):
        RoutePlan.from_dict({key: value for key, value in made.to_dict().items() if key != "routes"} | {"extra": 1})


def test_a_stored_plan_can_be_applied() -> None:
    made = plan(Net(), bf16(Rule("head", compute="fp32")))
    model = Net()
    RoutePlan.from_json(made.to_json()).apply(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.ones(1, 4)).dtype is torch.float32


def test_the_description_is_plain_and_names_formats_by_module() -> None:
    policy = bf16(Rule("head", compute="fp32"))
    described = plan(Net(), policy).describe()
    assert json.loads(json.dumps(described)) == described
    assert described["routes"]["head"]["compute"] == "fp32"
    assert described["device_type"] == "cpu"


def test_the_outline_is_the_part_of_the_plan_that_needs_no_probing() -> None:
    policy = PrecisionPolicy("bf16", params="bf16", master_weights=True, rules=[Rule("head", compute="fp32")])
    routes = plan(Net(), policy).describe()["routes"]
    outlined = outline(Net(), policy)["routes"]
    assert outlined["head"] == {"compute": "fp32", "params": "bf16", "optimizer": "fp32"}
    assert outlined == {name: {key: route[key] for key in outlined[""]} for name, route in routes.items()}


def test_printing_shows_modules_formats_rules_and_reasons() -> None:
    made = plan(Net(), bf16(Rule("head", compute="fp32", reason="[logits]")))
    lines = str(made).splitlines()
    assert lines[0].split() == [
        *("module", "compute", "parameter", "input", "weight", "output", "accumulator", "optimizer", "rule", "reason")
    ]
    assert next(line for line in lines if line.startswith("head")).split() == ["head"] + ["fp32"] * 7 + [
        "head",
        "[logits]",
    ]
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(made)
    assert "[logits]" in console.export_text()


def test_an_unknown_name_is_refused_with_known_ones() -> None:
    with pytest.raises(KeyError, match="no module 'tail'"):
        plan(nn.Linear(1, 1), bf16())["tail"]


def test_a_plan_of_another_model_is_refused_before_anything_changes() -> None:
    made = plan(Net(), bf16(Rule("head", compute="fp32")))
    other = Net()
    other.tail = nn.Linear(2, 2)
    other.head = nn.Identity()  # type: ignore[assignment]
    del other.blocks[1]
    with pytest.raises(
        ValueError, match=r"not in the model: 'blocks.1'.*not in the plan: 'tail'.*another class: 'head'"
    ):
        apply(made, other)
    assert not any(hasattr(module, "_amp_route") for module in other.modules())


def test_a_scripted_module_that_needs_a_route_is_refused() -> None:
    model = nn.ModuleDict({"a": torch.jit.script(nn.Linear(2, 2))})
    plan(model, bf16())
    with pytest.raises(TypeError, match=r"'a'.*TorchScript"):
        plan(model, bf16(Rule("a", compute="fp32")))


def test_a_module_whose_forward_was_replaced_is_refused() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2)})
    model["a"].forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(TypeError, match=r"'a'.*replaced on the instance"):
        plan(model, bf16(Rule("a", compute="fp32")))


def test_planning_a_routed_model_gives_the_same_plan() -> None:
    model, policy = Net(), bf16(Rule("head", compute="fp32"), Rule("type:LayerNorm", compute="fp32"))
    made = plan(model, policy)
    made.apply(model)
    assert plan(model, policy) == made
    undo(model)
    assert plan(model, policy) == made
