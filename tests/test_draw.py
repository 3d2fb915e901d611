"""Pictures show the graph that was given: what is drawn equals the mask, arrows point to the reader."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graphattn as ga
from graphattn.draw import draw, draw_attention, draw_grid, draw_stack, networkx_of, save, to_svg
from graphattn.draw.matrix import tile_density, tile_size
from graphattn.draw.stack import reach
from graphattn.draw.view import view_of
from graphattn.graph import Graph


def random_graph(t: int, s: int, seed: int, p: float = 0.4, lead: tuple[int, ...] = ()) -> Graph:
    generator = torch.Generator().manual_seed(seed)
    return ga.from_mask(torch.rand(*lead, t, s, generator=generator) < p)


def drawn_matrix(ax: object) -> np.ndarray:
    return np.ma.filled(ax.images[0].get_array(), 0)  # type: ignore[attr-defined]


def arrows_of(ax: object) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tail and tip of every arrow, as drawn."""
    from matplotlib.patches import FancyArrowPatch

    patches = [p for p in ax.patches if isinstance(p, FancyArrowPatch)]  # type: ignore[attr-defined]
    return [(p._path_original.vertices[0], p._path_original.vertices[-1]) for p in patches]


def nodes_of(ax: object) -> list[tuple[float, float]]:
    from matplotlib.patches import Circle

    return [p.center for p in ax.patches if isinstance(p, Circle)]  # type: ignore[attr-defined]


def nearest(point: np.ndarray, nodes: list[tuple[float, float]]) -> int:
    return int(np.argmin([np.hypot(*(point - np.array(n))) for n in nodes]))


# ---------------------------------------------------------------------- the matrix


def test_matrix_has_row_0_on_top_and_a_row_per_target() -> None:
    g = ga.causal(2, 5, align="end")
    ax = draw(g, layout="matrix")
    assert drawn_matrix(ax).shape == (2, 5)
    assert np.array_equal(drawn_matrix(ax).astype(bool), ga.to_mask(g).numpy())
    assert ax.images[0].origin == "upper" and ax.get_ylim() == (1.5, -0.5) and ax.get_xlim() == (-0.5, 4.5)
    assert "target" in ax.get_ylabel() and "source" in ax.get_xlabel()
    assert [x.get_text() for x in ax.get_xticklabels()] == list("01234")
    assert [x.get_text() for x in ax.get_yticklabels()] == list("01")


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 1), (5, 7), (7, 5), (0, 0), (0, 3), (3, 0)])
def test_every_shape_draws(shape: tuple[int, int], tmp_path: Path) -> None:
    t, s = shape
    g = ga.full(t, s)
    for layout in ("auto", "matrix", "columns", *(("circle", "line") if t == s else ())):
        save(draw(g, torch.ones(g.num_edges), layout), tmp_path / "a.png", dpi=40)
    save(draw_grid([g, g]), tmp_path / "a.png", dpi=40)
    save(draw_stack([g], target=None if t == 0 else 0), tmp_path / "a.png", dpi=40)


def test_an_edge_of_weight_0_is_still_an_edge() -> None:
    g = ga.from_mask(torch.tensor([[True, False], [True, True]]))
    image = draw(g, torch.tensor([0.0, 0.25, 0.75]), "matrix").images[0]
    assert np.array_equal(~np.ma.getmaskarray(image.get_array()), ga.to_mask(g).numpy())
    assert np.array_equal(drawn_matrix(image.axes), [[0, 0], [0.25, 0.75]])
    light = image.cmap(image.norm(0.0))
    assert min(light[:3]) < 0.95  # not the white of "no edge"


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 10**6), st.sampled_from([1, 2, 4, 8]))
def test_tile_density_is_exact(t: int, s: int, seed: int, size: int) -> None:
    g = random_graph(t, s, seed)
    mask = ga.to_mask(g).double()
    rows, cols = -(-t // size), -(-s // size)
    expect = torch.stack(
        [torch.stack([mask[i * size : (i + 1) * size, j * size : (j + 1) * size].mean() for j in range(cols)])
         for i in range(rows)]
    )  # fmt: skip
    torch.testing.assert_close(torch.from_numpy(tile_density(view_of(g), size)), expect)
    w = torch.rand(g.num_edges, dtype=torch.float64)
    dense = torch.zeros(t, s, dtype=torch.float64)
    dense[ga.to_mask(g)] = w
    mass = torch.stack(
        [torch.stack([dense[i * size : (i + 1) * size, j * size : (j + 1) * size].sum(1).mean() for j in range(cols)])
         for i in range(rows)]
    )  # fmt: skip
    torch.testing.assert_close(torch.from_numpy(tile_density(view_of(g, w), size)), mass)


def lightness(color: object) -> np.ndarray:
    """CIE L* of colours, `(..., 3)` or one by name: 0 is black, 100 white."""
    from matplotlib.colors import to_rgb

    c = np.asarray(to_rgb(color) if isinstance(color, (str, tuple)) else color, dtype=float)[..., :3]  # type: ignore[arg-type]
    linear = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    y = linear @ np.array([0.2126, 0.7152, 0.0722])
    return np.where(y > 0.0089, 116 * np.cbrt(y) - 16, 903.3 * y)


def tiles_are_seen(image: object) -> np.ndarray:
    """Tiles that hold an edge are at least 15 darker than white, and the others are white; returns which are dark."""
    data = image.get_array()  # type: ignore[attr-defined]
    shown = image.cmap(image.norm(data))  # type: ignore[attr-defined]
    light = lightness(np.asarray(shown))
    hidden = np.ma.getmaskarray(data)
    assert (light[hidden] > 99).all() and (light[~hidden] < 85).all()
    return ~hidden


@settings(max_examples=25)
@given(st.integers(513, 5000), st.integers(1, 5000), st.integers(0, 10**6), st.booleans())
def test_every_tile_with_an_edge_is_seen(t: int, s: int, seed: int, near: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    few = torch.randint(0, 10**9, (2, 9), generator=generator) % torch.tensor([[s], [t]])
    g = ga.from_edge_index(few, (t, s))
    if near:
        g = g | ga.causal(t, s, "end")
    ax = draw(g)
    dark = tiles_are_seen(ax.images[0])
    size = tile_size(t, s)
    target, source = few[1] // size, few[0] // size
    assert dark[target.numpy(), source.numpy()].all()
    count = np.zeros_like(dark)
    row, col = g.edges()
    count[(row // size).numpy(), (col // size).numpy()] = True
    assert np.array_equal(count, dark)


def test_global_tokens_stay_visible_beside_a_diagonal(tmp_path: Path) -> None:
    g = ga.window(70_000, 500) | ga.global_tokens(70_000, [0, 30_000])
    ax = draw(g)
    assert ax.figure.axes[1].get_ylabel() == "share of a tile's cells that are edges\n(colour by logarithm)"
    dark = tiles_are_seen(ax.images[0])
    assert dark[0].all() and dark[:, 0].all() and dark[30_000 // 512].all() and dark[:, 30_000 // 512].all()
    even = draw(ga.causal(700))
    assert even.figure.axes[1].get_ylabel() == "share of a tile's cells that are edges"
    # the same in small panels, on one scale
    figure = draw_grid([g, ga.causal(70_000)], titles=["g", "causal"])
    a, b = (ax.images[0] for ax in figure.axes if ax.images)
    assert a.norm is b.norm and tiles_are_seen(a)[0].all() and tiles_are_seen(b)[-1].all()
    assert "each cell is a tile of 2048 x 2048 pairs" in figure.axes[-1].get_ylabel()
    # and in what an audit saves
    audit = ga.audit_picture([g, ga.causal(70_000)])
    maps = [ax.images[0] for ax in audit.axes if ax.images]
    assert len(maps) == 2 and tiles_are_seen(maps[0])[:, 0].all() and tiles_are_seen(maps[1])[-1].all()


# ---------------------------------------------------------------------- arrows


@pytest.mark.parametrize("layout", ["circle", "line", "given"])
def test_arrows_run_from_source_to_target(layout: str) -> None:
    g = random_graph(7, 7, 3, 0.3)
    place = [(i % 3, i * i) for i in range(7)] if layout == "given" else layout
    ax = draw(g, layout=place)
    nodes = nodes_of(ax)
    found = sorted((nearest(tip, nodes), nearest(tail, nodes)) for tail, tip in arrows_of(ax))
    assert found == sorted(zip(*(x.tolist() for x in g.edges()), strict=True))


def test_columns_put_sources_left_and_targets_right() -> None:
    g = random_graph(3, 5, 1)
    ax = draw(g, layout="columns", labels="xyz", source_labels="abcde")
    target_at, source_at = nodes_of(ax)[:3], nodes_of(ax)[3:]
    assert all(x == 0 for x, _ in source_at) and all(x > 1 for x, _ in target_at)
    found = sorted((nearest(tip, target_at), nearest(tail, source_at)) for tail, tip in arrows_of(ax))
    assert found == sorted(zip(*(x.tolist() for x in g.edges()), strict=True))
    texts = {x.get_text() for x in ax.texts}
    assert texts == set("xyzabcde") | {"source (key)", "target (query)"}


def test_heavier_edges_are_wider_and_darker() -> None:
    from matplotlib.patches import FancyArrowPatch

    g = ga.from_edge_index(torch.tensor([[0, 1, 2], [3, 3, 3]]), (4, 4))
    ax = draw(g, torch.tensor([0.1, 0.3, 0.6]), "circle")
    patches = [p for p in ax.patches if isinstance(p, FancyArrowPatch)]
    widths = [p.get_linewidth() for p in patches]
    light = [sum(p.get_edgecolor()[:3]) for p in patches]
    assert widths == sorted(widths) and len(set(widths)) == 3
    assert light == sorted(light, reverse=True)


def test_auto_draws_small_graphs_as_arrows_and_large_ones_as_a_matrix() -> None:
    assert not draw(ga.causal(8)).images and draw(ga.causal(17)).images
    assert not draw(ga.full(3, 5)).images


def test_networkx_layouts_and_their_limit() -> None:
    g = ga.from_networkx(nx.karate_club_graph())
    ax = draw(g, layout=nx.spring_layout)
    assert len(arrows_of(ax)) == 156
    start = time.process_time()
    with pytest.raises(ValueError, match="up to 200 nodes: use layout='matrix'"):
        draw(ga.causal(5000), layout=nx.kamada_kawai_layout)
    assert time.process_time() - start < 1


def test_networkx_graph_carries_weights_and_labels() -> None:
    g = random_graph(5, 5, 2)
    w = torch.rand(3, g.num_edges)
    out = networkx_of(g, w, labels="abcde")
    assert np.array_equal(nx.to_numpy_array(out, nodelist=range(5), weight=None).T > 0, ga.to_mask(g).numpy())
    for e, (i, j) in enumerate(zip(*(x.tolist() for x in g.edges()), strict=True)):
        data = out.edges[j, i]
        assert data["weight"] == pytest.approx(w[:, e].double().mean().item())
        assert data["weight_h2"] == pytest.approx(w[2, e].item())
    assert [out.nodes[i]["label"] for i in range(5)] == list("abcde")
    r = networkx_of(random_graph(3, 5, 0))
    assert nx.is_bipartite(r) and r.number_of_nodes() == 8


# ---------------------------------------------------------------------- leading axes, weights


def test_leading_axes_are_chosen_or_averaged_and_said() -> None:
    g = random_graph(3, 4, 5, lead=(2, 3))
    mask = ga.to_mask(g)
    assert np.array_equal(drawn_matrix(draw(g, layout="matrix", batch=1, head=2)), mask[1, 2].numpy())
    one = draw(g, layout="matrix", batch=1)
    np.testing.assert_allclose(drawn_matrix(one), mask[1].double().mean(0).numpy())
    assert "batch 1" in one.get_title()
    assert one.figure.axes[1].get_ylabel() == "share of 3 heads with the edge"
    w = torch.rand(g.num_edges, dtype=torch.float64)
    dense = torch.zeros(2, 3, 3, 4, dtype=torch.float64)
    dense[mask] = w
    np.testing.assert_allclose(drawn_matrix(draw(g, w, "matrix", head=1)), dense[:, 1].mean(0).numpy())
    np.testing.assert_allclose(drawn_matrix(draw(g, w, "matrix", batch=0, head=1)), dense[0, 1].numpy())


@pytest.mark.parametrize(
    ("lead", "shape"),
    [((), ()), ((), (3,)), ((), (2, 3)), ((2, 1), ()), ((2, 1), (3,)), ((1, 3), (2,)), ((1, 1), (2, 3)), ((2, 3), ())],
)
def test_weights_of_every_allowed_shape(lead: tuple[int, ...], shape: tuple[int, ...]) -> None:
    g = random_graph(3, 5, 7, lead=lead)
    w = torch.rand(*shape, g.num_edges, dtype=torch.float64)
    mask = ga.to_mask(g)
    dense = torch.zeros(*shape, *mask.shape, dtype=torch.float64)
    dense[..., mask] = w
    np.testing.assert_allclose(
        drawn_matrix(draw(g, w, "matrix")), dense.reshape(-1, 3, 5).mean(0).numpy(), rtol=1e-9, atol=1e-12
    )


def test_weights_that_do_not_fit_say_what_would() -> None:
    g = ga.causal(3)
    with pytest.raises(ValueError, match=r"shape \(5,\), but .* has 6 edges"):
        draw(g, torch.ones(5))
    with pytest.raises(ValueError, match=r"w\[..., ga.to_mask\(graph\)\]"):
        draw(g, torch.ones(3, 3))
    with pytest.raises(ValueError, match="not finite, the first at edge 2, target 1 <- source 1"):
        draw(g, torch.tensor([1, 1, float("nan"), 0, 0, 0]))
    with pytest.raises(ValueError, match="head 4 is out of range: there are 2"):
        draw(g, torch.ones(2, 6), head=4)
    with pytest.raises(ValueError, match="labels has 2 entries"):
        draw(g, labels="ab")
    with pytest.raises(ValueError, match="no layout 'spiral'"):
        draw(g, layout="spiral")
    with pytest.raises(ValueError, match="as many targets as sources"):
        draw(ga.full(2, 3), layout="circle")
    with pytest.raises(TypeError, match="draw takes a Graph"):
        draw(torch.ones(3, 3))  # type: ignore[arg-type]


def test_weights_may_require_gradients_and_be_half() -> None:
    g = ga.causal(3)
    draw(g, torch.ones(6, requires_grad=True))
    draw(g, torch.ones(6, dtype=torch.bfloat16), "matrix")


def test_colours_differ_in_lightness_for_every_eye() -> None:
    from graphattn.draw import palette

    for density in (False, True):
        cmap = palette.scale(np.array([0.1, 1.0]), density=density)[1]
        ramp = [lightness(cmap(x)) for x in np.linspace(0, 1, 20)]
        assert all(a - b > 1 for a, b in zip(ramp, ramp[1:], strict=False)) and ramp[0] < 95
    assert abs(lightness(palette.SOURCE) - lightness(palette.NODE)) > 40  # lit and unlit nodes of a stack
    assert abs(lightness(palette.TARGET) - lightness(palette.NODE)) > 35


# ---------------------------------------------------------------------- several


def test_grid_has_a_panel_per_head_with_its_own_weights() -> None:
    g = ga.causal(4)
    w = torch.rand(3, 10)
    figure = draw_grid(g, w)
    panels = [a for a in figure.axes if a.images]
    assert [a.get_title() for a in panels] == ["head 0", "head 1", "head 2"]
    for h, ax in enumerate(panels):
        np.testing.assert_allclose(drawn_matrix(ax)[ga.to_mask(g).numpy()], w[h].numpy())
    assert len({(a.images[0].norm.vmin, a.images[0].norm.vmax) for a in panels}) == 1
    assert len([a for a in draw_grid(ga.padding([3, 1], 4)).axes if a.images]) == 2


def test_attention_has_a_row_per_layer_and_a_column_per_head() -> None:
    g = [ga.causal(5), ga.window(5, 2)]
    w = [torch.rand(1, 3, 15), torch.rand(3, 9)]
    figure = draw_attention("To be", g, w)
    panels = [a for a in figure.axes if a.images]
    assert [a.get_title() for a in panels] == ["head 0", "head 1", "head 2", "", "", ""]
    assert panels[0].get_ylabel().startswith("layer 1") and panels[3].get_ylabel().startswith("layer 2")
    np.testing.assert_allclose(drawn_matrix(panels[4])[ga.to_mask(g[1]).numpy()], w[1][1].numpy())
    assert [x.get_text() for x in panels[3].get_yticklabels()] == ["T", "o", "␣", "b", "e"]
    some = draw_attention("To be", g, w, layers=[2], heads=[2, 0], layout="columns")
    assert len(some.axes) == 3
    cross = draw_attention("ab", ga.full(2, 5), [torch.rand(2, 10)], source_tokens="hello")
    assert drawn_matrix(cross.axes[0]).shape == (2, 5)
    with pytest.raises(ValueError, match="17 layers x 1 heads"):
        draw_attention("To be", ga.causal(5), [torch.rand(15)] * 17)
    with pytest.raises(ValueError, match="head 3 is out of range: layer 1 has 3"):
        draw_attention("To be", g, w, heads=[3])


# ---------------------------------------------------------------------- stacks


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.booleans())
def test_reach_is_what_paths_say(seed: int, residual: bool) -> None:
    sizes = [7, 5, 5, 3]
    graphs = [random_graph(t, s, seed + k, 0.3) for k, (s, t) in enumerate(zip(sizes, sizes[1:], strict=False))]
    now = np.eye(3, dtype=bool)[1]
    expect = [now]
    for g in reversed(graphs):
        step = ga.to_mask(g).numpy() | (np.eye(g.t, dtype=bool) if residual and g.t == g.s else False)
        now = now @ step
        expect.append(now)
    for a, b in zip(reach(graphs, 1, residual), reversed(expect), strict=True):
        assert np.array_equal(a.numpy(), b)


def test_stack_says_what_the_target_sees() -> None:
    ax = draw_stack([ga.window(8, 2)] * 3, target=6, labels="To be or")
    assert "target 6 sees 4 of 8 inputs" in ax.get_title()
    assert [x.get_text() for x in ax.get_yticklabels()] == ["input", "layer 1", "layer 2", "layer 3"]
    big = draw_stack([ga.window(100_000, 50)] * 4, target=70_000)
    assert "sees 197 of 100,000 inputs" in big.get_title()
    with pytest.raises(ValueError, match="layer 2, .* reads 4 sources, but layer 1, .* makes 5"):
        draw_stack([ga.causal(5), ga.causal(4)])
    with pytest.raises(ValueError, match="target 8 is out of range"):
        draw_stack([ga.causal(8)], target=8)


# ---------------------------------------------------------------------- large, headless, side effects


def test_large_graphs_answer_within_seconds(tmp_path: Path) -> None:
    start = time.process_time()
    ax = save(draw(ga.causal(2_000_000)), tmp_path / "a.png")
    assert ax.stat().st_size > 1000
    assert "tile of 8192 x 8192" in draw(ga.causal(2_000_000)).get_title()
    with pytest.raises(ValueError, match="too large for arrows, which are drawn up to 200 nodes"):
        draw(ga.causal(5000), layout="circle")
    ring = draw(ga.causal(100), torch.linspace(0, 1, 5050), layout="circle", max_edges=50)
    assert len(arrows_of(ring)) == 50 and "the 50 heaviest of 5,050 edges" in ring.get_title()
    assert {nearest(tip, nodes_of(ring)) for _, tip in arrows_of(ring)} == {99}  # the last edges are the heaviest
    line = draw(ga.causal(100), layout="line")
    assert len(arrows_of(line)) == 600 and "an even sample of 600 of 5,050 edges" in line.get_title()
    assert time.process_time() - start < 30


def test_tiles_are_powers_of_two_and_at_most_256() -> None:
    assert [tile_size(n, 1) for n in (1, 256, 257, 512, 513, 2_000_000)] == [1, 1, 2, 2, 4, 8192]


def test_without_display_pyplot_or_leaks(tmp_path: Path) -> None:
    code = """
import sys, graphattn as ga
assert not {"matplotlib", "networkx", "jinja2"} & set(sys.modules)
g = ga.causal(4)
import graphattn.draw
assert not {"matplotlib", "networkx", "jinja2"} & set(sys.modules)
assert ga.draw(g).patches  # callable although the import has put the module in its place
from graphattn.draw import draw, save
assert draw.save is save is ga.draw.save
for k in range(3):
    save(ga.draw(g), sys.argv[1] + "/a.png", dpi=40)
assert "matplotlib.pyplot" not in sys.modules
"""
    env = {"PATH": "/usr/bin:/bin", "MPLCONFIGDIR": str(tmp_path), "PYTHONPATH": str(Path(ga.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=env)


def test_draws_into_the_axes_it_is_given() -> None:
    from matplotlib.figure import Figure

    left, right = Figure().subplots(1, 2)
    assert draw(ga.causal(4), ax=left) is left and draw(ga.causal(4), layout="matrix", ax=right) is right
    one = Figure().add_subplot()
    assert draw_stack([ga.causal(4)], ax=one) is one


def test_same_picture_same_bytes(tmp_path: Path) -> None:
    g, w = ga.causal(5), torch.rand(15)
    a, b = (save(draw(g, w, labels="hello"), tmp_path / f"{k}.png").read_bytes() for k in "ab")
    assert a == b
    assert to_svg(draw(g, w)) == to_svg(draw(g, w))
    with pytest.raises(ValueError, match="ends in .png, .svg or .pdf"):
        save(draw(g), tmp_path / "a.gif")


# ---------------------------------------------------------------------- nothing overlaps at 800 pixels

WORDS = ["the", "quick", "brown", "fox", "jumped", "over", "a", "lazydog"]


def kinds() -> dict[str, object]:
    g = ga.causal(8)
    w = torch.linspace(0, 1, 36)
    return {
        "circle": lambda: draw(g, layout="circle"),
        "circle words": lambda: draw(g, w, "circle", labels=WORDS),
        "circle 16": lambda: draw(ga.window(16, 2), layout="circle", labels=WORDS * 2),
        "line": lambda: draw(ga.band(8, 2, 1), w[: ga.band(8, 2, 1).num_edges], "line", labels=WORDS),
        "circle emoji": lambda: draw(
            g, layout="circle", labels=["\U0001f680", "\U0001f389", "\u4f60\u597d", *WORDS[:5]]
        ),
        "matrix emoji": lambda: draw(g, layout="matrix", labels=["\U0001f680", "\U0001f1fa\U0001f1f3"] * 4),
        "columns": lambda: draw(ga.full(5, 7), layout="columns", labels=WORDS[:5], source_labels=WORDS[:7]),
        "matrix": lambda: draw(g, w, "matrix", labels=WORDS),
        "matrix 48": lambda: draw(ga.causal(48), layout="matrix", labels=WORDS * 6),
        "matrix 2x40": lambda: draw(ga.full(2, 40), layout="matrix", source_labels=WORDS * 5),
        "density": lambda: draw(ga.causal(70_000)),
        "density of few": lambda: draw(ga.window(70_000, 500) | ga.global_tokens(70_000, [0, 30_000])),
        "densities": lambda: draw_grid([ga.window(300, 10) | ga.global_tokens(300, [0]), ga.causal(300)]),
        "stack": lambda: draw_stack([ga.window(8, 2)] * 3, target=6, labels=WORDS),
        "strips": lambda: draw_stack([ga.window(900, 50)] * 4, target=600),
        "heads": lambda: draw_grid(g, w.expand(4, -1), labels=WORDS),
        "masks": lambda: draw_grid(
            [ga.causal(8), ga.window(8, 2), ga.full(3, 5)], titles=["causal", "window", "cross"]
        ),
        "attention 2x4": lambda: draw_attention("To be or", g, [w.expand(4, -1)] * 2, title="tiny"),
        "attention 6x6": lambda: draw_attention(["x"] * 64, ga.causal(64), [torch.rand(6, 2080)] * 6),
        "attention columns": lambda: draw_attention("To be or", g, [w.expand(4, -1)] * 2, layout="columns"),
        "attention 19 tokens": lambda: draw_attention("To be, or not to be", ga.causal(19), [torch.rand(4, 190)] * 2),
        "attention 9 words": lambda: draw_attention([*WORDS, "dogs"], ga.causal(9), [torch.rand(4, 45)] * 2),
        "attention columns 19": lambda: draw_attention(
            "To be, or not to be", ga.causal(19), [torch.rand(4, 190)], layout="columns"
        ),
        "attention 12x12": lambda: draw_attention("To be or", g, [w.expand(12, -1)] * 12),
    }


@pytest.mark.parametrize("kind", list(kinds()))
def test_no_text_overlaps_or_leaves_the_page(kind: str) -> None:
    from matplotlib.text import Text

    from graphattn.draw.palette import figure_of

    figure = figure_of(kinds()[kind]())  # type: ignore[operator]
    width = figure.get_figwidth()
    assert width <= 8.0  # 800 pixels at the figure's 100 dots per inch
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    page = figure.bbox
    hidden = set()  # ticks outside the limits exist but are not drawn
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            used = axis._update_ticks() if ax.axison else []
            hidden |= {x for k in (axis.majorTicks, axis.minorTicks) for tick in k for x in (tick.label1, tick.label2)}
            hidden -= {x for tick in used for x in (tick.label1, tick.label2)}
    shown = []
    for x in figure.findobj(Text):
        box = x.get_window_extent(renderer)
        if x in hidden or not x.get_visible() or not x.get_text().strip():
            continue
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= page.x1 + 1 and box.y1 <= page.y1 + 1, x.get_text()
        assert x.get_fontsize() >= 5
        shown.append((x, box))
    for i, (x, a) in enumerate(shown):
        for y, b in shown[:i]:
            wide, high = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
            assert wide <= 1 or high <= 1, f"{x.get_text()!r} over {y.get_text()!r} by {wide:.0f} x {high:.0f} pixels"
