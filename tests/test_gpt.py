"""The model: a GPT exactly when its graph is causal, and nothing but its graph decides who reads whom."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import graphattn as ga
from graphattn.gpt import GPT, GPTConfig, cycle, loss_of

POSITIONS = ("learned", "none", "rotary", "alibi", "relative")


def small(**changes: object) -> GPTConfig:
    values: dict = {"vocab": 13, "block": 11, "layers": 3, "heads": 2, "width": 12} | changes
    return GPTConfig(**values)


def model_of(seed: int = 0, **changes: object) -> GPT:
    model = GPT(small(**changes))
    model.reset_parameters(torch.Generator().manual_seed(seed))
    with torch.no_grad():  # larger weights than at the start, so that attention matters
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(12)
    return model.double().eval()


def tokens_of(*shape: int, vocab: int = 13) -> torch.Tensor:
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(1))


class Lecture(nn.Module):
    """The same model with `scaled_dot_product_attention(is_causal=True)` written in."""

    def __init__(self, model: GPT):
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None):
        m = self.model
        x = m.tokens(tokens) + m.positions.weight[: tokens.shape[1]]
        for block in m.blocks:
            h, y = block.head, block.norm1(x)
            q, k, v = (f(y).unflatten(-1, (h.heads, -1)).transpose(1, 2) for f in (h.query, h.key, h.value))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block.out(y.transpose(1, 2).flatten(2))
            x = x + block.down(F.gelu(block.up(block.norm2(x))))
        logits = F.linear(m.norm(x), m.tokens.weight)
        return logits, None if targets is None else loss_of(logits, targets)


def test_causal_graph_makes_the_lecture_s_model() -> None:
    model, tokens = model_of(), tokens_of(5, 11)
    logits, loss = model(tokens, ga.causal(11), tokens)
    expected, expected_loss = Lecture(model)(tokens, tokens)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=1e-12)
    ours = torch.autograd.grad(loss, list(model.parameters()))
    theirs = torch.autograd.grad(expected_loss, list(model.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_loss_is_cross_entropy_of_counted_targets() -> None:
    model, tokens = model_of(), tokens_of(2, 7)
    targets = tokens_of(2, 7).clone()
    targets[:, :3] = -1
    logits, loss = model(tokens, ga.causal(7), targets)
    assert logits.shape == (2, 7, 13)
    expected = F.cross_entropy(logits[:, 3:].flatten(0, 1), targets[:, 3:].flatten())
    torch.testing.assert_close(loss, expected)
    assert model(tokens, ga.causal(7))[1] is None
    assert float(model(tokens, ga.causal(7), torch.full_like(tokens, -1))[1].detach()) == 0.0


def test_fresh_model_predicts_evenly() -> None:
    model = GPT(GPTConfig(vocab=65))
    model.reset_parameters(torch.Generator().manual_seed(3))
    tokens = tokens_of(4, 64, vocab=65)
    loss = model(tokens, ga.causal(64), tokens.flip(0, 1))[1].detach()
    assert abs(float(loss) - math.log(65)) < 0.1


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("name", ["causal", "window", "prefix", "documents", "full"])
def test_only_readers_notice_a_change(position: str, name: str) -> None:
    graph = {
        "causal": ga.causal(11),
        "window": ga.window(11, 3),
        "prefix": ga.prefix(11, 4),
        "documents": ga.causal(11) & ga.disjoint([ga.full(3), ga.full(6), ga.full(2)]),
        "full": ga.full(11),
    }[name]
    model, tokens = model_of(position=position), tokens_of(2, 11)
    before = model(tokens, graph)[0]
    for source in (0, 3, 6, 10):
        changed = tokens.clone()
        changed[:, source] = (changed[:, source] + 1) % 13
        moved = ((model(changed, graph)[0] - before).abs().amax((0, 2)) > 0).nonzero().flatten().tolist()
        reached = [i for i in range(11) if source in ga.receptive_field([graph] * 3, i).tolist()]
        assert moved == reached


def test_samples_do_not_mix() -> None:
    model, tokens = model_of(), tokens_of(3, 11)
    changed = tokens.clone()
    changed[0] = (changed[0] + 1) % 13
    a, b = model(tokens, ga.causal(11))[0], model(changed, ga.causal(11))[0]
    assert torch.equal(a[1:], b[1:]) and not torch.equal(a[0], b[0])


def test_graphs_are_cycled_over_layers() -> None:
    model, tokens = model_of(), tokens_of(2, 11)
    a, b = ga.window(11, 3), ga.causal(11)
    got = model(tokens, [a, b])[0]
    assert torch.equal(got, model(tokens, [a, b, a])[0])
    assert not torch.allclose(got, model(tokens, [b, a])[0])
    assert cycle([a, b], 5) == [a, b, a, b, a] and cycle(a, 2) == [a, a]
    with pytest.raises(ValueError, match="3 graphs for 2 layers"):
        cycle([a, b, a], 2)
    with pytest.raises(ValueError, match="empty"):
        cycle([], 2)
    with pytest.raises(TypeError, match="Graphs"):
        cycle([torch.ones(3)], 2)  # type: ignore[list-item]


def test_sizes_are_checked() -> None:
    model = model_of()
    with pytest.raises(ValueError, match="16 positions, but the model's block is 11"):
        model(tokens_of(1, 16), ga.causal(16))
    with pytest.raises(ValueError, match=r"7 positions, but the graph is Graph\(11 <- 11"):
        model(tokens_of(1, 7), ga.causal(11))
    for wrong, says in (
        ({"width": 13}, "multiple of heads"),
        ({"position": "sin"}, "one of learned"),
        ({"dropout": 1.0}, "dropout"),
        ({"layers": 0}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=says):
            small(**wrong)


def test_one_window_without_a_batch_axis() -> None:
    model, tokens = model_of(), tokens_of(1, 7)
    torch.testing.assert_close(model(tokens[0], ga.causal(7))[0], model(tokens, ga.causal(7))[0][0])
    assert model(tokens_of(0, 7), ga.causal(7))[0].shape == (0, 7, 13)


@pytest.mark.parametrize("position", POSITIONS)
def test_the_graph_is_not_in_the_state(position: str) -> None:
    model = model_of(position=position)
    assert not [n for n in model.state_dict() if "mask" in n or "tril" in n or "slopes" in n]
    assert {n for n, _ in model.named_parameters()} == set(model.state_dict())


def test_kinds_of_position_know_order() -> None:
    """Exchanging two read tokens changes the last prediction of a full row, unless nothing tells order."""
    tokens = tokens_of(1, 5)
    tokens[0, 1], tokens[0, 2] = 3, 4
    swapped = tokens[:, [0, 2, 1, 3, 4]]
    for position in POSITIONS:
        model = model_of(position=position, layers=1)
        if position == "relative":
            with torch.no_grad():
                model.blocks[0].table.normal_(generator=torch.Generator().manual_seed(0))
        a, b = model(tokens, ga.full(5))[0][0, 4], model(swapped, ga.full(5))[0][0, 4]
        assert torch.allclose(a, b, atol=1e-12) == (position == "none"), position


def test_options_of_attention_are_used() -> None:
    tokens, graph = tokens_of(2, 11), ga.causal(11)
    plain = model_of()(tokens, graph)[0]
    for change in ({"softcap": 0.3}, {"qk_norm": True}, {"kv_heads": 1}, {"bias": True, "tie": False}):
        assert not torch.allclose(plain, model_of(**change)(tokens, graph)[0]), change
    grouped = model_of(kv_heads=1)
    assert grouped.blocks[0].head.key.weight.shape == (6, 12)


def test_dropout_is_off_in_eval_and_seeded_in_training() -> None:
    model, plain = model_of(dropout=0.5), model_of()
    tokens, graph = tokens_of(2, 11), ga.causal(11)
    torch.testing.assert_close(model(tokens, graph)[0], plain(tokens, graph)[0], rtol=0, atol=0)

    def trained(torch_seed: int, seed: int | None) -> torch.Tensor:
        torch.manual_seed(torch_seed)
        return model.train()(tokens, graph, seed=seed)[0]

    assert torch.equal(trained(5, None), trained(5, None)) and not torch.equal(trained(5, None), trained(6, None))
    assert torch.equal(trained(5, 9), trained(5, 9)) and not torch.equal(trained(5, 9), trained(5, 8))
    assert torch.equal(trained(5, 2**63 - 1), trained(5, 2**63 - 1))
    wrapped = model(tokens, graph, seed=torch.tensor(2**63 - 1))[0]
    assert torch.isfinite(wrapped).all()


def test_layers_drop_different_edges() -> None:
    from graphattn.gpt import _layer_seed

    seeds = [_layer_seed(7, layer) for layer in range(1000)]
    assert len(set(seeds)) == 1000 and all(0 <= s < 2**63 for s in seeds)  # type: ignore[operator]
    assert _layer_seed(None, 3) is None


def test_copy_and_pickle() -> None:
    model, tokens = model_of(), tokens_of(2, 11)
    model(tokens, ga.causal(11), tokens)[1].backward()
    expected = model(tokens, ga.causal(11))[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(tokens, ga.causal(11))[0], expected)


def test_backends_agree_on_the_whole_model() -> None:
    model, tokens = model_of(), tokens_of(2, 11)
    graph = ga.causal(11) - ga.band(11, 4) | ga.self_loops(11)
    expected = model(tokens, graph, backend="reference")[0]
    for backend in ("dense", "sdpa", "edges", "csr"):
        torch.testing.assert_close(model(tokens, graph, backend=backend)[0], expected, rtol=0, atol=1e-10)


def test_backend_that_can_not_says_so() -> None:
    model = model_of()
    with pytest.raises(ValueError, match="backend must be"):
        model(tokens_of(1, 11), ga.causal(11), backend="nothing")


def test_config_is_a_value() -> None:
    assert small() == small() and hash(small()) == hash(small())
    assert dataclasses.replace(small(), block=5).head_dim == 6
