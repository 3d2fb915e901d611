"""GAT's two numbers per node and head, which its additive score adds for every edge, in one pass over the values."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from . import native
from .numerics import transformed

SLOTS = 64  # partial sums of the vectors' gradients: fixed, so that threads don't change the result


class _Terms(ctypes.Structure):
    """struct Terms of _native/abi.h."""

    _fields_ = [(name, ctypes.c_int64) for name in ("wide", "threads", "rows", "heads", "width", "slots")] + [
        (name, ctypes.c_void_p) for name in ("v", "target", "source", "q", "k", "dv", "d_target", "d_source")
    ]


def additive_terms(values: Tensor, target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Queries `<target_h, v_ih>` and keys `<source_h, v_jh>` of the score `Additive` (Velickovic et al. 2018, eq. 3).

    values `(..., H, T, D)`; target, source `(H, D)`; both results `(..., H, T, 1)`, differentiable.
    """
    beside = values.transpose(-3, -2)  # as a projection leaves them: the heads of a node side by side
    if _fast(beside, target, source):
        return _Fused.apply(values, target, source)
    return additive_term(values, target), additive_term(values, source)


def additive_term(values: Tensor, vector: Tensor) -> Tensor:
    """One of the two: `(..., H, T, D)` and `(H, D)` to `(..., H, T, 1)`."""
    return (values * vector.unsqueeze(-2)).sum(-1, keepdim=True)


def _fast(beside: Tensor, target: Tensor, source: Tensor) -> bool:
    return (
        beside.dtype in (torch.float32, torch.float64)
        and target.dtype == source.dtype == beside.dtype
        and beside.device.type == target.device.type == source.device.type == "cpu"
        and beside.numel() > 0
        and beside.is_contiguous()
        and not torch.compiler.is_compiling()
        and not transformed()
        and not isinstance(native._library(), str)
    )


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(values, target, source)
        beside = values.transpose(-3, -2)
        q, k = (beside.new_empty(beside.shape[:-1]) for _ in range(2))
        _run(False, beside, target.contiguous(), source.contiguous(), q, k)
        return _turned(q), _turned(k)

    @staticmethod
    def backward(ctx: Any, gq: Tensor, gk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, target, source = ctx.saved_tensors
        if torch.is_grad_enabled() or transformed():  # a graph of the gradient, or a transform of it
            over = tuple(range(values.dim() - 3))
            d_target, d_source = (x.sum((*over, -2)) for x in (gq * values, gk * values))
            return gq * target.unsqueeze(-2) + gk * source.unsqueeze(-2), d_target, d_source
        beside = values.transpose(-3, -2)
        gq, gk = (x.squeeze(-1).transpose(-2, -1).contiguous() for x in (gq, gk))
        dv = torch.empty_like(beside)
        sums = beside.new_zeros(2, SLOTS, *target.shape)
        _run(True, beside, target.contiguous(), source.contiguous(), gq, gk, dv, sums)
        d_target, d_source = sums.sum(1)
        return dv.transpose(-3, -2), d_target, d_source


def _turned(x: Tensor) -> Tensor:
    return x.transpose(-2, -1).unsqueeze(-1)


def _run(
    back: bool, v: Tensor, target: Tensor, source: Tensor, q: Tensor, k: Tensor,
    dv: Tensor | None = None, sums: Tensor | None = None,
) -> None:  # fmt: skip
    heads, width = target.shape
    terms = _Terms(
        v.dtype == torch.float64, torch.get_num_threads(), v.numel() // (heads * width), heads, width, SLOTS,
        *(x.data_ptr() for x in (v, target, source, q, k)),
    )  # fmt: skip
    if dv is not None and sums is not None:
        terms.dv, terms.d_target, terms.d_source = dv.data_ptr(), sums[0].data_ptr(), sums[1].data_ptr()
    native._checked().ga_terms(native._isa, back, ctypes.byref(terms))
