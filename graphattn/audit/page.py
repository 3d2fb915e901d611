"""The audit page: what a stack of graphs looks like to someone who must trust it, as text and as a picture."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from ..graph import Graph
from ..order import tile_fill
from .flow import Leak, _check, coverage, find_leak, receptive_field

# words of bits a page may unite for exact receptive fields (seconds); beyond, those of some targets are told
_WORK = 10**9
_SAMPLE = 9


def audit_page(
    graphs: Graph | Iterable[Graph],
    *,
    names: Sequence[str] | None = None,
    tile: int = 64,
    batch: int = 0,
    found: Leak | None | Literal["search"] = "search",
    **leak: Any,
) -> str:
    """A text page on a stack: sizes, degrees, density, tile fill, receptive field per layer, leak or not.

    Args:
        graphs: layers first to last, or one graph.
        names: one per layer, such as the expressions they were read from.
        tile: side of the tiles whose fill is told.
        batch: the sample whose receptive fields are told; leaks are looked for in all.
        found: what `find_leak` said of these graphs, where it was asked already.
        **leak: as for `find_leak`: offset, labels, hidden, targets, cross, context, holds.
    """
    layers, t, samples = _check(graphs)
    if names is not None and len(names) != len(layers):
        raise ValueError(f"{len(names)} names for {len(layers)} layers")
    lines = []
    seen: dict[int, list[int]] = {}
    for k, g in enumerate(layers):
        seen.setdefault(next((i for i in seen if layers[i] == g), k), []).append(k + 1)
    for i, which in seen.items():
        g = layers[i]
        name = f": {names[i]}" if names else ""
        lines += [f"layer{'s' if len(which) > 1 else ''} {_ranges(which)}{name}", f"  {g!r}", f"  {_degrees(g)}"]
        lines.append(f"  {g.num_runs} runs, tiles of {tile} x {tile} are {100 * tile_fill(g, tile):.1f}% full")
    lines += [
        "",
        f"receptive field of a target, itself included, of {t} sources"
        + ("" if samples is None else f" (sample {batch})"),
    ]
    sizes, how = _fields(layers, t, None if samples is None else batch)
    for k, row in enumerate(sizes):
        if t:
            low, mid, high = int(row.min()), float(np.median(row)), int(row.max())
            lines.append(f"  after {k:>2} layer{'s' if k != 1 else ' '}  least {low}, median {mid:g}, most {high}{how}")
    found = find_leak(layers, **leak) if found == "search" else found
    lines += ["", "no leak: no target reads what it predicts" if found is None else f"leak: {found}"]
    return "\n".join(lines)


def audit_picture(
    graphs: Graph | Iterable[Graph],
    path: str | os.PathLike[str] | None = None,
    *,
    names: Sequence[str] | None = None,
    batch: int = 0,
    found: Leak | None | Literal["search"] = "search",
    **leak: Any,
) -> Any:
    """The page as a figure: each distinct layer as a density map, its degrees, and the receptive field over depth.

    Args:
        path: where to save it (PNG, SVG, PDF by its ending); not saved if None.
        names, batch, found, **leak: as for `audit_page`.

    Returns:
        The `matplotlib.figure.Figure`, which belongs to no window and is freed like any object.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
    from matplotlib.figure import Figure

    layers, t, samples = _check(graphs)
    distinct: list[int] = []
    for k, g in enumerate(layers):
        if not any(layers[i] == g for i in distinct):
            distinct.append(k)
    shown = distinct[:4]
    figure = Figure(figsize=(3.2 * (len(shown) + 2), 3.4), layout="constrained")
    axes = figure.subplots(1, len(shown) + 2, squeeze=False)[0]
    side = max(1, -(-t // 256))
    maps = [np.ma.masked_equal(density_map(layers[k], side), 0) if t else np.ma.zeros((0, 0)) for k in shown]
    # from light grey, so that a tile with a single edge is seen; one scale for all layers
    low = min((float(m.min()) for m in maps if m.count()), default=1.0)
    shade = LogNorm(low, 1) if low < 0.2 else Normalize(0, 1)
    greys = LinearSegmentedColormap.from_list("graphattn_greys", ["#bdbdbd", "#000000"]).with_extremes(bad="#ffffff")
    for ax, k, share in zip(axes, shown, maps, strict=False):
        g = layers[k]
        if share.size:
            box = (0, share.shape[1] * side, share.shape[0] * side, 0)
            ax.imshow(share, cmap=greys, norm=shade, origin="upper", extent=box, aspect="auto", interpolation="nearest")
            ax.set_xlim(0, g.s)
            ax.set_ylim(g.t, 0)
        ax.set_title(f"layer {k + 1}" + (f": {names[k]}" if names else ""), fontsize=9)
        ax.set_xlabel("source")
        ax.set_ylabel("target")
    if any(bool((m.compressed() < 1).any()) for m in maps):
        bar = figure.colorbar(ScalarMappable(shade, greys), ax=axes[: len(shown)], fraction=0.04, pad=0.02)
        how = "\n(colour by logarithm)" if isinstance(shade, LogNorm) else ""
        bar.set_label(
            (f"share of a tile of {side} x {side}" if side > 1 else "share of heads and samples") + how, fontsize=8
        )
        bar.ax.tick_params(labelsize=7)
    for k in shown:
        degree = np.sort(layers[k].degree().reshape(-1).cpu().numpy())
        if degree.size:
            part = np.linspace(0, 1, min(degree.size, 512))
            axes[-2].plot(part, degree[np.round(part * (degree.size - 1)).astype(int)], label=f"layer {k + 1}")
    axes[-2].set_yscale("symlog")
    axes[-2].set_xlabel("share of targets")
    axes[-2].set_ylabel("sources read, at most")
    if t:
        axes[-2].legend(fontsize=8)
    sizes, how = _fields(layers, t, None if samples is None else batch)
    if t:
        depth = range(len(sizes))
        axes[-1].fill_between(depth, sizes.min(1), sizes.max(1), alpha=0.25)
        axes[-1].plot(depth, np.median(sizes, axis=1), marker="o", markersize=3)
    axes[-1].set_xlabel("layers")
    axes[-1].set_ylabel("receptive field" + how)
    found = find_leak(layers, **leak) if found == "search" else found
    figure.suptitle("no leak" if found is None else f"leak: {found}", fontsize=9)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def density_map(graph: Graph, side: int) -> np.ndarray:
    """`(ceil(T_q / side), ceil(T_kv / side))` share of pairs that are edges, over all leading axes; O(runs)."""
    n, m = -(-graph.t // side), -(-graph.s // side)
    row = (graph.run_row() % max(graph.t, 1) // side).cpu().numpy() * (m + 1)
    start, stop = graph.start.cpu().numpy(), graph.stop.cpu().numpy()
    a, z = start // side, (stop - 1) // side
    size = n * (m + 1)
    one = a == z
    count = np.bincount(row + a, np.where(one, stop - start, (a + 1) * side - start), size)
    count += np.bincount(row[~one] + z[~one], (stop - z * side)[~one], size)
    change = np.bincount(row + a + 1, np.where(one, 0, side), size + 1) - np.bincount(
        row + z, np.where(one, 0, side), size + 1
    )
    count = (count + np.cumsum(change)[:size]).reshape(n, m + 1)[:, :m]
    heights = np.minimum(side, graph.t - side * np.arange(n))
    widths = np.minimum(side, graph.s - side * np.arange(m))
    lead = graph.lead[0] * graph.lead[1] if graph.lead else 1
    cells = np.outer(heights, widths) * lead
    return count / np.maximum(cells, 1)


def _fields(layers: list[Graph], t: int, batch: int | None) -> tuple[np.ndarray, str]:
    """`(L + 1, targets)` sizes, and what to say about how they were found."""
    try:
        return coverage(layers, batch, most=_WORK).numpy(), ""
    except ValueError:
        some = sorted({round(k * (t - 1) / (_SAMPLE - 1)) for k in range(_SAMPLE)})
        sizes = [[1] * len(some)]
        for k in range(1, len(layers) + 1):
            sizes.append([receptive_field(layers[:k], i, batch).numel() for i in some])
        return np.array(sizes), f" (of {len(some)} targets)"


def _degrees(graph: Graph) -> str:
    degree = graph.degree().reshape(-1)
    if not degree.numel():
        return "no targets"
    none = int((degree == 0).sum())
    low, mid, high = int(degree.min()), float(np.median(degree.cpu().numpy())), int(degree.max())
    words = f"a target reads {low} to {high} sources, median {mid:g}"
    return words + (f"; {none} read nothing" if none else "")


def _ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 as 1-3, 7."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)
