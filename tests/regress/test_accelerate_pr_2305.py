"""Accelerate PR#2305: a head tied to the embedding stays tied in FP8, and its outputs stay within FP8's tolerance."""

import torch
from torch import Tensor, nn

from lightning_amp_plus import PrecisionPolicy, Rule, plan


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(64, 32)
            self.out = nn.Linear(32, 64, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embedding(tokens))


def test_tied_weights_stay_tied_and_outputs_close() -> None:
    tokens, reference, model = torch.arange(64), Tied(), Tied()
    plan(model, PrecisionPolicy("bf16", rules=[Rule("out", compute="fp8")])).apply(model)
    found, wanted = model(tokens), reference(tokens)
    assert model.out.weight is model.embedding.weight and "fp8" in repr(model.out)
    assert (found.float() - wanted).norm() < 0.06 * wanted.norm()
    found.float().logsumexp(1).sum().backward()
    wanted.logsumexp(1).sum().backward()
    theirs, ours = reference.embedding.weight.grad, model.embedding.weight.grad
    assert ours is not None and theirs is not None
    assert (ours - theirs).norm() < 0.1 * theirs.norm()


def test_by_default_a_tied_head_stays_in_high_precision_and_says_so() -> None:
    class Model(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Linear(32, 32)

    routes = plan(Model(), PrecisionPolicy("fp8"))
    assert routes["out"].compute == "bf16" and "embedding" in routes["out"].reason and routes["mlp"].compute == "fp8"
