"""`attention_of` sees the weights that a model uses, and leaves the model as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import graphattn as ga
from graphattn.draw import attention_of, draw_attention, save, to_html


@pytest.mark.parametrize("position", ["learned", "alibi", "relative", "rotary"])
def test_weights_are_those_of_the_dense_softmax(position: str) -> None:
    config = ga.GPTConfig(vocab=11, block=7, layers=2, heads=3, width=12, position=position, softcap=5.0, dropout=0.5)
    model = ga.GPT(config).train()
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    graphs = [ga.causal(7), ga.window(7, 3)]
    ids = torch.randint(0, 11, (2, 7))
    seen = []

    def keep(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen.append(args[0])

    hooks = [b.out.register_forward_pre_hook(keep) for b in model.blocks]
    got_graphs, got = attention_of(model, ids, graphs)
    for hook in hooks:
        hook.remove()
    assert got_graphs == graphs and model.training and all(m.training for m in model.modules())
    assert not any(b.head._forward_pre_hooks for b in model.blocks)
    inputs = []
    hook = model.blocks[1].head.register_forward_pre_hook(lambda m, a: inputs.append(a[0]))
    model.eval()
    model(ids, graphs)
    hook.remove()
    # weights times values, scattered to dense, is what the head passed on
    _, values = model.blocks[1].head.keys_values(inputs[0])
    dense = torch.zeros(2, 3, 7, 7)
    dense[..., ga.to_mask(graphs[1])] = got[1]
    out = (dense @ values).transpose(-3, -2).flatten(-2)
    torch.testing.assert_close(out, seen[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dense.sum(-1), torch.ones(2, 3, 7))


def test_pictures_of_a_model(tmp_path: Path) -> None:
    model = ga.GPT(ga.GPTConfig(vocab=11, block=7, layers=2, heads=2, width=8))
    graphs, weights = attention_of(model, torch.arange(5)[None], ga.causal(5))
    assert [w.shape for w in weights] == [(1, 2, 15)] * 2 and not weights[0].requires_grad
    assert save(draw_attention("To be", graphs, weights), tmp_path / "a.png").stat().st_size > 1000
    assert to_html(graphs, weights, "To be").count("weight") > 2


@pytest.mark.parametrize("options", [{}, {"score": "gatv2"}, {"block": "transformer"}, {"edge_dim": 2}])
def test_layers_that_project_and_attend_in_two_steps(options: dict) -> None:
    """Graph layers, PyG's too, call no head as a module."""
    torch.manual_seed(0)
    graph = ga.from_mask(torch.rand(9, 9) < 0.4) | ga.self_loops(9)
    model = ga.NodeClassifier(5, 3, heads=2, head_dim=4, **options).train()
    x = torch.randn(9, 5)
    e = torch.randn(graph.num_edges, 2) if "edge_dim" in options else None
    graphs, weights = attention_of(model, x, graph, e)
    assert graphs == [graph, graph] and model.training
    for got, wanted in zip(weights, model.weights(x, graph, e), strict=True):
        torch.testing.assert_close(got, wanted.detach())
    assert not any("attend" in vars(m) for m in model.modules())
    conv = ga.GraphAttentionConv(5, 4, 2).eval()
    index = ga.to_edge_index(graph)
    _, weights = attention_of(conv, x, index)
    _, (_, wanted) = conv(x, index, return_attention_weights=True)
    torch.testing.assert_close(weights[0].T[ga.edge_ids(graph, index)], wanted.detach())


def test_a_model_without_heads_says_so() -> None:
    with pytest.raises(ValueError, match="Linear called no graphattn.Head"):
        attention_of(nn.Linear(2, 2), torch.ones(2))
