"""Probes agree with what layers really do under autocast, and leave no trace."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp_plus import autocast_probe
from lightning_amp_plus.autocast_probe import Probe, Region, probe
from lightning_amp_plus.casts import DTYPES, dtype_name

LAYERS: list[tuple[nn.Module, tuple[torch.Tensor, ...]]] = [
    (nn.Linear(5, 3), (torch.rand(2, 5),)),
    (nn.Conv1d(2, 3, 3), (torch.rand(1, 2, 9),)),
    (nn.Conv2d(2, 3, 3), (torch.rand(1, 2, 9, 9),)),
    (nn.ConvTranspose2d(2, 3, 3), (torch.rand(1, 2, 9, 9),)),
    (nn.Bilinear(2, 3, 4), (torch.rand(2, 2), torch.rand(2, 3))),
    (nn.MultiheadAttention(4, 2), (torch.rand(3, 1, 4),) * 3),
    (nn.GRU(3, 4), (torch.rand(2, 1, 3),)),
    (nn.LayerNorm(4), (torch.rand(2, 4),)),
    (nn.RMSNorm(4), (torch.rand(2, 4),)),
    (nn.GroupNorm(2, 4), (torch.rand(2, 4, 3),)),
    (nn.BatchNorm1d(4), (torch.rand(2, 4),)),
    (nn.Embedding(3, 4), (torch.tensor([1]),)),
    (nn.ReLU(), (torch.rand(2, 4),)),
    (nn.Softmax(-1), (torch.rand(2, 4),)),
    (nn.CrossEntropyLoss(), (torch.rand(2, 4), torch.tensor([0, 1]))),
    (nn.MSELoss(), (torch.rand(2, 4), torch.rand(2, 4))),
]


def under(autocast: str | None, *given: str, weight: str = "fp32") -> Region:
    return Region(autocast, given, weight, "cpu")


def id_of(value: object) -> str:
    return type(value).__name__ if isinstance(value, nn.Module) else ""


@pytest.mark.parametrize("autocast", ["bf16", "fp16"])
@pytest.mark.parametrize(("layer", "inputs"), LAYERS, ids=id_of)
def test_the_probed_output_is_that_of_the_real_layer(
    layer: nn.Module, inputs: tuple[torch.Tensor, ...], autocast: str
) -> None:
    given = [
        name for name in ("fp32", autocast) if all(value.is_floating_point() for value in inputs) or name == "fp32"
    ]
    for name in given:
        cast = tuple(value.to(DTYPES[name]) if value.is_floating_point() else value for value in inputs)
        with torch.autocast("cpu", DTYPES[autocast]):
            try:
                result = layer(*cast)
            except RuntimeError:
                assert probe(layer, under(autocast, name)).error
                continue
        output = result[0] if isinstance(result, tuple) else result
        assert probe(layer, under(autocast, name)).output == dtype_name(output.dtype)


def test_gemms_are_cast_weights_and_all() -> None:
    assert probe(nn.Linear(2, 2), under("bf16", "fp32", "bf16")) == Probe("bf16", "bf16", "bf16", "fp32")
    assert probe(nn.Conv2d(1, 1, 1), under("bf16", "fp32", "bf16"))[:3] == ("bf16",) * 3


def test_what_follows_its_input_says_so() -> None:
    assert probe(nn.ReLU(), under("bf16", "fp32", "bf16")) == Probe("as given", "-", "as given")
    norm = probe(nn.LayerNorm(2), under("bf16", "fp32", "bf16"))
    assert (norm.input, norm.weight, norm.output) == ("as given", "fp32", "as given")


def test_a_loss_that_autocast_widens_is_seen_in_fp32() -> None:
    assert probe(nn.MSELoss(), under("bf16", "fp32", "bf16")) == Probe("fp32", "-", "fp32")


def test_without_autocast_the_operation_sees_what_it_is_given() -> None:
    for name in ("fp32", "bf16", "fp16"):
        assert probe(nn.Linear(2, 2), under(None, name, weight=name))[:3] == (name,) * 3


def test_an_embedding_reads_indices() -> None:
    assert probe(nn.Embedding(2, 2), under("bf16", "fp32"))[:3] == ("int64", "fp32", "fp32")


def test_the_accumulator_agrees_with_the_sum_of_a_large_and_four_small_terms() -> None:
    for name, large, wide in (("fp16", 2048.0, 2052.0), ("bf16", 256.0, 260.0)):
        row = torch.tensor([[large, 1, 1, 1, 1]]).to(DTYPES[name])
        sums_wide = bool((row @ torch.ones(5, 1, dtype=DTYPES[name]) == wide).all())
        assert (probe(nn.Linear(2, 2), under(name, "fp32")).accumulator == "fp32") == sums_wide


def test_a_narrow_accumulator_is_told_from_a_wide_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class OneByOne(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = torch.zeros(x.shape[0], dtype=x.dtype)
            for column in range(x.shape[1]):
                total = total + x[:, column] * self.weight[0, column].to(x.dtype)
            return total

    sample = autocast_probe._Sample(lambda: OneByOne(3, 1, bias=False, device="meta"), ((6, 3),))
    monkeypatch.setitem(autocast_probe._SAMPLES, OneByOne, sample)
    found = [autocast_probe._accumulator(OneByOne, under(None, name, weight=name)) for name in ("bf16", "fp16", "fp32")]
    assert found == ["bf16", "fp16", "fp32"]


def test_user_written_modules_and_containers_are_left_open() -> None:
    class Doubling(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).double()

    class Renamed(nn.Linear):
        pass

    region = under("bf16", "fp32")
    assert probe(Doubling(2, 2), region) == Probe()
    assert probe(nn.Sequential(nn.Linear(2, 2)), region) == Probe()
    assert probe(Renamed(2, 2), region) == probe(nn.Linear(2, 2), region)


@pytest.mark.parametrize("kind", [nn.Dropout, nn.RReLU, nn.LSTM, nn.Linear, nn.MultiheadAttention])
def test_probing_draws_no_random_number_and_does_not_warn(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autocast_probe, "_probed", {})
    arguments = {nn.LSTM: (2, 2), nn.Linear: (2, 2), nn.MultiheadAttention: (4, 2)}.get(kind, ())
    module = kind(*arguments)
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for autocast in ("bf16", "fp16"):
            probe(module, under(autocast, "fp32", autocast))
    assert torch.equal(state, torch.get_rng_state())
    assert module.training


def test_a_probe_is_made_once_for_a_class() -> None:
    class Counter(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            Counter.seen += 1
            return func(*args, **(kwargs or {}))

    layer = nn.Linear(3, 3)
    probe(layer, under("bf16", "fp32"))
    with Counter():
        probe(layer, under("bf16", "fp32"))
    assert Counter.seen == 0


def test_probing_works_under_foreign_defaults() -> None:
    expected = probe(nn.Linear(2, 2), under("fp16", "fp32"))
    autocast_probe._probed.clear()
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert probe(nn.Linear(2, 2), under("fp16", "fp32")) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_asked_for_its_own_decisions() -> None:
    state = torch.cuda.get_rng_state()
    norm = probe(nn.LayerNorm(2), Region("fp16", ("fp32", "fp16"), "fp32", "cuda"))
    with torch.autocast("cuda", torch.float16):
        real = nn.LayerNorm(2).cuda()(torch.rand(1, 2, device="cuda", dtype=torch.float16))
    assert norm.output == dtype_name(real.dtype)
    assert torch.equal(state, torch.cuda.get_rng_state())
