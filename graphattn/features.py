"""Node features that stay sparse: a bag of words has one non-zero in a hundred.

On Cora and PubMed the first projection, not attention, is most of an epoch; over non-zeros alone it is not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .backends.numerics import csr_tensor, sparse_product


class _Pattern(NamedTuple):
    """Where the non-zeros are, by rows and, for the gradient, by columns."""

    crow: Tensor
    col: Tensor
    t_crow: Tensor
    t_row: Tensor
    order: Tensor  # position, among the rows' non-zeros, of each of the columns' non-zeros
    shape: tuple[int, int]


class SparseFeatures:
    """`(N, C)` features by their non-zeros; takes no gradient itself.

    `x @ weight` is `(N, F)` with a gradient for weight; `x.dropout(p)` drops non-zeros.
    """

    __slots__ = ("pattern", "values")

    def __init__(self, pattern: _Pattern, values: Tensor) -> None:
        self.pattern, self.values = pattern, values

    @classmethod
    def from_csr(cls, indptr: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, int]) -> SparseFeatures:
        """Row n holds `values[indptr[n]:indptr[n + 1]]` in columns `indices[...]`.

        Raises:
            ValueError: pieces that do not fit together, or a column outside the shape.
        """
        n, c = shape
        crow, col = indptr.to(torch.int64), indices.to(torch.int64)
        if crow.shape != (n + 1,) or col.shape != values.shape or col.dim() != 1:
            raise ValueError(
                f"CSR of shape {shape} needs indptr ({n + 1},) and as many indices as values; got {tuple(crow.shape)}, "
                f"{tuple(col.shape)} and {tuple(values.shape)}"
            )
        if int(crow[0]) != 0 or int(crow[-1]) != col.numel() or bool((crow.diff() < 0).any()):
            raise ValueError(f"indptr must rise from 0 to {col.numel()} without falling")
        if col.numel() and (int(col.min()) < 0 or int(col.max()) >= c):
            raise ValueError(f"columns span {int(col.min())}..{int(col.max())}, but there are {c} features")
        row = torch.repeat_interleave(torch.arange(n, device=col.device), crow.diff())
        order = torch.argsort(col, stable=True)
        t_crow = torch.searchsorted(col[order], torch.arange(c + 1, device=col.device))
        return cls(_Pattern(crow, col, t_crow, row[order], order, (n, c)), values)

    @classmethod
    def from_dense(cls, x: Tensor) -> SparseFeatures:
        """The non-zeros of `(N, C)`."""
        x = x.detach()
        row, col = x.nonzero(as_tuple=True)
        crow = torch.searchsorted(row, torch.arange(x.shape[0] + 1, device=x.device))
        return cls.from_csr(crow, col, x[row, col], (x.shape[0], x.shape[1]))

    @property
    def shape(self) -> tuple[int, int]:
        return self.pattern.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    def dim(self) -> int:
        return 2

    def dropout(self, p: float, training: bool = True) -> SparseFeatures:
        """Each non-zero dropped with probability p, the others scaled by 1 / (1 - p)."""
        return SparseFeatures(self.pattern, drop(self.values, p, training)) if training and p else self

    def normalized(self) -> SparseFeatures:
        """Rows that sum to 1; a row that sums to 0 stays as it is."""
        total = torch.segment_reduce(self.values, "sum", offsets=self.pattern.crow, initial=0.0)
        total = torch.where(total == 0, 1.0, total)
        return SparseFeatures(self.pattern, self.values / torch.repeat_interleave(total, self.pattern.crow.diff()))

    def to(self, *args: Any) -> SparseFeatures:
        """Another device or dtype, as `Tensor.to`."""
        values = self.values.to(*args)
        if values.device == self.pattern.col.device:
            return SparseFeatures(self.pattern, values)
        moved = {name: getattr(self.pattern, name).to(values.device) for name in _Pattern._fields[:-1]}
        return SparseFeatures(_Pattern(**moved, shape=self.shape), values)

    def to_dense(self) -> Tensor:
        return csr_tensor(self.pattern.crow, self.pattern.col, self.values, self.shape).to_dense()

    def __matmul__(self, weight: Tensor) -> Tensor:
        return _Product.apply(self.pattern, self.values.to(weight.dtype), weight)

    def __repr__(self) -> str:
        n, c = self.shape
        count = self.values.numel()
        return f"SparseFeatures({n} x {c}, {count} non-zeros, {100 * count / max(n * c, 1):.1f}% dense)"


class _Product(torch.autograd.Function):
    """Sparse `(N, C)` times dense `(C, F)`; the gradient is the transposed product, whose pattern is computed once."""

    @staticmethod
    def forward(ctx: Any, pattern: _Pattern, values: Tensor, weight: Tensor) -> Tensor:
        ctx.pattern = pattern
        ctx.save_for_backward(values)
        return sparse_product(pattern.crow, pattern.col, values, pattern.shape, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None, Tensor]:
        (values,) = ctx.saved_tensors
        p = ctx.pattern
        n, c = p.shape
        return None, None, sparse_product(p.t_crow, p.t_row, values.index_select(0, p.order), (c, n), g)


class Projection(nn.Linear):
    """`nn.Linear` that also takes `SparseFeatures`; Glorot's initial weights, as GAT has."""

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor | SparseFeatures) -> Tensor:  # type: ignore[override]
        if isinstance(x, SparseFeatures):
            out = x @ self.weight.T
            return out if self.bias is None else out + self.bias
        return super().forward(x)


def drop(x: Tensor | SparseFeatures, p: float, training: bool) -> Any:
    """Dropout on the non-zeros of either kind of features.

    `F.dropout` draws one Bernoulli number at a time on a CPU, ten times slower than `rand`.
    """
    if not training or p == 0.0:
        return x
    if isinstance(x, SparseFeatures):
        return x.dropout(p)
    return x * ((torch.rand_like(x) >= p).to(x.dtype) / (1 - p))
