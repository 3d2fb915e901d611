"""attend() inside torch.compile and torch.export: one operator on tensors, whatever the graph.

The compiler sees an opaque operator and shapes; which backend runs is decided when it runs, so graphs of one shape share
a compiled model.  A causal graph is the exception: PyTorch's own fused attention is written out, since compilers know it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..graph import Graph, by_handle
from ..scores import Additive, Alibi, GATv2, Relative

# set by the package above: eager attention `(q, k, v, graph, backend, want_lse, options) -> (out, lse or None, lse or
# None)`, and the gradients of q, k and v where the last of these, the lse it kept, is not None
_eager: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]] | None = None
_gradients: Callable[..., list[Tensor]] | None = None


def attend(
    q: Tensor, k: Tensor, v: Tensor, graph: Graph, want_lse: bool, backend: str, **options: Any
) -> tuple[Tensor, Tensor]:
    """`(out, lse)` through the operator; arguments are checked when it runs."""
    if torch.is_autocast_enabled(q.device.type):
        to = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(to), k.to(to), v.to(to)
    score, bias, seed = options.pop("score", None), options.pop("bias", None), options.pop("seed", None)
    scale, softcap, dropout = options.pop("scale", None), options.pop("softcap", None), options.pop("dropout", 0.0)
    edge_key, edge_value = options.pop("edge_key", None), options.pop("edge_value", None)
    if options:
        raise TypeError(f"attend has no options {sorted(options)}")
    name, slope, vector = "dot", 0.0, None
    if isinstance(score, Additive):
        name, slope = "additive", score.slope
    elif isinstance(score, GATv2):
        name, slope, vector = "gatv2", score.slope, score.vector
    place, offset, table = "", 0, None
    if isinstance(bias, Alibi):
        place, offset, table, bias = "alibi", bias.offset, bias.slopes, None
    elif isinstance(bias, Relative):
        place, offset, table, bias = "relative", bias.offset, bias.table, None
    plain = (
        name == "dot" and bias is None and place == "" and softcap is None and edge_key is None and edge_value is None
    )
    if plain and graph.kind == "causal" and not want_lse and seed is None and backend == "auto" and graph.t <= graph.s:
        groups = q.shape[-3] // k.shape[-3] if q.dim() > 2 else 1
        if groups > 1:
            k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scale), q.new_empty(0)
    runs: list[Tensor] = []
    if torch.compiler.is_exporting():
        runs = [graph.indptr, graph.start, graph.stop]  # a handle means nothing in another process
    seed_number = seed if isinstance(seed, int) else 0
    seed_tensor = seed if isinstance(seed, Tensor) else None
    out, lse, _, _ = torch.ops.graphattn.attention(
        q, k, v, graph.handle, runs, [*graph.lead, graph.t, graph.s], scale, name, slope, vector, bias, place, offset,
        table, edge_key, edge_value, softcap, dropout, seed_number, seed_tensor, seed is not None, want_lse, backend,
    )  # fmt: skip
    return out, lse


_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor handle, Tensor[] runs, SymInt[] shape, float? scale, str score, float slope, "
    "Tensor? vector, Tensor? bias, str place, SymInt offset, Tensor? table, Tensor? edge_key, Tensor? edge_value, "
    "float? softcap, float dropout, SymInt seed, Tensor? seed_tensor, bool seeded, bool want_lse, str backend)"
)
# Inductor keeps compiled code on disk by the names of operators: another schema or shape of outputs is another name.
_LIB = torch.library.Library("graphattn", "DEF")
# out; lse if it is wanted; the seed used, and 1 if what follows holds anything; lse for the backward pass
_LIB.define(f"attention{_SCHEMA} -> (Tensor, Tensor, Tensor, Tensor)", tags=(torch.Tag.needs_exact_strides,))
_LIB.define(
    f"attention_backward(Tensor dout, Tensor dlse, Tensor out, Tensor used, Tensor kept, {_SCHEMA[1:]} -> Tensor[]"
)
# positions of the tensors that may need a gradient, in the schema
_LEARNT = {"q": 0, "k": 1, "v": 2, "vector": 9, "bias": 10, "table": 13, "edge_key": 14, "edge_value": 15}


def _graph(handle: Tensor, runs: list[Tensor], shape: list[int]) -> Graph:
    if not runs:
        return by_handle(handle)
    known = _FROM_RUNS.get(id(runs[0]))
    if known is not None and known[0]() is runs[0]:
        return known[1]
    indptr, start, stop = runs
    graph = Graph.from_runs(indptr, start, stop, shape)
    if len(_FROM_RUNS) > 64:
        _FROM_RUNS.clear()
    _FROM_RUNS[id(runs[0])] = (weakref.ref(runs[0]), graph)
    return graph


_FROM_RUNS: dict[int, tuple[weakref.ref[Tensor], Graph]] = {}


def _call(args: tuple[Any, ...], seed: Tensor | None) -> tuple[Any, ...]:
    """The arguments of `_eager`."""
    (
        q, k, v, handle, runs, shape, scale, name, slope, vector, bias, place, offset, table, edge_key, edge_value,
        softcap, dropout, _, _, _, want_lse, backend,
    ) = args  # fmt: skip
    score = Additive(slope) if name == "additive" else GATv2(vector, slope) if name == "gatv2" else None
    if place == "alibi":
        bias = Alibi(table, offset)
    elif place == "relative":
        bias = Relative(table, offset)
    options = dict(scale=scale, score=score, bias=bias, edge_key=edge_key, edge_value=edge_value, softcap=softcap,
                   dropout=dropout, seed=seed)  # fmt: skip
    return q, k, v, _graph(handle, runs, shape), backend, want_lse, options


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert _eager is not None
    dropout, seed, seed_tensor, seeded = args[17:21]
    if seed_tensor is not None:
        used = seed_tensor
    elif dropout and not seeded:
        used = torch.randint(2**62, ())  # from torch's random state; the backward pass drops the same edges
    else:
        used = torch.tensor(int(seed))
    with torch.no_grad():
        out, lse, kept = _eager(*_call(args, used if dropout else None))
    fresh = out.contiguous()
    q = args[0]
    none = q.new_empty(0, dtype=_wide(q))
    used = torch.stack([used.cpu().long(), torch.tensor(int(kept is not None))])
    # the compiler wants one shape, whichever backend ran
    held = q.new_empty(q.shape[:-1], dtype=_wide(q)) if kept is None else kept.clone()
    return fresh, none if lse is None else lse.contiguous(), used, held


def _wide(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _backward(dout: Tensor, dlse: Tensor, out: Tensor, used: Tensor, kept: Tensor, *args: Any) -> list[Tensor]:
    """Gradients of the learnt tensors in schema order, empty where there is none.

    Runs the forward pass again, unless the backend left what it needs to go on.
    """
    assert _eager is not None and _gradients is not None
    seed, was_kept = used
    if was_kept:
        q, k, v, graph, _, want_lse, options = _call(args, seed if args[17] else None)
        with torch.no_grad():
            found = _gradients(q, k, v, graph, options, out, kept, dout, dlse if want_lse else None)
        return [x.contiguous() for x in found] + [dout.new_empty(0) for _ in range(len(_LEARNT) - 3)]
    args_list = list(args)
    leaves = []
    for at in _LEARNT.values():
        if args_list[at] is not None:
            args_list[at] = args_list[at].detach().requires_grad_()
            leaves.append(args_list[at])
    want_lse = args[21]
    with torch.enable_grad():
        out, lse, _ = _eager(*_call(tuple(args_list), seed if args[17] else None))
        outputs, pulls = [out], [dout]
        if want_lse and lse is not None:
            outputs.append(lse)
            pulls.append(dlse)
        grads = iter(torch.autograd.grad(outputs, leaves, pulls, allow_unused=True))
    found = []
    for at in _LEARNT.values():
        x = args[at]
        g = next(grads) if x is not None else None
        if x is None:
            found.append(dout.new_empty(0))
        else:
            found.append((torch.zeros_like(x) if g is None else g).contiguous())
    return found


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, v, want_lse = args[0], args[2], args[21]
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse = q.new_empty(q.shape[:-1] if want_lse else (0,), dtype=_wide(q))
    return out, lse, torch.empty(2, dtype=torch.int64), q.new_empty(q.shape[:-1], dtype=_wide(q))


def _fake_backward(dout: Tensor, dlse: Tensor, out: Tensor, used: Tensor, kept: Tensor, *args: Any) -> list[Tensor]:
    return [dout.new_empty(0) if args[at] is None else args[at].new_empty(args[at].shape) for at in _LEARNT.values()]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    ctx.where = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
    runs = inputs[4]
    ctx.runs = len(runs)
    ctx.rest = [None if isinstance(x, Tensor) or i == 4 else x for i, x in enumerate(inputs)]
    out, _, used, kept = output
    ctx.save_for_backward(out, used, kept, *runs, *tensors)
    ctx.mark_non_differentiable(used, kept)
    ctx.set_materialize_grads(True)


def _autograd(ctx: Any, dout: Tensor, dlse: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    out, used, kept, *saved = ctx.saved_tensors
    runs, tensors = list(saved[: ctx.runs]), saved[ctx.runs :]
    args = list(ctx.rest)
    for i, x in zip(ctx.where, tensors, strict=True):
        args[i] = x
    args[4] = runs
    found = torch.ops.graphattn.attention_backward(dout, dlse, out, used, kept, *args)
    grads: list[Any] = [None] * len(args)
    for at, g in zip(_LEARNT.values(), found, strict=True):
        if args[at] is not None and ctx.needs_input_grad[at]:
            grads[at] = g
    grads[4] = [None] * ctx.runs
    return tuple(grads)


for _device in ("CPU", "CUDA"):
    _LIB.impl("attention", _forward, _device)
    _LIB.impl("attention_backward", _backward, _device)
torch.library.register_fake("graphattn::attention", _fake_forward, lib=_LIB)
torch.library.register_fake("graphattn::attention_backward", _fake_backward, lib=_LIB)
torch.library.register_autograd("graphattn::attention", _autograd, setup_context=_setup, lib=_LIB)
