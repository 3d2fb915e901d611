"""Patches for nodes and for arrows from sources to the targets that read them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphattn.draw import palette
from graphattn.draw.layouts import Point
from graphattn.draw.text import columns, drawn, keep_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.path import Path

# every arrow is a matplotlib patch: about 1 ms to make and 1 ms to draw
MAX_ARROWS = 600
MAX_NODES = 200
MAX_NAMED = 64

Arrow = tuple[int, int, float, Any, float]  # source, target, width in points, colour, opacity


def fits_inside(labels: Sequence[str]) -> bool:
    """Short enough as they will be drawn, which may be longer than they are."""
    return all(columns(drawn(s).replace(r"\$", "$")) <= 3 for s in labels)


def draw_nodes(
    ax: Axes,
    at: dict[int, Point],
    labels: Sequence[str],
    radius: float,
    *,
    side: str,
    size: float,
    ring: Sequence[str],
    fill: Sequence[str],
    clear: float = 0.0,
    looped: Collection[int] = (),
) -> None:
    """Circles and their names: `side` is "inside", "radial", "left", "right" or "none" (the axis names them).

    The names of `looped` nodes keep `clear` of the node for its self-loop.
    """
    from matplotlib.patches import Circle
    from matplotlib.patheffects import withStroke

    for i, (x, y) in at.items():
        ax.add_patch(Circle((x, y), radius, facecolor=fill[i], edgecolor=ring[i], linewidth=1.2, zorder=3))
        if side == "none":
            continue
        style: dict[str, Any] = {"fontsize": size, "color": palette.INK, "zorder": 4}
        text = drawn(labels[i])
        if side == "inside":
            keep_label(ax.text(x, y, text, ha="center", va="center_baseline", **style), labels[i])
            continue
        if side != "radial":
            left, gap = side == "left", 2.0 * radius
            ha = "right" if left else "left"
            keep_label(ax.text(x - gap if left else x + gap, y, text, ha=ha, va="center", **style), labels[i])
            continue
        style["path_effects"] = [withStroke(linewidth=2.5, foreground=palette.PAPER)]
        gap = (clear if i in looped else radius) + 0.35 * radius
        norm = math.hypot(x, y)
        dx, dy = (x / norm, y / norm) if norm > 1e-9 else (0.0, 1.0)
        ha = "left" if dx > 0.2 else "right" if dx < -0.2 else "center"
        va = "bottom" if dy > 0.5 else "top" if dy < -0.5 else "center"
        keep_label(ax.text(x + gap * dx, y + gap * dy, text, ha=ha, va=va, **style), labels[i])


def draw_arrows(
    ax: Axes,
    arrows: Sequence[Arrow],
    source_at: dict[int, Point],
    target_at: dict[int, Point],
    radius: float,
    *,
    curve: str,
    bend: float,
    loop: float,
) -> None:
    """The weakest first, so that the strong lie on top.

    `curve`: "arc" on a line, else "chord", bent sideways by `bend` of its length (opposite arrows part that way).
    `loop`: how far a self-loop reaches from the centre of its node.
    """
    from matplotlib.patches import FancyArrowPatch

    both = {(a[0], a[1]) for a in arrows}
    for source, target, width, color, alpha in sorted(arrows, key=lambda a: a[2]):
        a, b = source_at[source], target_at[target]
        if source == target and a == b:
            path = _loop(a, radius, loop, -math.pi / 2 if curve == "arc" else math.atan2(a[1], a[0] or 1e-9))
        elif curve == "arc":
            path = _arc(a, b, radius)
        else:
            path = _chord(a, b, radius, 0.16 if (target, source) in both and source_at is target_at else bend)
        tip = 0.32 + 0.13 * width
        ax.add_patch(
            FancyArrowPatch(
                path=path,
                arrowstyle=f"-|>,head_length={tip:.3f},head_width={0.5 * tip:.3f}",
                mutation_scale=10,
                linewidth=width,
                color=color,
                alpha=alpha,
                zorder=2,
                joinstyle="miter",
            )
        )


def _chord(a: Point, b: Point, radius: float, bend: float) -> Path:
    from matplotlib.path import Path

    dx, dy = b[0] - a[0], b[1] - a[1]
    middle = (a[0] + dx / 2 - bend * dy, a[1] + dy / 2 + bend * dx)
    ends = _on_rim(a, middle, radius), _on_rim(b, middle, radius * 1.06)
    return Path([ends[0], middle, ends[1]], [Path.MOVETO, Path.CURVE3, Path.CURVE3])


def _on_rim(centre: Point, towards: Point, radius: float) -> Point:
    dx, dy = towards[0] - centre[0], towards[1] - centre[1]
    norm = math.hypot(dx, dy) or 1.0
    return centre[0] + radius * dx / norm, centre[1] + radius * dy / norm


def arc_height(distance: float) -> float:
    """How high an arc's control points lie; sublinear, so that long arcs stay on the page.  The arc reaches 3/4."""
    return 0.55 * distance**0.85 + 0.25


def _arc(a: Point, b: Point, radius: float) -> Path:
    """Arrows to a later position pass above the line, to an earlier one below it."""
    from matplotlib.path import Path

    way = 1.0 if a[0] < b[0] else -1.0
    d = abs(b[0] - a[0])
    # the shorter an arc, the further out its feet: arrows that meet at a node arrive side by side
    spread = radius * 0.75 / (1 + 0.45 * (d - 1))
    foot = way * math.sqrt(max(radius**2 - spread**2, 0.0))
    high, lean = way * arc_height(d), 0.12 * d
    points = [
        (a[0] + way * spread, a[1] + foot),
        (a[0] + way * lean, a[1] + high),
        (b[0] - way * lean, b[1] + high),
        (b[0] - way * spread, b[1] + foot * 1.06),
    ]
    return Path(points, [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])


def _loop(a: Point, radius: float, reach: float, away: float) -> Path:
    from matplotlib.path import Path

    # a cubic whose middle lies at `reach`: 3/4 of its control points plus 1/4 of its ends
    control = (reach - 0.25 * radius * math.cos(0.45)) / (0.75 * math.cos(0.6))
    polar = ((radius, 0.45), (control, 0.6), (control, -0.6), (radius * 1.06, -0.45))
    points = [(a[0] + r * math.cos(away + t), a[1] + r * math.sin(away + t)) for r, t in polar]
    return Path(points, [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])


def node_radius(*places: dict[int, Point]) -> float:
    """A third of the smallest distance between two nodes, within reason."""
    at = np.array([p for place in places for p in place.values()])
    if len(at) < 2:
        return 0.2
    gap = np.sqrt(((at[:, None] - at[None]) ** 2).sum(-1))
    np.fill_diagonal(gap, np.inf)
    span = float((at.max(0) - at.min(0)).max()) or 1.0
    return float(min(max(gap.min() * 0.3, 0.008 * span), 0.09 * span if len(at) > 3 else 0.14 * span))
