"""A graph is a set of edges, kept as runs: per target, the maximal blocks of consecutive sources it reads.

`mask[i, j]` True, the edge `j -> i`, and "target i reads source j" are one statement.  Rows are targets.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import operator
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])
_INT = torch.int64

# More runs or edges than this from one operation is refused with the figure: 2**27 runs are 2 GiB of start and stop.
LIMIT = 2**27


def plainly(make: _F) -> _F:
    """`make` on plain tensors, also inside `torch.func.grad`, `jvp` or `vmap`, which wrap the tensors made in them.

    Nothing is differentiated through a graph, and one graph serves all that `vmap` batches: what it is built from may
    not differ between them (ValueError).
    """

    @functools.wraps(make)
    def outside(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
            return make(*args, **kwargs)
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

        args = tuple(_unwrapped(x, make.__name__) for x in args)
        kwargs = {name: _unwrapped(x, make.__name__) for name, x in kwargs.items()}
        with temporarily_clear_interpreter_stack():
            return make(*args, **kwargs)

    return outside  # type: ignore[return-value]


def _unwrapped(x: Any, name: str) -> Any:
    """A tensor, or those in a tuple or list, without what function transforms put around it."""
    if isinstance(x, (tuple, list)):
        return type(x)(_unwrapped(y, name) for y in x) if type(x) in (tuple, list) else x
    while isinstance(x, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_batchedtensor(x):
            raise ValueError(
                f"{name} got a tensor that vmap splits, but one graph serves the whole batch: build it outside vmap, "
                "with leading axes (B, H) where it differs between samples, and call attend on the whole batch"
            )
        x = torch._C._functorch.get_unwrapped(x)
    return x


class Graph:
    """Which sources each target may read: an immutable, hashable set of edges without features.

    Canonical form, int64, for `rows` = (leading axes) x T_q in order batch, head, target:
    `indptr (rows + 1)`, `start (R)`, `stop (R)`; row r owns runs `indptr[r]:indptr[r + 1]`, each the sources
    `[start, stop)`, sorted, disjoint and never touching.  Two graphs are equal iff these tensors are.

    `shape` is `(T_q, T_kv)`, or `(B, H, T_q, T_kv)` where B and H are 1 or the query's batch and head count.
    Edges are numbered by (batch, head, target, source): *edge order*, the order of every per-edge value.

    Build one with `ga.causal(8)` and other patterns, a converter such as `ga.from_mask`, or the algebra
    `| & - ^ ~ @ ** .T`.
    """

    __slots__ = ("indptr", "start", "stop", "lead", "t", "s", "handle", "kind", "_cache", "__weakref__")

    indptr: Tensor
    start: Tensor
    stop: Tensor
    lead: tuple[int, ...]
    t: int
    s: int
    handle: Tensor  # 0-d int64, names this object to operators that take tensors alone; see `by_handle`
    kind: str  # "causal" once known, so that a compiler can read it without computing
    _cache: dict[Hashable, Any]

    def __init__(self) -> None:
        raise TypeError(
            "a Graph is built by a pattern (graphattn.causal(8)), a converter (graphattn.from_mask(mask), "
            "graphattn.from_edge_index(edge_index, shape)) or Graph.from_runs"
        )

    # ------------------------------------------------------------------ construction

    @classmethod
    def _new(cls, indptr: Tensor, start: Tensor, stop: Tensor, shape: Sequence[int]) -> Graph:
        """Trust canonical runs."""
        graph = object.__new__(cls)
        put = object.__setattr__
        put(graph, "indptr", indptr)
        put(graph, "start", start)
        put(graph, "stop", stop)
        put(graph, "lead", tuple(shape[:-2]))
        put(graph, "t", shape[-2])
        put(graph, "s", shape[-1])
        put(graph, "kind", "")
        put(graph, "_cache", {})
        number = next(_NUMBERS)
        put(graph, "handle", torch.tensor(number))
        _LIVING[number] = graph
        return graph

    @classmethod
    @plainly
    def from_runs(cls, indptr: Tensor, start: Tensor, stop: Tensor, shape: Sequence[int]) -> Graph:
        """The graph whose row r reads `[start, stop)` of runs `indptr[r]:indptr[r + 1]`.

        Args:
            indptr: `(rows + 1,)` integer, first run of each row, non-decreasing from 0 to R.
            start, stop: `(R,)` integer; within a row in any order, overlapping, touching or empty.
            shape: `(T_q, T_kv)` or `(B, H, T_q, T_kv)`; rows is the product of all but the last.

        Raises:
            TypeError: not integers.  ValueError: sizes that do not fit together, or sources out of range.
        """
        shape = check_shape(shape)
        indptr, start, stop = (_integers(x, n) for x, n in ((indptr, "indptr"), (start, "start"), (stop, "stop")))
        rows, s, r = _rows(shape), shape[-1], start.numel()
        if indptr.numel() != rows + 1:
            raise ValueError(
                f"indptr has {indptr.numel()} entries, but shape {shape} has {rows} rows: it needs {rows + 1}"
            )
        if stop.numel() != r:
            raise ValueError(f"start has {r} entries and stop {stop.numel()}: each run needs both")
        if int(indptr[0]) != 0 or int(indptr[-1]) != r or bool((indptr.diff() < 0).any()):
            raise ValueError(f"indptr must rise from 0 to the number of runs, {r}, without falling")
        if r:
            low, high = int(start.min()), int(stop.max())
            if low < 0 or high > s or bool((stop < start).any()):
                raise ValueError(
                    f"runs span [{low}, {high}), but there are {s} sources: each needs 0 <= start <= stop <= {s}"
                )
        row = torch.repeat_interleave(torch.arange(rows, device=indptr.device), indptr.diff())
        return cls._from_pieces(row, start, stop, shape)

    @classmethod
    def _from_pieces(cls, row: Tensor, start: Tensor, stop: Tensor, shape: Sequence[int]) -> Graph:
        """Unite pieces `[start, stop)` of rows, in any order, overlapping or empty."""
        width = shape[-1] + 1
        base = row * width
        first, last = base + start, base + stop
        keep = last > first
        first, last = first[keep], last[keep]
        if first.numel() > 1:
            order = torch.argsort(first, stable=True)
            first, last = first[order], last[order]
            reach = torch.cummax(last, 0).values
            fresh = torch.ones_like(first, dtype=torch.bool)
            torch.gt(first[1:], reach[:-1], out=fresh[1:])
            head = fresh.nonzero().squeeze(1)
            tail = torch.cat([head[1:] - 1, head.new_full((1,), first.numel() - 1)])
            first, last = first[head], reach[tail]
        return cls._from_points(torch.stack([first, last], 1).reshape(-1), shape)

    @classmethod
    def _from_points(cls, points: Tensor, shape: Sequence[int]) -> Graph:
        """From strictly rising start, stop, start, ... on the line where row r begins at r * (T_kv + 1)."""
        rows, width = _rows(shape), shape[-1] + 1
        first, last = points[0::2], points[1::2]
        row = torch.div(first, width, rounding_mode="floor")
        base = row * width
        indptr = torch.searchsorted(row, torch.arange(rows + 1, device=points.device))
        return cls._new(indptr, first - base, last - base, shape)

    @classmethod
    @plainly
    def from_keys(cls, keys: Tensor, shape: Sequence[int], *, owned: bool = False) -> Graph:
        """From `row * (T_kv + 1) + source` of each edge, unsorted and with duplicates.

        `owned=True` allows sorting in place.
        """
        if keys.numel() == 0:
            return cls._from_points(keys, shape)
        keys = _sorted(keys, owned)
        gap = keys.diff()
        # a jump of more than 1 ends a run; a jump of 0 is a duplicate
        cut = (gap > 1).nonzero().squeeze(1)
        first = torch.cat([keys[:1], keys[cut + 1]])
        last = torch.cat([keys[cut], keys[-1:]]) + 1
        return cls._from_points(torch.stack([first, last], 1).reshape(-1), shape)

    # ------------------------------------------------------------------ facts

    @property
    def shape(self) -> tuple[int, ...]:
        """`(T_q, T_kv)`, after `(B, H)` if the graph has leading axes."""
        return (*self.lead, self.t, self.s)

    @property
    def rows(self) -> int:
        """Number of rows over all leading axes."""
        return self.indptr.numel() - 1

    @property
    def num_runs(self) -> int:
        return self.start.numel()

    @property
    def device(self) -> torch.device:
        return self.indptr.device

    @property
    def num_edges(self) -> int:
        """Number of edges over all leading axes."""
        return self.cached("num_edges", lambda: int((self.stop - self.start).sum()))

    @property
    def density(self) -> float:
        """Edges over cells, 0.0 for a graph without cells."""
        cells = self.rows * self.s
        return self.num_edges / cells if cells else 0.0

    def degree(self) -> Tensor:
        """How many sources each target reads: int64, `shape[:-1]`."""
        return self.edge_ptr().diff().view(self.shape[:-1])

    def cached(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """`make()` once; a derived form of an immutable value, never state."""
        try:
            return self._cache[key]
        except KeyError:
            pass
        if torch.compiler.is_compiling():
            return self._cache.setdefault(key, make())
        # derived forms outlive the call: made as plain tensors whatever mode or transform asks for them first, and
        # of several threads that make one, all use the first one's, since addresses of it may be in use
        with torch.inference_mode(False), torch.no_grad(), torch._C._DisableFuncTorch():
            value = make()
        return self._cache.setdefault(key, value)

    def run_edge(self) -> Tensor:
        """`(R,)` number of the first edge of each run."""
        return self.cached("run_edge", lambda: _starts(self.stop - self.start)[:-1])

    def edge_ptr(self) -> Tensor:
        """`(rows + 1,)` number of the first edge of each row."""
        return self.cached("edge_ptr", lambda: _starts(self.stop - self.start)[self.indptr])

    def run_row(self) -> Tensor:
        """`(R,)` row of each run."""
        return torch.repeat_interleave(torch.arange(self.rows, device=self.device), self.indptr.diff())

    def edges(self) -> tuple[Tensor, Tensor]:
        """`(row, source)`, each `(E,)` int64 in edge order; kept on the graph, so copy them before you change them."""
        return self.cached("edges", self._edges)

    def _edges(self) -> tuple[Tensor, Tensor]:
        if self.num_edges > 8 * LIMIT:
            raise ValueError(
                f"the edges of {self!r} as a list would take {self.num_edges * 16 / 2**30:.0f} GiB: its runs, indptr, start "
                f"and stop, take {self.num_runs * 16 / 2**30:.1f} GiB"
            )
        length = self.stop - self.start
        source = torch.arange(self.num_edges, device=self.device)
        source += torch.repeat_interleave(self.start - self.run_edge(), length)
        return torch.repeat_interleave(self.run_row(), length), source

    def targets_sources(self) -> tuple[Tensor, Tensor]:
        """`(target, source)`, each `(E,)` int64 in edge order; the target within its leading index."""
        row, source = self.edges()
        return (row % self.t if self.lead and self.rows != self.t else row), source

    def edge_keys(self) -> Tensor:
        """`(E,)` rising `row * (T_kv + 1) + source`."""
        row, source = self.edges()
        return row * (self.s + 1) + source

    def dense(self) -> Tensor:
        """Bool mask of `shape`: the one place that builds T_q x T_kv."""
        # +1 where a run starts, -1 where it stops: the running sum is the mask
        step = torch.zeros(self.rows, self.s + 1, dtype=torch.int8, device=self.device)
        base = self.run_row() * (self.s + 1)
        step.view(-1)[base + self.start] = 1
        step.view(-1)[base + self.stop] = -1
        return torch.cumsum(step, 1, dtype=torch.int8)[:, : self.s].bool().view(self.shape)

    def is_full(self) -> bool:
        """Every target reads every source."""
        return self.cached("is_full", lambda: self.num_edges == self.rows * self.s)

    def is_causal(self) -> bool:
        """Target i reads exactly the sources j <= i, of all leading indices."""
        return self.cached("is_causal", self._is_causal)

    def _is_causal(self) -> bool:
        causal = self._reads_up_to_itself()
        if causal:
            object.__setattr__(self, "kind", "causal")
        return causal

    def _reads_up_to_itself(self) -> bool:
        if self.s == 0 or self.num_runs != self.rows or bool((self.start != 0).any()):
            return False
        reach = torch.arange(1, self.t + 1, device=self.device).clamp_(max=self.s)
        return bool((self.stop.view(-1, self.t) == reach).all() and (self.indptr.diff() == 1).all())

    def __repr__(self) -> str:
        lead = "".join(f"{n} x " for n in self.lead)
        edges = f"{self.num_edges} edge" + ("" if self.num_edges == 1 else "s")
        return f"Graph({lead}{self.t} <- {self.s}, {edges}, {100 * self.density:.1f}% dense)"

    # ------------------------------------------------------------------ value semantics

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Graph is immutable: build a new one instead of setting {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("a Graph is immutable")

    @plainly
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Graph):
            return NotImplemented
        if self is other:
            return True
        if self.shape != other.shape or self.num_runs != other.num_runs:
            return False
        other = other.to(self.device)
        return bool(
            torch.equal(self.indptr, other.indptr)
            and torch.equal(self.start, other.start)
            and torch.equal(self.stop, other.stop)
        )

    def __hash__(self) -> int:
        return self.cached("hash", lambda: int.from_bytes(self.digest()[:8], "little") >> 1)

    def digest(self) -> bytes:
        """32 bytes that are the same for equal graphs in every process (BLAKE2b of shape and runs)."""

        def make() -> bytes:
            h = hashlib.blake2b(repr(self.shape).encode(), digest_size=32)
            for x in (self.indptr, self.start, self.stop):
                h.update(x.cpu().contiguous().numpy())  # type: ignore[arg-type]
            return h.digest()

        return self.cached("digest", make)

    def __copy__(self) -> Graph:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Graph:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.indptr, self.start, self.stop, self.shape))

    def __bool__(self) -> bool:
        raise TypeError("the truth of a Graph is ambiguous: use graph.num_edges > 0, or a == b, a <= b")

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("a Graph is not a sequence: graph.edges() gives the rows and sources of its edges")

    def __contains__(self, edge: object) -> bool:
        raise TypeError("which end of a pair comes first? to_mask(graph)[i, j] says whether target i reads source j")

    def to(self, device: torch.device | str) -> Graph:
        """The same graph on a device; itself if it is there already, and copied once."""
        device = torch.device(device)
        if device == self.device or (device.type == self.device.type and device.index is None):
            return self
        return self.cached(
            ("to", device),
            lambda: Graph._new(self.indptr.to(device), self.start.to(device), self.stop.to(device), self.shape),
        )

    # ------------------------------------------------------------------ set algebra

    def __or__(self, other: Graph) -> Graph:
        return self._combine(other, torch.logical_or, "|")

    def __and__(self, other: Graph) -> Graph:
        return self._combine(other, torch.logical_and, "&")

    def __sub__(self, other: Graph) -> Graph:
        return self._combine(other, torch.gt, "-")

    def __xor__(self, other: Graph) -> Graph:
        return self._combine(other, torch.logical_xor, "^")

    @plainly
    def __invert__(self) -> Graph:
        """All pairs that are no edge."""
        first = torch.arange(self.rows, device=self.device) * (self.s + 1)
        if self.s == 0:
            return self
        whole = torch.stack([first, first + self.s], 1).reshape(-1)
        return Graph._from_points(_merge_points(whole, self._points(), torch.gt), self.shape)

    def __le__(self, other: Graph) -> bool:
        """Every edge of this graph is an edge of the other."""
        if not isinstance(other, Graph):
            return NotImplemented
        return (self - other).num_runs == 0

    def __ge__(self, other: Graph) -> bool:
        if not isinstance(other, Graph):
            return NotImplemented
        return other <= self

    def __lt__(self, other: Graph) -> bool:
        if not isinstance(other, Graph):
            return NotImplemented
        return self <= other and self != other

    def __gt__(self, other: Graph) -> bool:
        if not isinstance(other, Graph):
            return NotImplemented
        return other < self

    @plainly
    def _combine(self, other: Graph, op: Callable[[Tensor, Tensor], Tensor], sign: str) -> Graph:
        if not isinstance(other, Graph):
            return NotImplemented
        a, b = _broadcast(self, other, sign)
        return Graph._from_points(_merge_points(a._points(), b._points(), op), a.shape)

    def _points(self) -> Tensor:
        """Boundaries start, stop, start, ... on one line where row r begins at r * (T_kv + 1): strictly rising."""
        base = self.run_row() * (self.s + 1)
        return torch.stack([base + self.start, base + self.stop], 1).reshape(-1)

    @plainly
    def expand(self, batch: int, head: int) -> Graph:
        """The same edges for every index of leading axes `(batch, head)`; an axis the graph has must fit or be 1."""
        lead = self.lead or (1, 1)
        if lead == (batch, head) and self.lead:
            return self
        if any(a not in (1, n) for a, n in zip(lead, (batch, head), strict=True)):
            raise ValueError(f"{self!r} has leading axes {lead}, which do not expand to ({batch}, {head})")
        self._refuse(batch * head * self.t, f"expanding to ({batch}, {head})", "rows")
        count = self.indptr.diff().view(*lead, self.t).expand(batch, head, self.t).reshape(-1)
        indptr = _starts(count)
        self._refuse(int(indptr[-1]), f"expanding to ({batch}, {head})", "runs")
        source = torch.arange(lead[0] * lead[1], device=self.device).view(lead).expand(batch, head).reshape(-1)
        first = self.indptr[source * self.t].repeat_interleave(self.t)
        within = self.indptr[:-1].view(*lead, self.t).expand(batch, head, self.t).reshape(-1) - first
        pick = torch.repeat_interleave(first + within - indptr[:-1], count)
        pick += torch.arange(pick.numel(), device=self.device)
        return Graph._new(indptr, self.start[pick], self.stop[pick], (batch, head, self.t, self.s))

    # ------------------------------------------------------------------ transpose, slices, products

    @property
    def T(self) -> Graph:  # noqa: N802 - the name tensors use
        """Every edge reversed: `(T_kv <- T_q)`.

        Raises:
            ValueError: the transpose would have more than 2**27 runs (a graph whose every second target reads
            all sources has none in common with its neighbour); the figure is named.
        """
        return self.cached("T", self._transpose)

    def _transpose(self) -> Graph:
        # Column j begins or ends a run at target i exactly where mask[i, j] != mask[i - 1, j]: the symmetric
        # difference of each row with the row above, linear in runs, predicts the size and then is the answer.
        t, s, width = self.t, self.s, self.s + 1
        points = self._points()
        lead_of = torch.div(points, width * max(t, 1), rounding_mode="floor")
        here = points + lead_of * width  # t + 1 rows per leading index: the last holds the closing boundaries
        toggles = _merge_points(here, here + width, torch.logical_xor)
        length = toggles[1::2] - toggles[0::2]
        runs = int(length.sum()) // 2
        if runs > LIMIT:
            raise ValueError(
                f"the transpose of {self!r} would have {runs:,} runs ({runs * 16 / 2**30:.0f} GiB), over the limit of "
                f"{LIMIT:,}: use the graph as it is, attention and its gradient do not need the transpose"
            )
        first = toggles[0::2]
        row = torch.div(first, width, rounding_mode="floor")
        cell = torch.repeat_interleave(first - row * width - _starts(length)[:-1], length)
        cell += torch.arange(cell.numel(), device=self.device)
        row = torch.repeat_interleave(row, length)
        lead, row = torch.div(row, t + 1, rounding_mode="floor"), row % (t + 1)
        line = (lead * s + cell) * (t + 1) + row
        del lead, row, cell
        out = Graph._from_points(_sorted(line, True), (*self.lead, s, t))
        out._cache["T"] = self
        return out

    @plainly
    def relabel(self, order: Tensor | Sequence[int]) -> Graph:
        """The graph after its nodes are taken in `order`, as features are by `x[order]`.

        Edge `j -> i` of the result is edge `order[j] -> order[i]` of this graph; `order` is a permutation of the
        nodes of a square graph.
        """
        if self.t != self.s:
            raise ValueError(f"relabel needs as many targets as sources, got {self!r}: use graph[rows, cols]")
        order = _index(order, self.t, "order", self.device)
        if order.numel() != self.t or not torch.equal(_sorted(order), torch.arange(self.t, device=self.device)):
            raise ValueError(f"order must be a permutation of 0..{self.t - 1}, got {order.numel()} entries")
        return self[order, order]

    @plainly
    def __getitem__(self, index: Any) -> Graph:
        """`graph[rows, cols]`: as `mask[rows][:, cols]`; each a slice, an integer list or tensor, or a bool mask.

        Leading axes are kept: `graph[rows, cols]` cuts each of them alike.
        """
        if not isinstance(index, tuple) or len(index) != 2:
            raise IndexError("a Graph takes two indices, graph[targets, sources]; use graph.select for leading axes")
        return self._take_rows(index[0])._take_cols(index[1])

    @plainly
    def select(self, batch: int | None = None, head: int | None = None) -> Graph:
        """One index of the batch axis, the head axis, or both (then without leading axes)."""
        if not self.lead:
            raise ValueError(f"{self!r} has no leading axes to select from")
        b, h = self.lead
        for name, i, n in (("batch", batch, b), ("head", head, h)):
            if i is not None and not -n <= i < n:
                raise IndexError(f"{name} {i} is out of range for {self!r}")
        grid = torch.arange(self.rows, device=self.device).view(b, h, self.t)
        grid = grid if batch is None else grid[batch % b : batch % b + 1]
        grid = grid if head is None else grid[:, head % h : head % h + 1]
        shape = (self.t, self.s) if batch is not None and head is not None else (*grid.shape[:2], self.t, self.s)
        return self._gather_rows(grid.reshape(-1), shape)

    def _take_rows(self, index: Any) -> Graph:
        if isinstance(index, slice) and index == slice(None):
            return self
        pick = _index(index, self.t, "targets", self.device)
        n = self.rows // self.t if self.t else 0
        rows = (torch.arange(n, device=self.device)[:, None] * self.t + pick).reshape(-1)
        return self._gather_rows(rows, (*self.lead, pick.numel(), self.s))

    def _gather_rows(self, rows: Tensor, shape: Sequence[int]) -> Graph:
        count = self.indptr.diff()[rows]
        indptr = _starts(count)
        self._refuse(int(indptr[-1]), f"taking {rows.numel():,} rows", "runs")
        pick = torch.repeat_interleave(self.indptr[rows] - indptr[:-1], count)
        pick += torch.arange(pick.numel(), device=self.device)
        return Graph._new(indptr, self.start[pick], self.stop[pick], shape)

    def _take_cols(self, index: Any) -> Graph:
        if isinstance(index, slice):
            low, high, step = index.indices(self.s)
            if step == 1:
                high = max(low, high)
                start, stop = self.start.clamp(low, high) - low, self.stop.clamp(low, high) - low
                return Graph._from_pieces(self.run_row(), start, stop, (*self.lead, self.t, high - low))
        pick = _index(index, self.s, "sources", self.device)
        shape = (*self.lead, self.t, pick.numel())
        # `pick` falls into stretches of consecutive sources; a run meets a stretch in one piece
        fresh = torch.ones(pick.numel(), dtype=torch.bool, device=self.device)
        fresh[1:] = pick.diff() != 1
        at = fresh.nonzero().squeeze(1)
        size = torch.cat([at, at.new_tensor([pick.numel()])]).diff()
        low = pick[at]  # type: ignore[assignment]
        by_low = torch.argsort(low, stable=True)  # type: ignore[call-overload]
        at, low, high = at[by_low], low[by_low], (low + size)[by_low]  # type: ignore[index]
        if bool((low[1:] < high[:-1]).any()):
            return self._take_repeated_cols(pick, shape)
        # disjoint sorted stretches: those that meet [start, stop) are a block of them
        first = torch.searchsorted(high, self.start, right=True)
        last = torch.searchsorted(low, self.stop)
        count = (last - first).clamp_(min=0)
        self._refuse(int(count.sum()), "selecting these sources", "runs")
        which = torch.repeat_interleave(first - _starts(count)[:-1], count)
        which += torch.arange(which.numel(), device=self.device)
        run = torch.repeat_interleave(torch.arange(self.num_runs, device=self.device), count)
        begin = torch.maximum(self.start[run], low[which])
        end = torch.minimum(self.stop[run], high[which])
        shift = (at - low)[which]
        return Graph._from_pieces(self.run_row()[run], begin + shift, end + shift, shape)

    def _take_repeated_cols(self, pick: Tensor, shape: Sequence[int]) -> Graph:
        by_source = torch.argsort(pick, stable=True)
        ptr = torch.searchsorted(pick[by_source], torch.arange(self.s + 1, device=self.device))
        # sources start..stop-1 of a run land on the entries ptr[start]:ptr[stop] of by_source
        count = ptr[self.stop] - ptr[self.start]
        self._refuse(int(count.sum()), "selecting these repeated sources", "edges")
        at = torch.repeat_interleave(ptr[self.start] - _starts(count)[:-1], count)
        at += torch.arange(at.numel(), device=self.device)
        row = torch.repeat_interleave(self.run_row(), count)
        return Graph.from_keys(row * (shape[-1] + 1) + by_source[at], shape, owned=True)

    def _refuse(self, size: int, what: str, unit: str) -> None:
        if size > LIMIT:
            raise ValueError(
                f"{what} of {self!r} would make {size:,} {unit} ({size * 16 / 2**30:.0f} GiB), over the limit of {LIMIT:,}"
            )

    @plainly
    def __matmul__(self, other: Graph) -> Graph:
        """Who reaches whom in two hops: target i of `self` reads j, and j as a target of `other` reads k.

        As boolean matrices, `self @ other`.  Refused, with the figure, above 2**27 runs to unite.
        """
        if not isinstance(other, Graph):
            return NotImplemented
        if self.s != other.t:
            raise ValueError(
                f"{self!r} @ {other!r}: {self.s} sources of the first must be the {other.t} targets of the second"
            )
        if self.lead or other.lead:
            lead = _broadcast_lead(self, other, "@")
            a, b = self.expand(*lead), other.expand(*lead)
        else:
            a, b = self, other
        shape = (*a.lead, a.t, b.s)
        run_row = a.run_row()
        offset = torch.div(run_row, max(a.t, 1), rounding_mode="floor") * b.t
        # the rows start..stop-1 of b own one block of b's runs
        first, last = b.indptr[a.start + offset], b.indptr[a.stop + offset]
        count = last - first
        self._refuse(int(count.sum()), f"the product with {other!r}", "runs")
        which = torch.repeat_interleave(first - _starts(count)[:-1], count)
        which += torch.arange(which.numel(), device=self.device)
        row = torch.repeat_interleave(run_row, count)
        return Graph._from_pieces(row, b.start[which], b.stop[which], shape)

    @plainly
    def __pow__(self, k: int) -> Graph:
        """Who reaches whom in exactly k hops; `g ** 0` is self-loops."""
        k = operator.index(k)
        if self.t != self.s:
            raise ValueError(f"{self!r} ** {k}: a power needs as many targets as sources")
        if k < 0:
            raise ValueError(f"{self!r} ** {k}: the exponent must be at least 0")
        node = torch.arange(self.rows, device=self.device)
        own = node % max(self.t, 1)
        out = Graph._new(torch.arange(self.rows + 1, device=self.device), own, own + 1, self.shape)
        base = self
        while k:
            if k & 1:
                out = out @ base
            k >>= 1
            if k:
                base = base @ base
        return out


_NUMBERS = itertools.count()
_LIVING: weakref.WeakValueDictionary[int, Graph] = weakref.WeakValueDictionary()


def by_handle(handle: Tensor) -> Graph:
    """The living graph that a `graph.handle` names."""
    return _LIVING[int(handle)]


# ---------------------------------------------------------------------- helpers of the constructors


def check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """A tuple of two or four non-negative ints, or ValueError."""
    try:
        out = tuple(operator.index(n) for n in shape)
    except TypeError:
        raise TypeError(f"shape must be integers (T_q, T_kv) or (B, H, T_q, T_kv), got {shape!r}") from None
    if len(out) not in (2, 4) or any(n < 0 for n in out):
        raise ValueError(f"shape must be (T_q, T_kv) or (B, H, T_q, T_kv), none negative, got {shape!r}")
    if _rows(out) * (out[-1] + 1) >= 2**62:
        raise ValueError(f"shape {out} has too many cells to number in 64 bits")
    return out


def square_or_shape(shape: Any) -> tuple[int, ...]:
    """`check_shape`, in which one integer, of Python, numpy or torch, is the number of nodes of a square graph."""
    if not isinstance(shape, bool):
        try:
            n = operator.index(shape)
        except TypeError:
            return check_shape(shape)
        return check_shape((n, n))
    raise TypeError(f"shape must be integers (T_q, T_kv), got {shape!r}")


def _rows(shape: Iterable[int]) -> int:
    rows = 1
    for n in tuple(shape)[:-1]:
        rows *= n
    return rows


def _starts(count: Tensor) -> Tensor:
    """Exclusive cumulative sum with the total at the end: `(n + 1,)`."""
    out = count.new_zeros(count.numel() + 1, dtype=_INT)
    torch.cumsum(count, 0, out=out[1:])
    return out


def _sorted(x: Tensor, owned: bool = False) -> Tensor:
    """Sorted 1-D int64.  numpy's vectorised sort is ten times torch's on a CPU, and keeps no indices."""
    if x.device.type == "cpu":
        x = x.contiguous() if owned else x.clone(memory_format=torch.contiguous_format)
        x.numpy().sort()
        return x
    return torch.sort(x).values


def _merge_points(a: Tensor, b: Tensor, op: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Boundaries of `op(A, B)` from the boundaries of two sets on the line.

    A point is inside A iff an odd number of A's boundaries lie at or before it.
    """
    if a.numel() == 0 and b.numel() == 0:
        return a
    both = torch.cat([a, b])
    if a.device.type == "cpu":
        # numpy's stable sort merges two rising sequences in one pass, and its accumulate scans bits as bits
        order = both.numpy().argsort(kind="stable")
        line = both[torch.from_numpy(order)]
        from_a = (order < a.numel()).view("uint8")
        in_a, in_b = (torch.from_numpy(np.bitwise_xor.accumulate(x).view(bool)) for x in (from_a, from_a ^ 1))
    else:
        at = torch.empty_like(both)
        # merge by counting, for each, how many of the other come first
        at[: a.numel()] = torch.searchsorted(b, a) + torch.arange(a.numel(), device=a.device)
        at[a.numel() :] = torch.searchsorted(a, b, right=True) + torch.arange(b.numel(), device=a.device)
        line = torch.empty_like(both)
        line[at] = both
        from_a = torch.zeros_like(both, dtype=torch.bool)  # type: ignore[assignment]
        from_a[at[: a.numel()]] = True
        in_a = torch.cumsum(from_a, 0) % 2 == 1  # type: ignore[arg-type]
        in_b = torch.cumsum(~from_a, 0) % 2 == 1  # type: ignore[arg-type]
    value = op(in_a, in_b)
    last = torch.ones_like(value)  # of several boundaries at one point only the last tells the value after it
    last[:-1] = line[1:] != line[:-1]
    line, value = line[last], value[last]
    change = value.clone()
    change[1:] ^= value[:-1]
    return line[change]


def _integers(x: Any, name: str) -> Tensor:
    x = torch.as_tensor(x)
    if x.dim() != 1:
        raise ValueError(f"{name} must have one axis, got shape {tuple(x.shape)}")
    if x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool:
        if x.numel() == 0:
            return x.to(_INT)
        raise TypeError(f"{name} must hold integers, got {x.dtype}")
    return x.to(_INT)


def _index(index: Any, n: int, name: str, device: torch.device) -> Tensor:
    """Positions 0..n-1 named by a slice, an int sequence, or a bool mask; negative positions are refused."""
    if isinstance(index, slice):
        return torch.tensor(range(n)[index], dtype=_INT, device=device)
    if isinstance(index, int):
        raise IndexError(f"{name}: use a slice or a list, [{index}], so that the graph keeps both axes")
    pick = torch.as_tensor(index, device=device)
    if pick.dtype == torch.bool:
        if pick.shape != (n,):
            raise IndexError(f"{name}: a bool index must have {n} entries, got shape {tuple(pick.shape)}")
        return pick.nonzero().squeeze(1)
    pick = _integers(pick, name)
    if pick.numel() and (int(pick.min()) < 0 or int(pick.max()) >= n):
        raise IndexError(
            f"{name} span {int(pick.min())}..{int(pick.max())}, but there are {n}: each needs 0 <= index < {n}"
        )
    return pick


def _broadcast_lead(a: Graph, b: Graph, sign: str) -> tuple[int, int]:
    la, lb = a.lead or (1, 1), b.lead or (1, 1)
    if any(m != n and 1 not in (m, n) for m, n in zip(la, lb, strict=True)):
        raise ValueError(f"{a!r} {sign} {b!r}: leading axes {la} and {lb} do not broadcast")
    # an axis of size 0 wins over 1, as in torch
    return tuple(n if m == 1 else m for m, n in zip(la, lb, strict=True))  # type: ignore[return-value]


def _broadcast(a: Graph, b: Graph, sign: str) -> tuple[Graph, Graph]:
    if (a.t, a.s) != (b.t, b.s):
        raise ValueError(f"{a!r} {sign} {b!r}: both need the same number of targets and of sources")
    if a.device != b.device:
        raise ValueError(f"{a!r} is on {a.device}, {b!r} on {b.device}: move one with .to(device)")
    if a.lead == b.lead:
        return a, b
    lead = _broadcast_lead(a, b, sign)
    return a.expand(*lead), b.expand(*lead)


def _rebuild(indptr: Tensor, start: Tensor, stop: Tensor, shape: Sequence[int]) -> Graph:
    """Unpickle through the checking door: a pickle is input like any other."""
    return Graph.from_runs(indptr, start, stop, shape)
