"""What a mistyped name may have meant."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], most: int = 3) -> str:
    """`" (did you mean 'window'?)"`, or nothing where no known name is near; ready to stand behind the wrong one.

    Near are names that begin or end with what was written (three letters at least), then those that differ by few.
    """
    import difflib

    known, word = list(known), word.lower()[:60]
    part = [n for n in known if len(word) >= 3 and (n.startswith(word) or n.endswith(word))]
    close = difflib.get_close_matches(word, known, n=most, cutoff=0.7)
    found = list(dict.fromkeys([*close, *part]))[:most]
    return f" (did you mean {' or '.join(map(repr, found))}?)" if found else ""
