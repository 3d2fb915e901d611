"""Labels are data: any string becomes one short line that shows what it holds and means nothing to the renderer.

Tokens may hold `$`, quotes, newlines, escapes that reverse the text around them, emoji, or nothing at all.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Sequence

from graphattn.graph import Graph

# what is drawn for characters that have no shape of their own
_SIGN = {"\n": "↵", "\t": "⇥", "\r": "␍", "\x7f": "␡", "\u00a0": "⍽", "\u00ad": "‧", "\u2028": "↵", "\u2029": "↵"}
EMPTY = "∅"


def visible(label: object, width: int | None = None) -> str:
    """The label on one line, every character visible; cut in the middle of nothing, at `width` columns, with "…".

    Control characters become their pictures (newline "↵", NUL "␀"), blanks at either end "␣", direction marks and
    other invisible characters `<U+202E>`, the empty string "∅".
    """
    text = str(label)
    if not text:
        return EMPTY
    if width is not None and len(text) > 8 * width:  # zero-width characters aside, the rest cannot be shown
        text = text[: 8 * width]
    out = []
    for i, c in enumerate(text):
        out.append(_shown(c, at_end=not text[:i].strip(" ") or not text[i:].strip(" ")) if c == " " else _shown(c))
    if unicodedata.combining(text[0]):
        out.insert(0, "◌")
    return "".join(out) if width is None else _cut(out, width)


def _shown(c: str, at_end: bool = False) -> str:
    if c in _SIGN:
        return _SIGN[c]
    if c == " ":
        return "␣" if at_end else " "
    if c < " ":
        return chr(0x2400 + ord(c))
    kind = unicodedata.category(c)
    # Cc control, Cf direction and join marks, Cs lone surrogates, Co private, Cn unassigned, Zs other blanks
    if kind in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") and c != "\u200d":
        return f"<U+{ord(c):04X}>"
    return "␣" if kind == "Zs" else "" if c in "\u200d\ufe0e\ufe0f" else c


def columns(text: str) -> int:
    """Width in character cells: wide East Asian characters and emoji take two, combining marks none."""
    return sum(_columns(c) for c in text)


def _columns(c: str) -> int:
    return 0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1


def _cut(parts: list[str], width: int) -> str:
    used, kept = 0, []
    for i, part in enumerate(parts):
        used += columns(part)
        if used > width or (used == width and any(columns(p) for p in parts[i + 1 :])):
            return "".join(kept) + "…"
        kept.append(part)
    return "".join(kept)


def drawn(label: object, width: int | None = 12) -> str:
    """`visible`, and safe for matplotlib: no TeX, no glyph that the fonts at hand lack."""
    text = _visual_order(visible(label, width))
    fonts = _fonts()
    text = "".join(c if _has_glyph(c, fonts) else f"<U+{ord(c):X}>" for c in text)
    if width is not None and columns(text) > 2 * width:
        text = _cut(list(text), 2 * width)
    # matplotlib takes a pair of dollars for mathematics; an escaped one is always a dollar
    return text.replace("$", r"\$")


def _fonts() -> tuple[str, ...]:
    import matplotlib as mpl
    from matplotlib import font_manager

    families = mpl.rcParams["font.family"]
    return tuple(font_manager.fontManager._find_fonts_by_props(font_manager.FontProperties(family=families)))  # type: ignore[attr-defined]


@functools.lru_cache(4096)
def _has_glyph(c: str, fonts: tuple[str, ...]) -> bool:
    from matplotlib.font_manager import get_font

    return any(get_font(path).get_char_index(ord(c)) for path in fonts)


@functools.lru_cache(1)
def _renderer_orders() -> bool:
    """matplotlib lays out right-to-left text itself since 3.11."""
    import matplotlib as mpl

    return tuple(int(x) for x in mpl.__version__.split(".")[:2]) >= (3, 11)


def _visual_order(text: str) -> str:
    if _renderer_orders() or not any(unicodedata.bidirectional(c) in ("R", "AL") for c in text):
        return text
    return text[::-1]


def labels_of(
    graph: Graph, labels: Sequence[object] | None, source_labels: Sequence[object] | None
) -> tuple[list[str] | None, list[str] | None]:
    """Raw labels `(targets, sources)`; one sequence serves both when the graph has as many targets as sources.

    Raises:
        ValueError: a sequence whose length is not the number of targets (of sources).
    """
    target = None if labels is None else [str(x) for x in labels]
    source = None if source_labels is None else [str(x) for x in source_labels]
    if source is None and graph.t == graph.s:
        source = target
    for got, need, what in ((target, graph.t, "labels"), (source, graph.s, "source_labels")):
        if got is not None and len(got) != need:
            side = "targets" if what == "labels" else "sources"
            raise ValueError(f"{what} has {len(got)} entries, but the graph is {graph!r}: it needs {need}, one per {side}")
    return target, source
