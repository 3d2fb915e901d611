"""Triton kernels, for any graph on a GPU: per target and per source where edges are few, in tiles where they are dense.

Exact and bit-identical between runs: forward and gradient add nothing atomically.  Keys and values are read where they
lie (any strides), all heads of a node together where they lie together.  A target or source with many edges is split,
and its parts merged.  The tiles multiply hidden pairs of a tile that holds some edges by 0, so that a NaN in their
value spreads; the kernels for sparse graphs never touch what a target does not read.

Without a GPU the kernels run in triton's interpreter (TRITON_INTERPRET=1), for tests.
"""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

from ...blocks import bounds
from .. import gpu
from ..call import Call, learnt
from . import plan

FULL = 0.1  # share of edges in their tiles from which tiles are faster than edges


def why_not(call: Call) -> str | None:
    """Everything in up to float32, where triton and a CUDA device are."""
    if call.q.dtype == torch.float64:
        return "its kernels compute in float32, and q is float64"
    device = call.q.device.type
    if device == "cpu" and not interpreted():
        return "it needs a CUDA device, and q is on cpu (TRITON_INTERPRET=1 runs the kernels in triton's interpreter)"
    if device not in ("cpu", "cuda"):
        return f"it needs a CUDA device, and q is on {device}"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed (pip install triton)"
    if device == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(call.q.device) < (8, 0):
        return "its kernels need compute capability 8.0 or later"
    if max(call.q.shape[-1], call.v.shape[-1]) > 512:
        return f"its kernels hold widths up to 512, and these are {call.q.shape[-1]} and {call.v.shape[-1]}"
    if call.batch > 65535 or call.heads > 65535:
        return f"a launch holds 65,535 batch and head indices, and these are {call.batch} and {call.heads}"
    if call.graph.s >= 2**31 or call.graph.t >= 2**31:
        return "it numbers targets and sources in 32 bits"
    return None


def interpreted() -> bool:
    """Triton's interpreter was asked for."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def cost(call: Call) -> float:
    """Rows gathered per edge, or pairs of the tiles that hold an edge; never by itself in the interpreter."""
    if call.q.device.type != "cuda":
        return math.inf
    fixed = gpu.TRITON_CALL * (3 if call.needs_grad else 1)
    if in_tiles(call):
        cells = call.edge_work / max(plan.fill(call.graph, *tile_size(call)), 1e-9)
        return fixed + gpu.fused(
            call, cells, gpu.HALF if gpu.is_half(call) else gpu.TF32 / 3, gpu.TILES, gpu.TILES_BACK
        )
    width, size = call.q.shape[-1] + call.v.shape[-1], call.q.element_size()
    own = call.batch * call.heads * call.graph.t * width
    vectors = call.edge_work * width if call.edge_key is not None or call.edge_value is not None else 0
    rest = gpu.passes(own, 1, 3, call) + gpu.passes(call.edge_work, 1, 3, call) + gpu.passes(vectors, 1, 3, call)
    return fixed + gpu.gathered(call, call.edge_work, width, size) + rest


def memory(call: Call) -> int:
    """Bytes beyond inputs and output: lists of edges, float32 gradients, gradients per edge before they are summed."""
    graph = call.graph
    size = 4 * call.batch * call.heads * graph.t
    if call.needs_grad:
        d, dv = call.q.shape[-1], call.v.shape[-1]
        size += 8 * call.batch * call.heads * (graph.t * d + graph.s * (d + dv))
    if in_tiles(call):
        return size
    size += graph.num_edges * 4 * (3 if call.needs_grad else 1)
    if call.needs_grad:
        wanted = [x for x in (call.bias, call.edge_key, call.edge_value) if x is not None and x.requires_grad]
        size += sum(4 * call.edge_work * (x.shape[-1] if x.shape[-1] != graph.num_edges else 1) for x in wanted)
    return size


def in_tiles(call: Call) -> bool:
    """Whether the call goes to the matrix units: scaled products on a graph whose tiles are full enough."""
    if call.score.name != "dot" or call.edge_key is not None or call.edge_value is not None or call.bias is not None:
        return False
    if call.position is not None and call.needs_grad and any(x is not None and x.requires_grad for x in learnt(call)):
        return False  # their gradient is summed per distance from a number per edge
    d, dv = call.q.shape[-1], call.v.shape[-1]
    widest = 128 if call.q.dtype == torch.float32 else 256  # beyond, even the smallest tile spills registers
    if max(d, dv) > widest or min(d, dv) < 8:
        return False
    return plan.fill(call.graph, *tile_size(call)) >= FULL


def tile_size(call: Call, by_source: bool = False) -> tuple[int, int]:
    """Targets and sources of a tile: sizes that spill no register on compute capability 8.0 and 9.0."""
    if interpreted() and call.q.device.type == "cpu":
        return (32, 32) if by_source else (16, 32)
    width = max(call.q.shape[-1], call.v.shape[-1])
    sizes = _FLOAT32 if call.q.dtype == torch.float32 else _HALF
    plain, bits, options = sizes[64 if width <= 64 else 128 if width <= 128 else 256]
    # each option keeps another number alive for every pair of a tile, and so does looking up its bit
    if call.dropout > 0 or call.softcap is not None or call.position is not None:
        return options[by_source]
    return plain[by_source] if bounds(call.graph, plan.ENDS) is not None else bits[by_source]


# by width: (by target, by source) of calls whose edges are told by bounds, by bits, and of those with options
_HALF = {
    64: (((128, 64), (64, 64)), ((128, 64), (64, 64)), ((128, 32), (32, 64))),
    128: (((128, 64), (64, 64)), ((64, 64), (32, 64)), ((64, 32), (32, 32))),
    256: (((64, 32), (64, 32)), ((64, 32), (64, 32)), ((32, 32), (32, 16))),
}
# a product is three in TF32, whose operands are numbers taken apart
_FLOAT32 = {
    64: (((32, 32), (32, 32)),) * 3,
    128: (((16, 32), (32, 16)), ((16, 32), (32, 16)), ((16, 32), (16, 16))),
}


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """`(out, lse)`."""
    if call.graph.num_edges == 0 or call.q.numel() == 0 or call.v.numel() == 0 or call.q.shape[-1] == 0:
        return call.zeros()
    from . import launch

    return launch.tiles(call, tile_size(call), tile_size(call, True)) if in_tiles(call) else launch.rows(call)
