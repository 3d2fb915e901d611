"""graphattn: an attention mask is a graph, and the graph is an input.

    g = ga.window(64, 16) | ga.global_tokens(64, [0])   patterns and set algebra; `ga.Graph` has the rest
    out = ga.attend(q, k, v, g)                         exact attention; `ga.explain` says by which backend and why
    ga.find_leak(g)                                     None, or the path on which a target reads its own label
    ga.Head(128, 32, heads=4)(x, g)                     the module; `ga.GPT`, `ga.NodeClassifier` are built on it
    ga.draw(g).figure.savefig("g.png")                  a picture; `ga.export` also writes HTML, GraphML, DOT

In the package: patterns, convert, audit, order, scores, backends, head, gpt, seq2seq, nodes, graph_models, pyg, draw,
train, cli.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# public name -> module that defines it; imported at first use, so that `import graphattn` stays light
_WHERE = {
    "graph": "Graph",
    "patterns": "full causal band window prefix bipartite self_loops empty padding disjoint stack "
    "dilated strided fixed global_tokens random_regular bigbird block_sparse block_causal neighborhood tree_ancestors "
    "shared_prefix encoder_decoder expander k_hop shifted_window documents",
    "convert": "from_mask to_mask from_additive to_additive from_edge_index to_edge_index edge_ids from_csr to_csr "
    "from_scipy to_scipy from_networkx to_networkx from_pyg to_pyg from_predicate to_predicate from_block_mask "
    "to_block_mask from_key_padding to_key_padding from_cu_seqlens to_cu_seqlens from_hf to_hf "
    "from_npz to_npz",
    "scores": "Dot Additive GATv2 alibi relative",
    "backends": "attend attend_lse weights edge_scores merge explain calibrate BACKENDS",
    "audit": "receptive_field find_leak compare assert_no_leak coverage layers_to_cover audit_page audit_picture Leak "
    "Difference Hop",
    "order": "reorder tile_fill",
    "head": "Head",
    "gpt": "GPT GPTConfig Block",
    "seq2seq": "EncoderDecoder CrossBlock GatedCross Conditioned",
    "nodes": "NodeClassifier Ensemble GATLayer GraphBlock",
    "graph_models": "GraphPredictor LinkScorer",
    "pyg": "GraphAttentionConv from_pyg_conv",
    "features": "SparseFeatures",
    "config": "TrainConfig",
    "parse": "parse",
    "draw": "draw draw_grid draw_attention draw_stack attention_of export",
    "train": "train",
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    try:
        module = _MODULE_OF[name]
    except KeyError:
        raise AttributeError(f"module 'graphattn' has no attribute {name!r}") from None
    value = getattr(importlib.import_module(f"graphattn.{module}"), name)
    globals()[name] = value
    return value


__all__ = sorted(_MODULE_OF)


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__version__"]
