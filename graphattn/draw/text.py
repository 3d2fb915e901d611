"""Labels are data: any string becomes one short line that shows what it holds and means nothing to the renderer.

Tokens may hold `$`, quotes, newlines, marks that reverse the text around them, emoji, or nothing at all.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

from graphattn.graph import Graph

EMPTY = "∅"
_SIGN = {"\n": "↵", "\t": "⇥", "\u00a0": "␣", "\u2028": "↵", "\u2029": "↵"}
_JOINERS = "\u200d\ufe0e\ufe0f"  # they glue emoji together and have no shape of their own
_MARKS = 3  # accents on one letter; more would climb over the lines above


def visible(label: object, width: int | None = None) -> str:
    """The label on one line, every character visible, cut with "…" beyond `width` columns.

    Newline is "↵", tab "⇥", other control characters in caret notation (NUL "^@", escape "^["), blanks at either end
    "␣", direction marks and other invisible characters `<U+202E>`, the empty string "∅".
    """
    text = str(label)
    if width is not None:
        text = text[: 8 * width]  # a longer label is cut in any case
    parts = ["◌"] if text and unicodedata.combining(text[0]) else []
    first, last = len(text) - len(text.lstrip(" ")), len(text.rstrip(" "))
    marks = 0
    for i, c in enumerate(text):
        marks = marks + 1 if unicodedata.combining(c) else 0
        if marks <= _MARKS and c not in _JOINERS:
            parts.append("␣" if c == " " and not first <= i < last else _shown(c))
    if not parts:
        return EMPTY
    return "".join(parts) if width is None else _cut(parts, width)


def _shown(c: str) -> str:
    if c in _SIGN:
        return _SIGN[c]
    if c < " " or c == "\x7f":
        return "^" + chr(ord(c) ^ 0x40)
    kind = unicodedata.category(c)
    # Cc control, Cf direction and other marks, Cs lone surrogate, Co private, Cn unassigned
    if kind in ("Cc", "Cf", "Cs", "Co", "Cn"):
        return f"<U+{ord(c):04X}>"
    return "␣" if kind == "Zs" and c != " " else c


def columns(text: str) -> int:
    """Width in character cells: wide East Asian characters and emoji take two, combining marks none."""
    return sum(_columns(c) for c in text)


def _columns(c: str) -> int:
    return 0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1


def _cut(parts: Sequence[str], width: int) -> str:
    sizes = [columns(p) for p in parts]
    if sum(sizes) <= width:
        return "".join(parts)
    used, kept = 0, []
    for part, size in zip(parts, sizes, strict=True):
        used += size
        if used > width - 1:
            break
        kept.append(part)
    return "".join(kept) + "…"


# ---------------------------------------------------------------------- matplotlib


def drawn(label: object, width: int | None = 12) -> str:
    """`visible`, and safe for matplotlib: no TeX, and a `stand_in` for every glyph that the fonts in use lack."""
    import matplotlib as mpl

    text = visible(label, width)
    # before 3.11 matplotlib writes right-to-left text in reading order, left to right
    old = tuple(int(x) for x in mpl.__version__.split(".")[:2]) < (3, 11)
    if old and any(unicodedata.bidirectional(c) in ("R", "AL") for c in text):
        text = text[::-1]
    fonts = _paths(tuple(mpl.rcParams["font.family"]))
    parts = [c if _has_glyph(c, fonts) else stand_in(c) for c in text]
    if any(not _has_glyph(c, fonts) for c in {*"".join(parts)}):  # fonts without even a box
        parts = [c if _has_glyph(c, fonts) else f"<U+{ord(c):X}>" for c in text]
    text = "".join(parts) if width is None else _cut(parts, width)
    # a pair of dollars would be mathematics; an escaped one never is
    return text.replace("$", r"\$")


# words of a character's name that tell little, beside others
_DULL = frozenset(["face", "with", "of", "and", "the", "sign", "symbol", "mark"])


def stand_in(c: str) -> str:
    """Something short and visible for a character no font here has: a word of an emoji's name, a flag's letters.

    `:rocket:`, `:grinning:`; "UN" for that flag; "▯4F60", its code, for a letter.  Skin tones say nothing.
    """
    n = ord(c)
    if 0x1F1E6 <= n <= 0x1F1FF:
        return chr(ord("A") + n - 0x1F1E6)
    if 0x1F3FB <= n <= 0x1F3FF:
        return ""
    if unicodedata.category(c) not in ("So", "Sk", "Sm"):
        return f"▯{n:04X}"
    words = unicodedata.name(c, "").lower().split()
    words = [w for w in words if w not in _DULL] or words
    if not words:
        return f"▯{n:04X}"
    kept = words[0][:10]
    for word in words[1:]:
        if len(kept) + 1 + len(word) > 10:
            break
        kept += f"-{word}"
    return f":{kept}:"


def keep_label(artist: Any, label: object) -> None:
    """Remember what a drawn label stands for, where it is not the text itself: an SVG tells it when hovered."""
    text = str(label)
    if artist.get_text().replace(r"\$", "$") != text:
        artist.graphattn_label = text[:1000]


def in_xml(c: str) -> bool:
    """XML can hold the character."""
    n = ord(c)
    return c in "\t\n" or 0x20 <= n <= 0xD7FF or 0xE000 <= n <= 0xFFFD or n >= 0x10000


def for_xml(text: str) -> str:
    """The text, with pictures (NUL as "^@") of the characters that XML cannot hold."""
    return "".join(c if in_xml(c) else visible(c) for c in text)


def drawn_title(title: object) -> str:
    """`drawn`, line by line."""
    return "\n".join(drawn(line, 90) if line else "" for line in str(title).split("\n"))


def safe_fonts(*labels: Iterable[object] | None) -> Any:
    """Settings for `matplotlib.rc_context` under which the labels can be drawn: no TeX, and fonts that have the glyphs.

    The user's fonts come first; for characters they lack, any installed font that has them is appended.
    """
    import matplotlib as mpl

    families = list(mpl.rcParams["font.family"])
    have = _paths(tuple(families))
    text = {c for some in labels if some is not None for label in some for c in visible(label, 40)}
    missing = sorted(c for c in text if ord(c) > 0x7F and not _has_glyph(c, have))
    for c in missing[:400]:
        if not any(_has_glyph(c, _paths((f,))) for f in families):
            found = _family_with(c)
            families += [found] if found is not None else []
    return {"text.usetex": False, "font.family": families}


@functools.lru_cache(64)
def _paths(families: tuple[str, ...]) -> tuple[str, ...]:
    from matplotlib import font_manager

    manager: Any = font_manager.fontManager
    return tuple(manager._find_fonts_by_props(font_manager.FontProperties(family=list(families))))


@functools.lru_cache(4096)
def _has_glyph(c: str, fonts: tuple[str, ...]) -> bool:
    from matplotlib.font_manager import get_font

    return any(get_font(path).get_char_index(ord(c)) for path in fonts)


@functools.lru_cache(1024)
def _family_with(c: str) -> str | None:
    from matplotlib.font_manager import fontManager
    from matplotlib.ft2font import FT2Font

    for entry in sorted(fontManager.ttflist, key=lambda e: (e.style != "normal", abs(_weight(e.weight) - 400), e.name)):
        try:
            # colour fonts hold bitmaps, which matplotlib cannot draw; the last resort is a box for every character
            if not any(x in entry.name.lower() for x in ("emoji", "last resort")) and FT2Font(
                entry.fname
            ).get_char_index(ord(c)):
                return entry.name
        except (OSError, RuntimeError):
            continue
    return None


def _weight(weight: str | int) -> int:
    from matplotlib.font_manager import weight_dict

    return weight if isinstance(weight, int) else weight_dict.get(weight, 400)


# ---------------------------------------------------------------------- labels of a graph


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
    for got, need, what, side in (
        (target, graph.t, "labels", "target"),
        (source, graph.s, "source_labels", "source"),
    ):
        if got is not None and len(got) != need:
            raise ValueError(
                f"{what} has {len(got)} entries, but the graph is {graph!r}: it needs {need}, one per {side}"
            )
    return target, source
