"""Arrows from sources to the targets that read them: on a circle, a line with arcs, two columns, or given positions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from graphattn.draw import palette
from graphattn.draw.layouts import Point
from graphattn.draw.text import columns, drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.path import Path

# an arrow is a matplotlib patch of its own: about 2 ms each
MAX_ARROWS = 600
MAX_NODES = 200

Arrow = tuple[int, int, float, str, float]  # source, target, width, colour, alpha


def draw_nodes(
    ax: Axes,
    at: dict[int, Point],
    labels: list[str],
    radius: float,
    *,
    outside: str,
    fill: str | list[str] = palette.NODE,
    ring: str | list[str] = palette.INK,
    size: float = 10.0,
    text_color: str | list[str] = palette.INK,
) -> None:
    """Circles with their label inside when all are short, else beside them: `outside` in radial, below, left, right."""
    from matplotlib.patches import Circle

    short = all(columns(s) <= 3 for s in labels)
    width = max((columns(s) for s in labels), default=1)
    for i, (x, y) in at.items():
        face = fill if isinstance(fill, str) else fill[i]
        edge = ring if isinstance(ring, str) else ring[i]
        ink = text_color if isinstance(text_color, str) else text_color[i]
        ax.add_patch(Circle((x, y), radius, facecolor=face, edgecolor=edge, linewidth=1.1, zorder=3))
        text = drawn(labels[i])
        if short:
            ax.text(x, y, text, ha="center", va="center", fontsize=size, color=ink, zorder=4, clip_on=False)
            continue
        gap = radius * 1.35
        if outside == "radial":
            norm = math.hypot(x, y) or 1.0
            dx, dy = x / norm, y / norm
            ha = "left" if dx > 0.2 else "right" if dx < -0.2 else "center"
            va = "bottom" if dy > 0.9 else "top" if dy < -0.9 else "center"
            ax.text(x + gap * dx, y + gap * dy, text, ha=ha, va=va, fontsize=size, color=ink, zorder=4)
        elif outside == "below":
            turn = {"rotation": 90, "va": "top", "ha": "center"} if width > 4 else {"va": "top", "ha": "center"}
            ax.text(x, y - gap, text, fontsize=size, color=ink, zorder=4, **turn)
        else:
            ha = "right" if outside == "left" else "left"
            ax.text(x - gap if ha == "right" else x + gap, y, text, ha=ha, va="center", fontsize=size, color=ink, zorder=4)


def draw_arrows(
    ax: Axes,
    arrows: list[Arrow],
    source_at: dict[int, Point],
    target_at: dict[int, Point],
    radius: float,
    *,
    curve: str,
    head: float = 9.0,
) -> None:
    """Weakest first, so that the strong lie on top.  `curve`: "bend" for pairs, "arc" on a line, "straight"."""
    from matplotlib.patches import FancyArrowPatch

    both = {(a[0], a[1]) for a in arrows}
    centre = np.mean(list(target_at.values()), axis=0) if target_at else np.zeros(2)
    for source, target, width, color, alpha in sorted(arrows, key=lambda a: a[2]):
        a, b = source_at[source], target_at[target]
        if a == b:
            path = _loop(a, radius, away=_away(a, centre, curve))
        elif curve == "arc":
            path = _arc(a, b, radius)
        else:
            bend = 0.16 if curve == "bend" and (target, source) in both else 0.0
            path = _between(a, b, radius, bend)
        style = f"-|>,head_length={0.055 * head * (0.75 + 0.25 * width):.3f},head_width={0.03 * head * (0.75 + 0.25 * width):.3f}"
        ax.add_patch(
            FancyArrowPatch(
                path=path,
                arrowstyle=style,
                mutation_scale=10,
                linewidth=width,
                color=color,
                alpha=alpha,
                zorder=2,
                capstyle="butt",
                joinstyle="miter",
                fill=True,
            )
        )


def _away(a: Point, centre: np.ndarray, curve: str) -> float:
    """Angle at which a self-loop leaves: outward on a circle, down from a line."""
    if curve == "arc":
        return -math.pi / 2
    dx, dy = a[0] - centre[0], a[1] - centre[1]
    return math.atan2(dy, dx) if dx or dy else math.pi / 2


def _between(a: Point, b: Point, radius: float, bend: float) -> Path:
    from matplotlib.path import Path

    (ax_, ay), (bx, by) = a, b
    dx, dy = bx - ax_, by - ay
    mid = (ax_ + dx / 2 - bend * dy, ay + dy / 2 + bend * dx)
    start, end = _on_rim(a, mid, radius), _on_rim(b, mid, radius * 1.06)
    return Path([start, mid, end], [Path.MOVETO, Path.CURVE3, Path.CURVE3])


def _on_rim(centre: Point, towards: Point, radius: float) -> Point:
    dx, dy = towards[0] - centre[0], towards[1] - centre[1]
    norm = math.hypot(dx, dy) or 1.0
    return centre[0] + radius * dx / norm, centre[1] + radius * dy / norm


def arc_height(distance: float) -> float:
    """How far above the line an arc rises at its control points; sublinear, so that long arcs stay on the page."""
    return 0.55 * distance**0.85 + 0.25


def _arc(a: Point, b: Point, radius: float) -> Path:
    """Reading the past arcs above the line, reading the future below it."""
    from matplotlib.path import Path

    (ax_, y), (bx, _) = a, b
    side = 1.0 if ax_ < bx else -1.0
    d = abs(bx - ax_)
    # feet stand further apart the shorter the arc: arrows that end at one node keep out of each other's way
    spread = radius * 0.75 * (1 / (1 + 0.45 * (d - 1)))
    foot = math.sqrt(max(radius**2 - spread**2, 0.0))
    way = 1.0 if ax_ < bx else -1.0
    p0 = (ax_ + way * spread, y + side * foot)
    p3 = (bx - way * spread, y + side * foot * 1.04)
    h = side * arc_height(d)
    lean = 0.12 * d
    return Path(
        [p0, (ax_ + way * lean, y + h), (bx - way * lean, y + h), p3],
        [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4],
    )


def _loop(a: Point, radius: float, away: float) -> Path:
    from matplotlib.path import Path

    reach = 3.4 * radius
    at = [(a[0] + r * math.cos(away + t), a[1] + r * math.sin(away + t)) for r, t in
          ((radius, 0.45), (reach, 0.62), (reach, -0.62), (radius * 1.06, -0.45))]
    return Path(at, [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])


def bounds(ax: Axes, points: list[Point], margin: float, margin_y: float | None = None) -> None:
    xy = np.array(points) if points else np.zeros((1, 2))
    (x0, y0), (x1, y1) = xy.min(0), xy.max(0)
    margin_y = margin if margin_y is None else margin_y
    ax.set_xlim(x0 - margin, x1 + margin)
    ax.set_ylim(y0 - margin_y, y1 + margin_y)
