"""Graphs from a line of text, such as `window(16) | causal & band(64) - band(48)`.

Operators bind as in Python, tightest first: `~`, then `-`, then `&`, then `^`, then `|`.  A pattern never takes the
number of targets: that is the `size` the whole expression is read for.  `@edges.npz` reads an edge list.
"""

from __future__ import annotations

import inspect
import math
import sys
import types
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from graphattn import patterns
from graphattn.graph import Graph
from graphattn.nearest import nearest

# longest text, deepest nesting and longest list that are read
MAX_TEXT, MAX_DEPTH, MAX_LIST = 10_000, 64, 4096
# largest number in an argument
MAX_NUMBER = 2**31
# bytes an edge file may take, unpacked
MAX_EDGE_BYTES = 2**30

# patterns the language knows, as far as `patterns` has them; those that take graphs or tensors are for Python
NAMES = (
    *("full", "causal", "band", "window", "prefix", "self_loops", "empty", "dilated", "strided", "fixed"),
    *("global_tokens", "random_regular", "bigbird", "block_causal", "neighborhood", "shared_prefix"),
    *("expander", "shifted_window", "documents"),
)


class ParseError(ValueError):
    """What is wrong with an expression, and where.

    `line` says it in one line; `str(error)` adds the text with a caret under the character.
    """

    def __init__(self, problem: str, text: str, at: int):
        self.problem, self.text, self.at = problem, text, min(at, len(text))
        shown, mark = _around(text, self.at)
        self.line = f"{problem}, at character {self.at + 1} of {_quoted(text)}"
        super().__init__(f"{problem}, at character {self.at + 1}\n  {shown}\n  {' ' * mark}^")

    def __reduce__(self) -> tuple[Any, ...]:
        return ParseError, (self.problem, self.text, self.at)


def parse(text: str, size: int | tuple[int, int]) -> Graph:
    """The graph that an expression names.

    Args:
        text: pattern calls joined by `& | - ^ ~` and parentheses.  An argument is an integer, a word (`align=end`),
            or a list of integers.  `@file.npz` holds `edge_index` (2, E), source above target.
        size: number of targets, or `(targets, sources)`; every pattern of the expression gets it.

    Raises:
        ParseError: (a ValueError) pointing at the character; nothing else, whatever the text.
    """
    if not isinstance(text, str):
        raise TypeError(f"an expression is a string, got {type(text).__name__}")
    t, s = (size, size) if isinstance(size, int) else size
    if t < 0 or s < 0:
        raise ValueError(f"size must not be negative, got {size}")
    return _Parser(text, t, s).graph()


class _Parser:
    """Recursive descent; one method per level of precedence, each returning the graph read so far."""

    def __init__(self, text: str, t: int, s: int):
        self.text, self.t, self.s = text, t, s
        self.at = self.depth = 0
        if len(text) > MAX_TEXT:
            self.fail(f"the expression has {len(text):,} characters, at most {MAX_TEXT:,} are read", MAX_TEXT)

    def error(self, problem: str, at: int | None = None) -> ParseError:
        return ParseError(problem, self.text, self.at if at is None else at)

    def fail(self, problem: str, at: int | None = None) -> NoReturn:
        raise self.error(problem, at)

    # ------------------------------------------------------------------ characters

    def peek(self) -> str:
        """The next character that is no space, or '' at the end."""
        while self.at < len(self.text) and self.text[self.at] in " \t\r\n":
            self.at += 1
        return self.text[self.at : self.at + 1]

    def take(self, char: str) -> bool:
        if self.peek() == char:
            self.at += 1
            return True
        return False

    def word(self) -> str:
        start = self.at
        while self.at < len(self.text) and (self.text[self.at] == "_" or self.text[self.at].isalnum()):
            self.at += 1
        return self.text[start : self.at]

    # ------------------------------------------------------------------ grammar

    def graph(self) -> Graph:
        if not self.peek():
            self.fail("the expression is empty: name a pattern such as causal")
        out = self.union()
        if self.peek():
            self.fail(f"unexpected {self.peek()!r}: an operator & | - ^ or the end should come here")
        return out

    def union(self) -> Graph:
        return self.chain("|", lambda: self.chain("^", lambda: self.chain("&", lambda: self.chain("-", self.unary))))

    def chain(self, sign: str, operand: Callable[[], Graph]) -> Graph:
        out = operand()
        while self.peek() == sign:
            at = self.at
            self.at += 1
            out = self.guard(at, f"{sign} failed", partial(_OPERATORS[sign], out, operand()))
        return out

    def unary(self) -> Graph:
        at, flips = self.at, 0
        while self.take("~"):
            flips += 1
        out = self.atom()
        return self.guard(at, "~ failed", lambda: ~out) if flips % 2 else out

    def atom(self) -> Graph:
        char, at = self.peek(), self.at
        if char == "(":
            self.depth += 1
            if self.depth > MAX_DEPTH:
                self.fail(f"more than {MAX_DEPTH} parentheses inside each other")
            self.at += 1
            out = self.union()
            if not self.take(")"):
                self.fail(f"the parenthesis opened at character {at + 1} is not closed")
            self.depth -= 1
            return out
        if char == "@":
            return self.file()
        if char.isalpha() or char == "_":
            return self.pattern()
        if not char:
            self.fail("the expression ends where a pattern should come")
        if char.isdigit():
            self.fail("a number stands where a pattern should come, such as band(16)")
        self.fail(f"unexpected {char!r}: a pattern, ~, @file or ( should come here")

    def pattern(self) -> Graph:
        at, name = self.at, self.word()
        make: Callable[..., Graph] | None = getattr(patterns, name, None) if name in NAMES else None
        if make is None:
            known = [n for n in NAMES if hasattr(patterns, n)]
            raise self.error(f"unknown pattern {_short(name)}{nearest(name, known)}; known are {', '.join(known)}", at)
        values: list[tuple[int, Any]] = []
        named: dict[str, tuple[int, Any]] = {}
        if self.take("("):
            self.arguments(values, named)
        parameters = inspect.signature(make).parameters
        free = [n for n in parameters if n not in ("t", "s")]
        shown = [n + _default(parameters[n]) for n in free if parameters[n].default is not None]
        usage = f"{name}({', '.join(shown)})" if shown else name
        hint = f"a pattern here never takes the number of targets, that is the size, {self.t}: write {usage}"
        keywords: dict[str, Any] = {}
        for position, (where, value) in enumerate(values):
            if position >= len(free) or (free[position] == "align" and not isinstance(value, str)):
                self.fail(f"{name} got an argument too many; {hint}", where)
            keywords[free[position]] = value
        for key, (where, value) in named.items():
            if key not in free:  # t and s as well
                self.fail(f"{name} has no argument {_short(key)}{nearest(key, free)}; {hint}", where)
            if key in keywords:
                self.fail(f"{name} got {key} twice", where)
            keywords[key] = value
        if isinstance(keywords.get("shape"), int):
            self.fail(f"{name} needs a shape whose product is the size, {self.t}, such as [{self.t}]", at)
        missing = [n for n in free if parameters[n].default is inspect.Parameter.empty and n not in keywords]
        if missing:
            self.fail(f"{name} needs {missing[0]}: write {usage}", at)
        if isinstance(keywords.get("degree"), int) and keywords["degree"] > max(self.t, self.s):
            self.fail(f"{name} has degree {keywords['degree']}, but the size is {self.t}", at)
        own = _own_size(keywords)
        if own is not None and own != self.t:
            self.fail(f"{name} describes {own} targets, but the size is {self.t}", at)
        if "t" in parameters:
            keywords["t"] = self.t
        if "s" in parameters:
            keywords["s"] = self.s
        return self.guard(at, name, partial(make, **keywords))

    def arguments(self, values: list[tuple[int, Any]], named: dict[str, tuple[int, Any]]) -> None:
        if self.take(")"):
            return
        while True:
            char, at = self.peek(), self.at
            if char.isalpha() or char == "_":
                key = self.word()
                if self.take("="):
                    self.peek()
                    if key in named:
                        self.fail(f"{_short(key)} is given twice", at)
                    named[key] = (self.at, self.value())
                else:
                    values.append((at, self.literal(key)))
            else:
                if named:
                    self.fail("an argument without a name follows one with a name")
                values.append((at, self.value()))
            if self.take(")"):
                return
            if not self.take(","):
                self.fail("a comma or ) should come here" if self.peek() else "the arguments are not closed by )")

    def value(self) -> Any:
        char = self.peek()
        if char == "[":
            self.at += 1
            out: list[Any] = []
            while not self.take("]"):
                if len(out) >= MAX_LIST:
                    self.fail(f"a list holds at most {MAX_LIST} numbers")
                self.peek()
                out.append(self.number())
                if not self.take(",") and self.peek() != "]":
                    self.fail("a comma or ] should come here")
            return out
        if char in ("'", '"') and char:
            end = self.text.find(char, self.at + 1)
            if end < 0:
                self.fail("the quote is not closed")
            out_text, self.at = self.text[self.at + 1 : end], end + 1
            return out_text
        if char.isalpha() or char == "_":
            return self.literal(self.word())
        return self.number()

    @staticmethod
    def literal(word: str) -> Any:
        return {"True": True, "False": False, "None": None}.get(word, word)

    def number(self) -> int:
        start = self.at
        if self.text[self.at : self.at + 1] in ("-", "+") and self.at < len(self.text):
            self.at += 1
        while self.at < len(self.text) and self.text[self.at] in "0123456789":
            self.at += 1
        token = self.text[start : self.at]
        if not token.strip("+-") or self.text[self.at : self.at + 1] == ".":
            self.fail("a whole number should come here", start)
        if len(token) > 18 or abs(int(token)) > MAX_NUMBER:
            self.fail(f"a number is at most {MAX_NUMBER}", start)
        return int(token)

    def file(self) -> Graph:
        at = self.at
        self.at += 1
        if self.text[self.at : self.at + 1] in ("'", '"') and self.at < len(self.text):
            quote = self.text[self.at]
            end = self.text.find(quote, self.at + 1)
            if end < 0:
                self.fail("the quote is not closed")
            path, self.at = self.text[self.at + 1 : end], end + 1
        else:
            start = self.at
            while self.at < len(self.text) and self.text[self.at] not in " \t\r\n()&|^~,":
                self.at += 1
            path = self.text[start : self.at]
        if not path:
            self.fail("a file name should follow @, such as @edges.npz", at)
        return self.guard(at, f"@{path}", lambda: read_edges(path, self.t, self.s))

    def guard(self, at: int, what: str, make: Callable[[], Graph]) -> Graph:
        """`make()`, its refusals pointing at the text, its result of the expression's size."""
        try:
            out = make()
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ParseError(f"{_short(what, quote=False)}: {reason[:400]}", self.text, at) from None
        if out.shape != (self.t, self.s):
            self.fail(f"{_short(what, quote=False)} is {out!r}, but the size is {self.t} <- {self.s}", at)
        return out


_OPERATORS: dict[str, Callable[[Graph, Graph], Graph]] = {
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "&": lambda a, b: a & b,
    "-": lambda a, b: a - b,
}


def read_edges(path: str | Path, t: int, s: int) -> Graph:
    """The graph in an `.npz` file that `to_npz` wrote, or of `edge_index` (2, E) integer, source above target.

    With `edge_index` it may hold `shape` (2,).

    Raises:
        ValueError: not such a file, larger than 1 GiB unpacked, another shape, or an edge out of range.
        OSError: the file can't be read.
    """
    import numpy as np

    from graphattn.convert import from_edge_index
    from graphattn.convert.files import from_arrays

    path = Path(path)
    if not path.is_file():
        raise ValueError("there is no such file" if not path.exists() else "this is no file")
    try:
        with zipfile.ZipFile(path) as archive:
            total = sum(entry.file_size for entry in archive.infolist())
        if total > MAX_EDGE_BYTES:
            raise ValueError(f"holds {total:,} bytes, at most {MAX_EDGE_BYTES:,} are read")
        with np.load(path, allow_pickle=False) as data:
            names = sorted(data.files)
            if "indptr" in names:
                graph = from_arrays(data)
                if graph.shape != (t, s):
                    raise ValueError(f"holds {graph!r}, but the size is {t} <- {s}")
                return graph
            if "edge_index" not in names:
                raise ValueError(f"has no array edge_index, only {', '.join(names)[:200] or 'none'}")
            edges = data["edge_index"]
            shape = tuple(int(n) for n in data["shape"]) if "shape" in names else (t, s)
    except (zipfile.BadZipFile, EOFError, KeyError, zipfile.LargeZipFile, NotImplementedError) as error:
        raise ValueError(f"is no .npz file of edges ({error})") from None
    except Exception as error:  # zlib.error and what a forged header raises
        if isinstance(error, (ValueError, OSError)):
            raise
        raise ValueError(f"is no .npz file of edges ({type(error).__name__}: {error})") from None
    if edges.dtype.kind not in "iu" and edges.size:
        raise ValueError(f"edge_index must hold integers, got {edges.dtype}")
    if shape != (t, s):
        raise ValueError(f"is for {shape[0]} targets and {shape[-1]} sources, but the size is {t} <- {s}")
    graph = from_edge_index(torch.from_numpy(edges.astype(np.int64)), (t, s))  # type: ignore[assignment]
    assert isinstance(graph, Graph)
    return graph


def _own_size(given: dict[str, Any]) -> int | None:
    """Targets of a pattern whose arguments say it by themselves, known before anything is built."""

    def numbers(name: str) -> list[Any] | None:
        values = given.get(name)
        return values if isinstance(values, list) and all(isinstance(n, int) for n in values) else None

    if (shape := numbers("shape")) is not None:
        # a side of 0 hides the others in the product, but they are built all the same
        return max([math.prod(shape[:64]), *(shape if 0 in shape else [])])
    if (lengths := numbers("lengths") or numbers("sizes")) is not None:
        return sum(lengths) + (given["prefix"] if isinstance(given.get("prefix"), int) else 0)
    return None


def _default(parameter: inspect.Parameter) -> str:
    return "" if parameter.default is inspect.Parameter.empty else f"={parameter.default}"


def _short(name: str, quote: bool = True) -> str:
    name = name if len(name) <= 40 else name[:37] + "..."
    return repr(name) if quote else name


def _quoted(text: str) -> str:
    text = text if len(text) <= 120 else text[:117] + "..."
    return '"' + "".join(c if c.isprintable() else " " for c in text) + '"'


def _around(text: str, at: int, width: int = 100) -> tuple[str, int]:
    """At most `width` characters around `at` on one line, and where `at` falls in them."""
    low = max(0, at - width // 2)
    shown = "".join(c if c.isprintable() else " " for c in text[low : low + width])
    return shown, at - low


class _CallableModule(types.ModuleType):
    """Importing this module puts it where `graphattn.parse` was a function: it must go on being one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return parse(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
