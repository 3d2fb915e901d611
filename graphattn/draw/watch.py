"""What a model attends to on one input: the graph and the weights of every `Head` that it calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graphattn.graph import Graph
from graphattn.head import Head

# what shapes the weights; the rest of a head's options (seed, backend, edge_value) does not
_SHAPING = ("scale", "bias", "softcap", "edge_key")


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

    def watched(head: Head) -> Callable[..., Tensor]:
        attend = head.attend

        def look(queries: Tensor, keys: Tensor, values: Tensor, graph: Graph, **options: Any) -> Tensor:
            shaping = {k: options[k] for k in _SHAPING if options.get(k) is not None}
            graphs.append(graph.to("cpu"))
            weights.append(head.projected_weights(queries, keys, graph, **shaping).detach().to("cpu"))
            return attend(queries, keys, values, graph, **options)

        return look

    # not a hook of the module's call: layers also project and attend in two steps
    heads = [m for m in model.modules() if isinstance(m, Head)]
    for head in heads:
        head.attend = watched(head)  # type: ignore[method-assign]
    modes = {m: m.training for m in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        for head in heads:
            del head.attend
        for module, mode in modes.items():
            module.training = mode
    if not graphs:
        raise ValueError(f"{type(model).__name__} called no graphattn.Head: there are no weights to draw")
    return graphs, weights
