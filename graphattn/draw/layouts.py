"""Where nodes stand and how an edge curves between them.  A layout is a dict node -> (x, y), as in networkx."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Point = tuple[float, float]


def circle(n: int) -> dict[int, Point]:
    """Node 0 at the top, then clockwise."""
    return {i: (math.sin(2 * math.pi * i / n), math.cos(2 * math.pi * i / n)) for i in range(n)}


def line(n: int) -> dict[int, Point]:
    return {i: (float(i), 0.0) for i in range(n)}


def column(n: int, x: float, height: float) -> dict[int, Point]:
    """`n` nodes from top to bottom, spread over `height`."""
    gap = height / max(n, 1)
    return {i: (x, -(i + 0.5) * gap) for i in range(n)}


def given(positions: Any, n: int, what: str) -> dict[int, Point]:
    """Positions from a mapping node -> (x, y) or an `(n, 2)` array, moved and scaled into [-1, 1].

    Raises:
        ValueError: a node without a finite position.
    """
    return _fit(_array(positions, n, what))


def given_pair(source: Any, s: int, target: Any, t: int) -> tuple[dict[int, Point], dict[int, Point]]:
    """Positions of sources and targets in one frame."""
    both = _fit(np.concatenate([_array(source, s, "source"), _array(target, t, "target")]))
    return {j: both[j] for j in range(s)}, {i: both[s + i] for i in range(t)}


def _array(positions: Any, n: int, what: str) -> np.ndarray:
    if isinstance(positions, Mapping):
        missing = [i for i in range(n) if i not in positions]
        if missing:
            raise ValueError(f"layout gives no position for {what} {missing[0]}; it needs {n}, one per {what}")
        positions = [positions[i] for i in range(n)]
    at = np.asarray(positions, dtype=float)
    at = at.reshape(0, 2) if n == 0 and at.size == 0 else at
    if at.shape != (n, 2):
        raise ValueError(f"layout has shape {at.shape}: it needs ({n}, 2), an x and a y per {what}")
    if not np.isfinite(at).all():
        raise ValueError(f"layout of {what} {int((~np.isfinite(at)).any(1).argmax())} is not finite")
    return at


def _fit(at: np.ndarray) -> dict[int, Point]:
    if not len(at):
        return {}
    low, high = at.min(0), at.max(0)
    at = (at - (low + high) / 2) * (2 / (float((high - low).max()) or 1.0))
    return {i: (float(x), float(y)) for i, (x, y) in enumerate(at)}
