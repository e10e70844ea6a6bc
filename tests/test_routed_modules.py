"""What a routed model really computes in, however it is called, and what routing leaves alone."""

import copy
import gc
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_amp_plus.policy import PrecisionPolicy, Rule
from lightning_amp_plus.routing import apply, plan, undo

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


class Spy(nn.Linear):
    """Notes the formats of its weight, of a GEMM and of its input at every call."""

    def __init__(self, features: int = 4) -> None:
        super().__init__(features, features)
        self.weights: list[torch.dtype] = []
        self.gemms: list[torch.dtype] = []
        self.inputs: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.append(x.dtype)
        self.weights.append(self.weight.dtype)
        result = super().forward(x)
        self.gemms.append(result.dtype)
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = Spy()
        self.b = Spy()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))

    def encode(self, x: Tensor) -> Tensor:
        return x @ self.b.weight

    def stream(self, x: Tensor) -> Iterator[Tensor]:
        yield self.a(x)

    @staticmethod
    def scale(x: float) -> float:
        return 2 * x

    @classmethod
    def build(cls) -> "Block":
        return cls()

    @property
    def width(self) -> int:
        return self.a.in_features


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = Spy()
        self.block = Block()
        self.after = Spy()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.block(self.before(x)))


def routed(model: nn.Module, policy: PrecisionPolicy, *rules: Rule) -> nn.Module:
    policy = PrecisionPolicy.from_dict(policy.to_dict() | {"rules": rules})
    plan(model, policy).apply(model)
    return model


MIXED, TRUE, FULL = (PrecisionPolicy.from_string(name) for name in ("bf16-mixed", "bf16-true", "32-true"))


def surrounding(policy: PrecisionPolicy) -> torch.autocast:
    on = policy.base_compute != "fp32" and not policy.is_true
    return torch.autocast("cpu", BF16 if on else None, enabled=on)


def run(model: Callable[..., Any], policy: PrecisionPolicy, features: int = 4) -> Any:
    with surrounding(policy):
        return model(torch.ones(2, features, dtype=BF16 if policy.is_true else FP32))


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("policy", [MIXED, TRUE, FULL], ids=["mixed", "true", "full"])
def test_a_matched_module_computes_in_its_format_and_its_neighbors_in_theirs(
    policy: PrecisionPolicy, compute: Any
) -> None:
    net = routed(Net(), policy, Rule("block", compute=compute))
    result = run(net, policy)
    expected = {"fp32": FP32, "bf16": BF16, "fp16": FP16}[compute]
    base = FP32 if policy is FULL else BF16
    assert (net.block.a.gemms, net.block.b.gemms) == ([expected], [expected])
    assert (net.before.gemms, net.after.gemms, result.dtype) == ([base], [base], base)


def test_nothing_is_cast_back_where_a_16_bit_route_ends() -> None:
    net = routed(Net(), FULL, Rule("block", compute="bf16"))
    assert net.block(torch.ones(1, 4)).dtype is BF16
    assert run(net, FULL).dtype is FP32
    assert net.after.inputs == [FP32]
    # A function of torch between the two gets what the route returned.
    with pytest.raises(RuntimeError, match="dtype"):
        torch.nn.functional.linear(net.block(torch.ones(1, 4)), torch.ones(4, 4))


def test_metrics_alone_do_not_make_a_true_model_mixed() -> None:
    model = routed(nn.ModuleDict({"layer": Spy(), "metric": torchmetrics.MeanSquaredError()}), TRUE)
    assert type(model["layer"]) is Spy
    assert model["metric"].sum_squared_error.dtype is FP32


def test_fp32_inputs_are_widened_in_nested_collections_and_nothing_else() -> None:
    class Taker(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return args, kwargs

    model = routed(nn.ModuleDict({"taker": Taker(), "rest": nn.Linear(1, 1)}), MIXED, Rule("taker", compute="fp32"))
    half, double, index = (
        torch.ones(1, dtype=FP16),
        torch.ones(1, dtype=torch.float64),
        torch.ones(1, dtype=torch.int64),
    )
    untouched = [double, index, "text", None]
    args, kwargs = model["taker"]([half, (half, {"x": half})], untouched, more={"y": half, "z": double})
    assert args[0][0].dtype is args[0][1][0].dtype is args[0][1][1]["x"].dtype is kwargs["more"]["y"].dtype is FP32
    assert args[1] is untouched
    assert kwargs["more"]["z"] is double


def test_packed_sequences_are_widened_too() -> None:
    model = routed(nn.ModuleDict({"rnn": nn.GRU(3, 4), "rest": nn.Linear(1, 1)}), MIXED, Rule("rnn", compute="fp32"))
    packed = nn.utils.rnn.pack_sequence([torch.ones(2, 3, dtype=BF16)])
    output, _ = model["rnn"](packed)
    assert output.data.dtype is FP32


@pytest.mark.parametrize("policy", [MIXED, TRUE], ids=["mixed", "true"])
def test_rules_nest(policy: PrecisionPolicy) -> None:
    net = routed(Net(), policy, Rule("block", compute="fp32"), Rule("block.b", compute="fp16"))
    run(net, policy)
    assert (net.block.a.gemms, net.block.b.gemms, net.after.gemms) == ([FP32], [FP16], [BF16])


@pytest.mark.parametrize("policy", [MIXED, TRUE], ids=["mixed", "true"])
def test_the_format_of_the_policy_comes_back_inside_another(policy: PrecisionPolicy) -> None:
    net = routed(Net(), policy, Rule("block", compute="fp32"), Rule("block.b", compute="bf16"))
    run(net, policy)
    assert (net.block.a.gemms, net.block.b.gemms) == ([FP32], [BF16])


@pytest.mark.parametrize("policy", [MIXED, TRUE], ids=["mixed", "true"])
def test_methods_called_directly_run_in_the_route(policy: PrecisionPolicy) -> None:
    net = routed(Net(), policy, Rule("block", compute="fp32"))
    assert run(net.block.encode, policy).dtype is FP32
    assert run(net.block.a, policy).dtype is FP32
    assert net.block.scale(2.0) == 4.0
    assert net.block.width == 4
    assert type(net.block.build()) is type(net.block)
    assert net.block.encode.__name__ == "encode"


@pytest.mark.parametrize("container", [nn.ModuleList, nn.Sequential])
def test_items_of_a_matched_container_run_in_its_route_one_by_one(container: Any) -> None:
    model = routed(
        nn.ModuleDict(
            {"blocks": container([Spy(), Block()]) if container is nn.ModuleList else container(Spy(), Block())}
        ),
        MIXED,
        Rule("blocks", compute="fp32"),
    )
    assert run(model["blocks"][0], MIXED).dtype is run(model["blocks"][1], MIXED).dtype is FP32
    if container is nn.Sequential:
        assert run(model["blocks"], MIXED).dtype is FP32
    else:
        assert type(model["blocks"]) is nn.ModuleList


def test_a_module_runs_in_its_route_at_every_call() -> None:
    net = routed(Net(), MIXED, Rule("block.a", compute="fp32"))
    run(lambda x: net.block.a(net.block.a(net.block.a(x))), MIXED)
    assert net.block.a.gemms == [FP32] * 3


@pytest.mark.parametrize("policy", [MIXED, TRUE], ids=["mixed", "true"])
def test_a_shared_module_keeps_one_format_whoever_calls_it(policy: PrecisionPolicy) -> None:
    shared = Spy()
    model = nn.ModuleDict({"a": nn.Sequential(Spy(), shared), "b": nn.Sequential(Spy(), shared)})
    routed(model, policy, Rule("b", compute="fp32"))
    run(model["b"], policy)
    run(model["a"], policy)
    assert (shared.gemms, model["b"][0].gemms, model["a"][0].gemms) == ([BF16, BF16], [FP32], [BF16])


@pytest.mark.parametrize("policy", [MIXED, TRUE], ids=["mixed", "true"])
def test_tied_weights_serve_both_formats_and_collect_both_gradients(policy: PrecisionPolicy) -> None:
    model = nn.ModuleDict({"a": Spy(), "b": Spy()})
    model["b"].weight = model["a"].weight
    routed(model, policy, Rule("b", compute="fp32"))
    assert model["a"].weight is model["b"].weight
    stored = BF16 if policy.is_true else FP32
    assert model["a"].weight.dtype is stored

    run(lambda x: model["a"](x), policy).sum().backward()
    of_a = model["a"].weight.grad.clone()
    run(lambda x: model["b"](model["a"](x).detach()), policy).sum().backward()
    assert (model["a"].gemms, model["b"].gemms) == ([BF16, BF16], [FP32])
    assert model["b"].weights == [FP32]
    assert model["a"].weight.grad.dtype is stored
    assert not torch.equal(model["a"].weight.grad, of_a)


def test_one_weight_under_bf16_and_nested_fp16_is_cast_for_each() -> None:
    # Autocast's cache would hand the BF16 copy to the FP16 GEMM, which raises.
    net = Net()
    net.block.b.weight = net.block.a.weight
    routed(net, MIXED, Rule("block.b", compute="fp16"))
    run(net, MIXED).sum().backward()
    assert (net.block.a.gemms, net.block.b.gemms) == ([BF16], [FP16])


@pytest.mark.parametrize("policy", [MIXED, TRUE], ids=["mixed", "true"])
def test_gradients_of_an_fp32_route_equal_those_of_plain_fp32(policy: PrecisionPolicy) -> None:
    net = routed(Net(), policy, Rule("block", compute="fp32"))
    x = torch.randn(3, 4).to(BF16)
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    for source, target in zip(net.block.parameters(), plain.parameters(), strict=True):
        target.data = source.data.float()
    with surrounding(policy):
        result = net.block(x)
    result.sum().backward()
    expected = plain(x.float())
    expected.sum().backward()
    assert torch.equal(result, expected)
    for routed_one, plain_one in zip(net.block.parameters(), plain.parameters(), strict=True):
        assert torch.equal(routed_one.grad, plain_one.grad.to(routed_one.dtype))


def test_a_failing_call_puts_the_stored_parameters_back() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.own = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            assert self.own.dtype is self.inner.weight.dtype is FP32
            raise KeyError("inside")

    model = nn.ModuleDict({"failing": Failing(), "rest": nn.Linear(1, 1)})
    before = dict(model.named_parameters())
    routed(model, TRUE, Rule("failing", compute="fp32"))
    with pytest.raises(KeyError, match="inside"):
        model["failing"](torch.ones(1))
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] and after[name].dtype is BF16 for name in before)


def test_a_write_to_the_cast_of_a_stored_parameter_is_refused() -> None:
    class Clamped(nn.Linear):
        def clamp(self) -> None:
            with torch.no_grad():
                self.weight.clamp_(-1, 1)

        def renew(self) -> None:
            self.weight = nn.Parameter(torch.zeros(2, 2))

    model = routed(nn.ModuleDict({"a": Clamped(2, 2), "rest": nn.Linear(1, 1)}), TRUE, Rule("a", compute="fp32"))
    stored = model["a"].weight
    with pytest.raises(RuntimeError, match="wrote to the FP32 cast of 'weight'"):
        model["a"].clamp()
    assert model["a"].weight is stored
    model["a"].renew()
    assert torch.equal(model["a"].weight, torch.zeros(2, 2))


def test_calls_within_a_call_see_the_cast_and_restore_the_stored_parameters() -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            x = self.linear(x)
            assert self.linear.weight.dtype is FP32
            x = x if depth == 0 else self(x, depth - 1)
            assert self.linear.weight.dtype is FP32
            return x

    model = routed(nn.ModuleDict({"deep": Recursive(), "rest": nn.Linear(1, 1)}), TRUE, Rule("deep", compute="fp32"))
    weight = model["deep"].linear.weight
    model["deep"](torch.ones(1, 2, dtype=BF16)).sum().backward()
    assert model["deep"].linear.weight is weight
    assert weight.grad.dtype is BF16


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_stored_in_bf16_run_in_fp32(kind: Any) -> None:
    model = routed(nn.ModuleDict({"rnn": kind(3, 4), "rest": nn.Linear(1, 1)}), TRUE, Rule("rnn", compute="fp32"))
    output, _ = model["rnn"](torch.ones(2, 1, 3, dtype=BF16))
    output.sum().backward()
    assert output.dtype is FP32
    assert all(
        weight is parameter
        for weight, parameter in zip(model["rnn"]._flat_weights, model["rnn"].parameters(), strict=True)
    )
    assert {parameter.grad.dtype for parameter in model["rnn"].parameters()} == {BF16}


def test_attention_with_16_bit_storage_runs_in_fp32_with_its_projection() -> None:
    model = routed(
        nn.ModuleDict({"attn": nn.MultiheadAttention(4, 2), "rest": nn.Linear(1, 1)}),
        TRUE,
        Rule("attn", compute="fp32"),
    )
    x = torch.ones(2, 1, 4, dtype=BF16)
    output, _ = model["attn"](x, x, x)
    output.sum().backward()
    assert output.dtype is FP32
    assert model["attn"].out_proj.weight.grad.dtype is BF16


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_the_fused_inference_path_does_not_bypass_a_route(compute: Any) -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = routed(
        nn.ModuleDict({"layer": layer, "rest": nn.Linear(1, 1)}),
        FULL,
        Rule("layer.linear1", compute=compute),
        Rule("layer.linear2", compute=compute),
    )
    seen: list[torch.dtype] = []
    real = torch.nn.functional.linear
    model.eval()

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is real:
                seen.append(result.dtype)
            return result

    with torch.no_grad(), Watch():
        model["layer"](torch.ones(1, 2, 4))
    assert {"bf16": BF16, "fp16": FP16}[compute] in seen


@pytest.mark.parametrize("policy", [MIXED, TRUE, FULL], ids=["mixed", "true", "full"])
@pytest.mark.parametrize(
    "match", ["encoder", "encoder.layers.1", "encoder.layers.0.linear1", "encoder.layers.0.self_attn"]
)
def test_an_encoder_with_routes_evaluates_padded_batches(policy: PrecisionPolicy, match: str) -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    model = nn.ModuleDict({"encoder": nn.TransformerEncoder(layer, 2), "rest": nn.Linear(1, 1)})
    routed(model, policy, Rule(match, compute="bf16" if policy is FULL else "fp32"))
    padding = torch.tensor([[False, False, False], [False, False, True]])
    results = []
    for train in (True, False):
        model.train(train)
        with torch.no_grad():
            results.append(
                run(lambda x: model["encoder"](x[:, None].expand(2, 3, 4), src_key_padding_mask=padding), policy)
            )
    # Layers without a route are torch's own affair: under CPU autocast they evaluate fused, in FP32.
    torch.testing.assert_close(results[0], results[1], atol=0.1, rtol=0.05, check_dtype=False)
    if match == "encoder" or policy is not MIXED:
        assert torch.equal(results[0], results[1])


def test_an_attention_routed_to_bf16_is_bf16_in_evaluation_too() -> None:
    model = routed(
        nn.ModuleDict({"attn": nn.MultiheadAttention(4, 2, batch_first=True), "rest": nn.Linear(1, 1)}),
        FULL,
        Rule("attn", compute="bf16"),
    )
    x = torch.ones(1, 2, 4)
    for train in (True, False):
        model.train(train)
        with torch.no_grad():
            assert model["attn"](x, x, x)[0].dtype is BF16
    assert not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize("policy", [MIXED, TRUE], ids=["mixed", "true"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_computes_as_the_plain_one(policy: PrecisionPolicy, backend: str) -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.inner, self.after = (
                nn.Linear(4, 4),
                nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
                nn.Linear(4, 4),
            )

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            middle = self.inner(self.before(x))
            return middle, self.after(middle)

    torch._dynamo.reset()
    model = routed(Small(), policy, Rule("inner", compute="fp32"))
    plain = run(model, policy)
    compiled = run(torch.compile(model, backend=backend, fullgraph=True), policy)
    assert [value.dtype for value in compiled] == [FP32, BF16]
    assert all(torch.equal(one, other) for one, other in zip(plain, compiled, strict=True))
    compiled[1].sum().backward()
    stored = BF16 if policy.is_true else FP32
    assert {parameter.grad.dtype for parameter in model.parameters()} == {stored}
    assert isinstance(model.inner[0].weight, nn.Parameter)


@pytest.mark.parametrize("order", ["compile first", "route first"])
@pytest.mark.parametrize("how", ["wrapper", "in place"])
def test_a_compiled_submodule_can_be_routed(order: str, how: str) -> None:
    def compile_inner() -> None:
        if how == "wrapper":
            model["inner"] = torch.compile(model["inner"], backend="eager")
        else:
            model["inner"].compile(backend="eager")

    torch._dynamo.reset()
    model = nn.ModuleDict({"inner": nn.Linear(4, 4), "rest": nn.Linear(1, 1)})
    if order == "compile first":
        compile_inner()
        run(model["inner"], MIXED)
    routed(model, MIXED, Rule("inner", compute="fp32"))
    if order == "route first":
        compile_inner()
    assert run(model["inner"], MIXED).dtype is FP32
    undo(model)
    assert run(model["inner"], MIXED).dtype is BF16


@pytest.mark.slow
def test_inductor_keeps_the_routes() -> None:
    torch._dynamo.reset()
    model = routed(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), MIXED, Rule("1", compute="fp32"))
    compiled = torch.compile(model)
    result = run(compiled, MIXED)
    assert result.dtype is FP32
    torch.testing.assert_close(result, run(model, MIXED))


@pytest.mark.parametrize("policy", [MIXED, TRUE], ids=["mixed", "true"])
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("where", ["around", "inside"])
def test_recomputation_runs_in_the_route(policy: PrecisionPolicy, use_reentrant: bool, where: str) -> None:
    class Checkpointed(Block):
        def forward(self, x: Tensor) -> Tensor:
            if where == "inside":
                return self.b(checkpoint(self.a, x, use_reentrant=use_reentrant))
            return self.b(self.a(x))

    net = Net()
    net.block = Checkpointed()
    routed(net, policy, Rule("block", compute="fp32"))

    def step(x: Tensor) -> Tensor:
        x = net.before(x)
        return net.after(checkpoint(net.block, x, use_reentrant=use_reentrant) if where == "around" else net.block(x))

    run(step, policy).sum().backward()
    assert len(net.block.a.weights) == 2  # a recomputation without reentry may stop before it notes the GEMM
    assert set(net.block.a.gemms + net.block.b.gemms + net.block.a.weights) == {FP32}
    recomputed = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    run(lambda x: net.after(net.block.b(net.block.a(net.before(x)))), policy).sum().backward()
    assert all(torch.equal(one, parameter.grad) for one, parameter in zip(recomputed, net.parameters(), strict=True))


def test_no_grad_inside_a_route_does_not_spoil_the_gradients_outside_it() -> None:
    class Probing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.inner(x)
            return self.inner(x)

    for policy in (MIXED, TRUE):
        model = routed(
            nn.ModuleDict({"probing": Probing(), "rest": nn.Linear(1, 1)}), policy, Rule("probing", compute="fp32")
        )
        run(model["probing"], policy).sum().backward()
        assert model["probing"].inner.weight.grad is not None


def test_metrics_compute_in_fp32_by_call_update_and_compute() -> None:
    class Seen(torchmetrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("total", default=torch.zeros(()), dist_reduce_fx="sum")
            self.seen: list[torch.dtype] = []

        def update(self, value: Tensor) -> None:
            self.seen += [value.dtype, (value @ value.T).dtype]
            self.total += value.sum()

        def compute(self) -> Tensor:
            self.seen.append((torch.ones(1, 1) @ torch.ones(1, 1)).dtype)
            return self.total

    for policy in (MIXED, TRUE):
        model = routed(nn.ModuleDict({"metric": Seen(), "rest": nn.Linear(1, 1)}), policy)
        metric = model["metric"]
        value = torch.ones(2, 2, dtype=BF16)
        with surrounding(policy):
            metric.update(value)
            metric.compute()
            metric(value)
            restored = pickle.loads(pickle.dumps(copy.deepcopy(torchmetrics.MeanSquaredError())))
        assert set(metric.seen) == {FP32}
        assert metric.total.dtype is FP32
        assert metric.update_count == 2
        assert isinstance(restored, torchmetrics.MeanSquaredError)
        undo(model)
        assert type(metric) is Seen
        with surrounding(policy):
            metric.update(value)
        assert metric.seen[-2:] == [BF16, BF16]


def test_a_routed_metric_can_be_copied_pickled_and_collected() -> None:
    model = nn.ModuleDict(
        {"all": torchmetrics.MetricCollection([torchmetrics.MeanSquaredError()]), "rest": nn.Linear(1, 1)}
    )
    routed(model, MIXED)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model["all"].clone() and model):
        with surrounding(MIXED):
            twin["all"].update(torch.ones(2, dtype=BF16), torch.zeros(2, dtype=BF16))
            assert twin["all"].compute()["MeanSquaredError"].dtype is FP32


def test_routing_leaves_parameters_names_hooks_and_flags_alone() -> None:
    net = Net()
    net.block.b.weight = net.block.a.weight
    net.block.a.bias.requires_grad_(False)
    net.block.eval()
    calls: list[str] = []
    net.block.register_forward_pre_hook(lambda module, args: calls.append("pre"))
    net.block.register_forward_hook(lambda module, args, output: calls.append("post"))
    net.block.a.weight.register_hook(lambda grad: calls.append("grad"))
    parameters = dict(net.named_parameters(remove_duplicate=False))
    keys = list(net.state_dict())
    for policy in (MIXED, TRUE):
        routed(net, policy, Rule("block", compute="fp32"))
        found = dict(net.named_parameters(remove_duplicate=False))
        assert list(found) == list(parameters)
        assert all(found[name] is parameter for name, parameter in parameters.items())
        assert list(net.state_dict()) == keys
        assert (net.block.training, net.training, net.block.a.bias.requires_grad) == (False, True, False)
        run(net, policy).sum().backward()
        assert calls == ["pre", "post", "grad"]
        calls.clear()


def test_a_routed_module_looks_like_its_class_and_prints_its_route() -> None:
    net = routed(Net(), MIXED, Rule("block", compute="fp32"))
    cls = type(net.block.a)
    assert isinstance(net.block.a, Spy)
    assert (cls.__name__, cls.__qualname__, cls.__module__) == ("Spy", "Spy", Spy.__module__)
    assert "in_features=4, out_features=4, bias=True, compute=fp32" in repr(net.block.a)
    assert repr(net.block).startswith("Block(\n  compute=fp32")
    assert "compute=" not in repr(net.before)


def test_only_modules_that_need_one_get_a_class_of_their_own() -> None:
    net = routed(Net(), MIXED, Rule("block.a", compute="fp32"), Rule("after", compute="bf16"))
    assert type(net) is Net
    assert type(net.block) is Block
    assert type(net.before) is type(net.after) is type(net.block.b) is Spy
    assert type(net.block.a) is not Spy
    assert type(net.block.a) is type(routed(Net(), MIXED, Rule("block.a", compute="fp32")).block.a)


def test_a_registry_of_subclasses_does_not_hear_of_generated_ones() -> None:
    heard: list[type] = []

    class Registered(nn.Module):
        def __init_subclass__(cls) -> None:
            heard.append(cls)

        def forward(self, x: Tensor) -> Tensor:
            return x @ x.T

    class One(Registered):
        pass

    model = routed(nn.ModuleDict({"one": One(), "rest": nn.Linear(1, 1)}), MIXED, Rule("one", compute="fp32"))
    assert heard == [One]
    assert run(model["one"], MIXED).dtype is FP32


def test_undo_gives_every_class_back() -> None:
    net = Net()
    classes = [type(module) for module in net.modules()]
    attributes = [dict(vars(module)) for module in net.modules()]
    routed(net, MIXED, Rule("block", compute="fp32"))
    assert [type(module) for module in net.modules()] != classes
    undo(net)
    undo(net)
    assert [type(module) for module in net.modules()] == classes
    assert [dict(vars(module)) for module in net.modules()] == attributes
    run(net, MIXED)
    assert net.block.a.gemms == [BF16]


def test_applying_again_replaces_earlier_routes() -> None:
    net = routed(Net(), MIXED, Rule("block", compute="fp32"))
    made = plan(net, PrecisionPolicy("bf16", rules=[Rule("block.b", compute="fp16")]))
    for _ in range(2):
        apply(made, net)
    run(net, MIXED)
    assert (net.block.a.gemms, net.block.b.gemms) == ([BF16], [FP16])
    assert type(net.block) is Block


def test_a_class_put_on_top_of_a_route_is_not_thrown_away() -> None:
    net = routed(Net(), MIXED, Rule("after", compute="fp32"))
    net.after.__class__ = type("Wrapped", (type(net.after),), {})
    with pytest.raises(RuntimeError, match=r"has been changed.*fully_shard"):
        undo(net)


@pytest.mark.parametrize("policy", [MIXED, TRUE], ids=["mixed", "true"])
def test_a_copy_uses_its_own_weights_in_the_same_route(policy: PrecisionPolicy) -> None:
    net = routed(Net(), policy, Rule("block", compute="fp32"))
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    assert run(twin, policy).abs().sum() > 0
    assert (twin.block.a.gemms, net.block.a.gemms) == ([FP32], [])
    assert twin.block.a.weight is not net.block.a.weight
    undo(twin)
    assert type(twin.block) is Block


@pytest.mark.parametrize("policy", [MIXED, TRUE], ids=["mixed", "true"])
def test_a_pickled_model_keeps_its_routes(policy: PrecisionPolicy) -> None:
    net = routed(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), policy, Rule("1", compute="fp32"))
    stored = io.BytesIO()
    torch.save(net, stored)
    stored.seek(0)
    for twin in (torch.load(stored, weights_only=False), pickle.loads(pickle.dumps(net)), copy.copy(net)):
        assert run(twin, policy).dtype is FP32
        assert type(twin[1]) is type(net[1])


def test_a_parametrized_layer_can_be_routed() -> None:
    model = nn.ModuleDict({"a": nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "rest": nn.Linear(1, 1)})
    for policy in (MIXED, TRUE):
        routed(model, policy, Rule("a", compute="fp32"))
        result = run(model["a"], policy)
        result.sum().backward()
        assert result.dtype is FP32


def test_own_parameters_in_lists_are_cast_with_their_module() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([torch.ones(4, 4), torch.ones(4, 4)])

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weights[0] @ self.weights[1]

    model = routed(nn.ModuleDict({"w": Weighted(), "rest": nn.Linear(1, 1)}), TRUE, Rule("w", compute="fp32"))
    result = run(model["w"], TRUE)
    result.sum().backward()
    assert result.dtype is FP32
    assert model["w"].weights[1].grad.dtype is BF16


def test_a_true_model_without_exceptions_carries_no_route_at_all() -> None:
    net = routed(Net(), TRUE)
    assert type(net.before) is Spy
    run(net, TRUE)
    assert (net.before.weights, net.before.gemms) == ([BF16], [BF16])


def test_in_a_true_model_layers_behind_an_fp32_one_take_its_output() -> None:
    net = routed(Net(), TRUE, Rule("before", compute="fp32"))
    run(net, TRUE).sum().backward()
    assert (net.before.gemms, net.block.a.inputs, net.block.a.gemms) == ([FP32], [BF16], [BF16])


def test_a_16_bit_parameter_in_an_fp32_route_is_cast_whatever_the_policy_stores() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4).to(BF16), "rest": nn.Linear(1, 1)})
    routed(model, MIXED, Rule("a", compute="fp32"))
    assert run(model["a"], MIXED).dtype is FP32
    assert model["a"].weight.dtype is BF16


def test_a_discarded_model_is_freed_with_its_routes() -> None:
    import weakref

    net = routed(Net(), TRUE, Rule("block", compute="fp32"))
    run(net, TRUE)
    gone = weakref.ref(net.block)
    del net
    gc.collect()
    assert gone() is None
