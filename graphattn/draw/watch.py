"""What a model attends to on one input: the graph and the weights of every `Head` that it calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from graphattn.graph import Graph
from graphattn.head import Head

# what shapes the weights; the rest of a head's options (seed, backend, edge_value) does not
_SHAPING = ("context", "positions", "key_positions", "scale", "bias", "softcap", "edge_key")


def attention_of(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[list[Graph], list[Tensor]]:
    """Run `model(*args, **kwargs)` and return the graph and the weights of each call of a `Head`, in order.

    The model runs in evaluation mode without gradients and is left in the mode it was in.  The weights are detached, on
    the CPU, in edge order and never dropped: `(B, H, E)` for a `(B, T, C)` stream and a plain graph.  With one sample
    they are what `draw_attention` and `to_html` take:

        graphs, weights = attention_of(gpt, ids[None], ga.causal(len(ids)))
        draw_attention(list(text), graphs, weights)

    Raises:
        ValueError: the model calls no `Head`.
    """
    graphs: list[Graph] = []
    weights: list[Tensor] = []

    def look(head: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        assert isinstance(head, Head)
        named = dict(zip(("x", "graph", "context"), given, strict=False)) | options
        x, graph = named["x"], named["graph"]
        shaping = {k: named[k] for k in _SHAPING if named.get(k) is not None}
        graphs.append(graph.to("cpu"))
        weights.append(head.weights(x, graph, **shaping).detach().to("cpu"))

    hooks = [m.register_forward_pre_hook(look, with_kwargs=True) for m in model.modules() if isinstance(m, Head)]
    modes = {m: m.training for m in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    if not graphs:
        raise ValueError(f"{type(model).__name__} called no graphattn.Head: there are no weights to draw")
    return graphs, weights
