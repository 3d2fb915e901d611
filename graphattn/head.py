"""One round of messages on a graph: queries from the stream that is written, keys and values from the one that is read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import backends
from .backends import terms
from .graph import Graph
from .scores import Additive, GATv2, Score

SCORES = ("dot", "additive", "gatv2")


class Head(nn.Module):
    """Multi-head attention over a graph that is given with every call; no output projection.

    self-attention: `head(x, graph)`; cross-attention: `head(x, graph, context)`, graph `(T_q <- T_kv)`.

    Args:
        dim: width of x.
        head_dim: width of one head; the dot product is scaled by 1 / sqrt(head_dim).
        heads: number of heads, side by side in the output.
        kv_heads: number of key and value heads, a divisor of heads, each read by a group of query heads
            (Ainslie et al. 2023); by default heads.
        context_dim: width of the context, by default dim.
        score: "dot" (Vaswani et al. 2017), "additive" (GAT, Velickovic et al. 2018) or "gatv2" (Brody et al. 2022).
            The last two score the projected values themselves, so they have no separate key projection.
        tied: the dot product does so too: one projection gives queries, keys and values (Kim and Oh 2021, section 3).
        qk_norm: layer norm over each head's queries and keys (Dehghani et al. 2023, section 2.1).
        rotary: rotary positions on queries and keys (Su et al. 2021); needs an even head_dim.
        bias: whether the projections have one.
        dropout: probability of dropping an edge while training.
    """

    def __init__(
        self, dim: int, head_dim: int, heads: int = 1, *, kv_heads: int | None = None, context_dim: int | None = None,
        score: str = "dot", tied: bool = False, qk_norm: bool = False, rotary: bool = False, bias: bool = False,
        dropout: float = 0.0, slope: float = 0.2,
    ) -> None:  # fmt: skip
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        for name, n in (("dim", dim), ("head_dim", head_dim), ("heads", heads), ("kv_heads", kv_heads)):
            if n < 1:
                raise ValueError(f"{name} must be at least 1, got {n}")
        if score not in SCORES:
            raise ValueError(f"score must be one of {', '.join(SCORES)}; got {score!r}")
        if heads % kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
        if score != "dot" and (kv_heads != heads or qk_norm or rotary):
            raise ValueError(f"kv_heads, qk_norm and rotary belong to the dot score, not to {score}")
        if tied and score != "dot":
            raise ValueError(f'tied belongs to the dot score, not to {score}: pass score="dot", or leave tied out')
        if tied and (kv_heads != heads or context_dim not in (None, dim)):
            raise ValueError(
                "tied projects once for queries, keys and values: it needs as many kv_heads as heads and a context of x's "
                f"width; got {kv_heads} of {heads} and {context_dim} for {dim}"
            )
        if rotary and head_dim % 2:
            raise ValueError(f"rotary positions turn pairs of numbers, so head_dim must be even, got {head_dim}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        self.dim, self.head_dim, self.heads, self.kv_heads = dim, head_dim, heads, kv_heads
        self.context_dim = dim if context_dim is None else context_dim
        self.score, self.rotary, self.dropout, self.slope = score, rotary, dropout, slope
        self.tied = tied
        self.value = nn.Linear(self.context_dim, kv_heads * head_dim, bias=bias)
        self.query: nn.Linear | None
        if tied:
            self.query = None
        elif score == "dot":
            self.query = nn.Linear(dim, heads * head_dim, bias=bias)
            self.key = nn.Linear(self.context_dim, kv_heads * head_dim, bias=bias)
        elif score == "gatv2":
            self.query = nn.Linear(dim, heads * head_dim, bias=bias)
            self.vector = nn.Parameter(torch.empty(heads, head_dim))
        else:
            # GAT projects targets and sources with one matrix; two streams of different width need two
            self.query = nn.Linear(dim, heads * head_dim, bias=bias) if self.context_dim != dim else None
            self.target_vector = nn.Parameter(torch.empty(heads, head_dim))
            self.source_vector = nn.Parameter(torch.empty(heads, head_dim))
        self.query_norm = nn.LayerNorm(head_dim) if qk_norm else None
        self.key_norm = nn.LayerNorm(head_dim) if qk_norm else None
        for name in ("vector", "target_vector", "source_vector"):
            if hasattr(self, name):
                nn.init.xavier_uniform_(getattr(self, name))

    def forward(
        self, x: Tensor, graph: Graph, context: Tensor | None = None, *, positions: Tensor | None = None,
        key_positions: Tensor | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        """Messages along the graph's edges.

        Args:
            x: `(..., T_q, dim)`, the stream that is written.
            graph: `(T_q <- T_kv)`, or with leading axes `(B, H)`.
            context: `(..., T_kv, context_dim)`, the stream that is read; by default x.
            positions, key_positions: `(T_q,)` and `(T_kv,)` for rotary; by default counted from 0.
            options: of `attend`: bias, edge_key, edge_value, softcap, seed, scale, backend.

        Returns:
            `(..., T_q, heads * head_dim)`.
        """
        queries, keys, values = self.project(x, context, positions=positions, key_positions=key_positions)
        return self.attend(queries, keys, values, graph, **options)

    def project(
        self, x: Tensor, context: Tensor | None = None, *, positions: Tensor | None = None,
        key_positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Queries, keys and values, as `queries` and `keys_values` give them; together they cost less."""
        if self.score == "additive" and context is None and self.query is None:
            v = self._split(self.value(x), self.heads)
            q, k = terms.additive_terms(v, self.target_vector, self.source_vector)
            return q, k, v
        keys, values = self.keys_values(x if context is None else context, key_positions)
        return self.queries(x, positions, values if context is None else None), keys, values

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, graph: Graph, **options: Any) -> Tensor:
        """Attention over already projected queries, keys, values `(..., heads, T, D)`, such as cached ones."""
        dropout = self.dropout if self.training else 0.0
        lift = graph.__class__ is Graph and bool(graph.lead) and queries.dim() == 3
        if lift:
            queries, keys, values = queries[None], keys[None], values[None]
        out = backends.attend(queries, keys, values, graph, score=self._score(), dropout=dropout, **options)
        out = out.transpose(-3, -2).flatten(-2)  # (..., T_q, heads * head_dim)
        return out[0] if lift else out

    def weights(
        self, x: Tensor, graph: Graph, context: Tensor | None = None, *, positions: Tensor | None = None,
        key_positions: Tensor | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        """Attention weights per edge, `(..., heads, E)` in edge order (see `graphattn.weights`); never dropped."""
        queries, keys, _ = self.project(x, context, positions=positions, key_positions=key_positions)
        return self.projected_weights(queries, keys, graph, **options)

    def projected_weights(self, queries: Tensor, keys: Tensor, graph: Graph, **options: Any) -> Tensor:
        """`weights` of already projected queries and keys."""
        queries, keys = _lifted(queries, keys, graph)
        return backends.weights(queries, keys, graph, score=self._score(), **options)

    def edge_scores(self, queries: Tensor, keys: Tensor, graph: Graph, **options: Any) -> Tensor:
        """Scores before the softmax of already projected queries and keys, `(..., heads, E)`: see `graphattn.edge_scores`."""
        queries, keys = _lifted(queries, keys, graph)
        return backends.edge_scores(queries, keys, graph, score=self._score(), **options)

    def queries(self, x: Tensor, positions: Tensor | None = None, values: Tensor | None = None) -> Tensor:
        """`(..., heads, T_q, D)`, D 1 for the additive score; `values` are those of x where it is also the context."""
        if self.score == "additive":
            if self.query is not None:
                own = self._split(self.query(x), self.heads)
            else:
                own = self._split(self.value(x), self.heads) if values is None else values
            return terms.additive_term(own, self.target_vector)
        if self.tied:
            q = self._split(self.value(x), self.heads) if values is None else values
        else:
            q = self._split(self.query(x), self.heads)  # type: ignore[misc]  # (..., heads, T_q, D)
        if self.query_norm is not None:
            q = self.query_norm(q)
        return _turn(q, positions) if self.rotary else q

    def keys_values(self, context: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`(..., kv_heads, T_kv, D)` keys and values of the stream that is read; what a cache keeps."""
        v = self._split(self.value(context), self.kv_heads)
        if self.score == "gatv2":
            return v, v
        if self.score == "additive":
            return terms.additive_term(v, self.source_vector), v
        k = v if self.tied else self._split(self.key(context), self.kv_heads)
        if self.key_norm is not None:
            k = self.key_norm(k)
        return (_turn(k, positions) if self.rotary else k), v

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(-3, -2)

    def _score(self) -> Score | None:
        if self.score == "dot":
            return None
        return Additive(self.slope) if self.score == "additive" else GATv2(self.vector, self.slope)

    def extra_repr(self) -> str:
        tied = ", tied=True" if self.tied else ""
        return f"dim={self.dim}, head_dim={self.head_dim}, heads={self.heads}, score={self.score!r}{tied}"


def _lifted(queries: Tensor, keys: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
    """With a batch axis where the graph has one and they don't."""
    if isinstance(graph, Graph) and graph.lead and queries.dim() == 3:
        return queries[None], keys[None]
    return queries, keys


def _turn(x: Tensor, positions: Tensor | None) -> Tensor:
    """Rotate the pair (x_c, x_{c + D/2}) by position * 10000^(-2c / D), computed in float32 at least."""
    t, d = x.shape[-2:]
    wide = torch.promote_types(x.dtype, torch.float32)
    if positions is None:
        positions = torch.arange(t, device=x.device)
    rate = 10000.0 ** (-torch.arange(0, d, 2, device=x.device, dtype=wide) / d)
    angle = positions.to(wide)[..., None] * rate  # (T, D / 2)
    cos, sin = angle.cos(), angle.sin()
    a, b = x.to(wide).chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)
