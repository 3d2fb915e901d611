"""Any label, in any format: no exception, well-formed, nothing interpreted."""

from __future__ import annotations

import re
import warnings
import xml.etree.ElementTree as ET
from pathlib import Path

import networkx as nx
import pytest
import torch

import graphattn as ga
from graphattn.draw import draw, draw_attention, draw_stack, export, save, to_dot, to_graphml, to_html, to_svg
from graphattn.draw.text import columns, drawn, visible

HOSTILE = [
    "<script>window.hacked=1</script>",
    "</script><script>window.hacked=1</script>",
    "<img src=x onerror=window.hacked=1>",
    "<!--",
    "--><b>",
    "]]>",
    "&amp;&lt;&#0;&nosuch;",
    '"',
    "'",
    "`${window.hacked=1}`",
    "{{ 7*7 }}{% raw %}{#",
    "javascript:window.hacked=1",
    "$",
    "$$",
    "$x^2$",
    "$\\frac{1}$",
    "\\",
    "\\$",
    "\\N\\G\\E\\l",
    "\\n",
    "\n",
    "a\r\nb\tc",
    "\x00",
    "\x01\x07\x1b[31m\x7f",
    "\x85\x9f",
    "\u2028\u2029",
    "\ud800",
    "\ufffe\uffff",
    "\u202egnp.exe\u202c",
    "\u05e9\u05dc\u05d5\u05dd",
    "\u0645\u0631\u062d\u0628\u0627",
    "\u4f60\u597d\u4e16\u754c",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467",
    "\U0001f1fa\U0001f1f3",
    "\u0301",
    "Z" + "\u0351\u036b\u0343" * 40,
    "",
    " ",
    "\u200b\ufeff",
    "x" * 10_000,
    "{a|b}<port>",
    "a:b;c,d->e]",
    "\ue000\U0010ffff",
]

DOT_STATEMENT = re.compile(
    r"""(?x) \s* (?:
    digraph\ attention\ \{ | \} | rankdir=LR; | node\ \[shape=circle,\ fontname=Helvetica\]; | \{\ rank=same;[\ \w]+\}
    | \w+\ \[label="(?:[^"\\]|\\.)*"\]; | \w+\ ->\ \w+(?:\ \[attention="[^"]*",\ penwidth=[\d.]+\])?;
    ) """
)


def ring(n: int) -> ga.Graph:
    """Node i reads itself and the one before it: arrows can still be drawn."""
    return ga.window(n, 2)


@pytest.mark.parametrize("k", range(0, len(HOSTILE), 8))
@pytest.mark.parametrize("layout", ["circle", "line", "columns", "matrix"])
def test_png_of_every_label_without_a_warning(k: int, layout: str, tmp_path: Path) -> None:
    some = HOSTILE[k : k + 8]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a missing glyph is a warning, and a box in the picture
        path = save(draw(ring(len(some)), layout=layout, labels=some, title=some[0]), tmp_path / "a.png", dpi=50)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("k", range(0, len(HOSTILE), 15))
def test_svg_is_xml_without_script_or_links(k: int) -> None:
    some = HOSTILE[k : k + 15]
    root = ET.fromstring(to_svg(draw(ring(len(some)), layout="circle", labels=some)).encode())
    for e in root.iter():
        assert e.tag.rsplit("}", 1)[-1] not in ("script", "image", "foreignObject", "a")
        for name, value in e.attrib.items():
            assert not name.startswith("on") and (not name.endswith("href") or value.startswith("#"))


def test_other_pictures_take_the_labels() -> None:
    some = HOSTILE[:16]
    g = ring(16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ET.fromstring(to_svg(draw_attention(some, [g], [torch.ones(2, g.num_edges)])))
        ET.fromstring(to_svg(draw_stack([g, g], target=5, labels=some)))


def test_graphml_keeps_labels() -> None:
    g = ring(len(HOSTILE))
    back = nx.parse_graphml(to_graphml(g, torch.ones(g.num_edges), HOSTILE).encode())
    assert back.number_of_nodes() == len(HOSTILE) and back.number_of_edges() == g.num_edges
    legal = [i for i, s in enumerate(HOSTILE) if not re.search("[\x00-\x08\x0b-\x1f\ud800-\udfff\ufffe\uffff]", s)]
    assert len(legal) > 30
    for i in legal:
        # networkx reads an empty text as no text
        assert back.nodes[str(i)].get("label", "") == HOSTILE[i]


def test_dot_is_one_statement_per_line() -> None:
    for graph, labels, sources in (
        (ring(len(HOSTILE)), HOSTILE, None),
        (ga.bipartite(3, 5), HOSTILE[:3], HOSTILE[-5:]),
    ):
        text = to_dot(graph, torch.rand(graph.num_edges), labels, sources)
        lines = text.rstrip("\n").split("\n")
        assert (
            len(lines) == 4 + sum({graph.t, graph.s} if graph.t == graph.s else (graph.t, graph.s, 2)) + graph.num_edges
        )
        for line in lines:
            assert DOT_STATEMENT.fullmatch(line), line
        text.encode("utf-8")


def test_html_is_ascii_safe_utf8() -> None:
    text = to_html(ring(len(HOSTILE)), labels=HOSTILE, title=HOSTILE[0])
    text.encode("utf-8")
    assert "<script>window" not in text and "<img" not in text


def test_export_by_ending(tmp_path: Path) -> None:
    g = ring(5)
    for end in ("png", "svg", "pdf", "html", "graphml", "dot", "gv"):
        path = export(tmp_path / f"a.{end}", g, torch.ones(g.num_edges), labels=HOSTILE[20:25])
        assert path.stat().st_size > 100
    with pytest.raises(ValueError, match="the ending is none of"):
        export(tmp_path / "a.gif", g)
    with pytest.raises(ValueError, match="have no highlight"):
        export(tmp_path / "a.dot", g, highlight=1)


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("", "∅"), (" ", "␣"), (" the", "␣the"), ("a b", "a b"), ("\n", "↵"), ("a\tb", "a⇥b"), ("\x00", "^@"),
        ("\x1b", "^["), ("\x7f", "^?"), ("\u202e", "<U+202E>"), ("\ud800", "<U+D800>"),
        ("\u0301", "◌\u0301"), ("$x$", "$x$"),
        (3, "3"),
    ],
)  # fmt: skip
def test_visible(label: object, shown: str) -> None:
    assert visible(label) == shown
    assert visible(visible(label)) == shown


def test_long_labels_are_cut_by_columns() -> None:
    assert visible("x" * 12, 12) == "x" * 12
    assert visible("x" * 13, 12) == "x" * 11 + "…"
    assert columns(visible("\u4f60" * 40, 12)) <= 12
    assert all(columns(visible(s, 12)) <= 12 for s in HOSTILE)


EMOJI = ["\U0001f680", "\U0001f600", "a\U0001f680b", "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f1fa\U0001f1f3",
         "\U0001f44d\U0001f3fd", "\u2764\ufe0f", "\U0001f389"]  # fmt: skip


@pytest.fixture
def dejavu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that has no other font than matplotlib's own."""
    from graphattn.draw import text

    monkeypatch.setattr(text, "_family_with", lambda c: None)


@pytest.mark.parametrize(
    ("label", "stands_in"),
    [
        ("\U0001f680", ":rocket:"), ("a\U0001f680b", "a:rocket:b"), ("\U0001f1fa\U0001f1f3", "UN"),
        ("\U0001f44d\U0001f3fd", ":thumbs-up:"), ("\U0001f389", ":party:"), ("\u4f60", "▯4F60"),
        ("\U0001f469\u200d\U0001f469\u200d\U0001f467", ":woman:…"), ("\u2764\ufe0f", "\u2764"),
    ],
)  # fmt: skip
def test_what_no_font_has_gets_a_short_stand_in(label: str, stands_in: str, dejavu_only: None) -> None:
    assert drawn(label) == stands_in


def test_every_emoji_has_a_stand_in_of_its_own_letters(dejavu_only: None) -> None:
    import unicodedata

    from graphattn.draw.text import stand_in

    wide = [chr(n) for n in range(0x1F300, 0x1FB00) if unicodedata.category(chr(n)) in ("So", "Sk")]
    assert len(wide) > 900
    for c in wide:
        text = stand_in(c)
        assert columns(text) <= 12 and text.isascii() and "<" not in text
        assert text or 0x1F3FB <= ord(c) <= 0x1F3FF
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert columns(drawn(c * 3)) <= 12


@pytest.mark.parametrize("layout", ["circle", "line", "columns", "matrix"])
def test_an_svg_tells_the_label_that_a_stand_in_stands_for(layout: str, dejavu_only: None, tmp_path: Path) -> None:
    labels = [*EMOJI, "plain", "$x$", "a longer label than is drawn", "<b>&\x00"]
    g = ring(len(labels))
    ax = draw(g, layout=layout, labels=labels, title="to the \U0001f680")
    for text in (to_svg(ax), save(ax, tmp_path / "a.svg").read_text(encoding="utf-8")):
        root = ET.fromstring(text.encode())
        titles = [e.text for e in root.iter("{http://www.w3.org/2000/svg}title")]
        assert {*EMOJI[2:6], EMOJI[0], EMOJI[7], labels[-2], "<b>&^@", "to the \U0001f680"} <= set(titles)
        assert not {"plain", "$x$"} & set(titles)
        for e in root.iter():
            assert e.tag.rsplit("}", 1)[-1] not in ("script", "foreignObject", "a")
    again = draw(g, layout=layout, labels=labels, title="to the \U0001f680")
    assert to_svg(again) == to_svg(draw(g, layout=layout, labels=labels, title="to the \U0001f680"))
    assert all(artist.get_gid() is None for artist in ax.figure.findobj(lambda a: hasattr(a, "graphattn_label")))


def test_stand_ins_stay_out_of_small_circles(dejavu_only: None) -> None:
    from matplotlib.patches import Circle

    ax = draw(ga.window(4, 2), layout="circle", labels=EMOJI[:4])
    renderer = ax.figure.canvas.get_renderer()
    nodes = [p.get_window_extent(renderer) for p in ax.patches if isinstance(p, Circle)]
    for text in ax.texts:
        box = text.get_window_extent(renderer)
        assert not any(box.overlaps(node) for node in nodes)


def test_dollars_stay_dollars() -> None:
    from matplotlib import cbook

    for text in ("$", "$x^2$", "\\$", "a$b$c"):
        assert not cbook.is_math_text(drawn(text))
        assert drawn(text).replace(r"\$", "$") == text
