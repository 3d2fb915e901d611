"""The expression language: what it means, what it refuses, and that nothing but its own error ever comes out."""

from __future__ import annotations

import importlib
import pickle
import random
import re
import zipfile

import numpy as np
import pytest
import torch

import graphattn as ga
from graphattn.nearest import nearest
from graphattn.parse import MAX_DEPTH, MAX_TEXT, NAMES, ParseError, parse

parse_module = importlib.import_module("graphattn.parse")
N = 23


def meaning(text: str, size: int) -> ga.Graph:
    """The same text as Python, which has the same operators and precedence: the definition, on trusted text only."""
    names = {
        "causal": ga.causal(size),
        "full": ga.full(size),
        "self_loops": ga.self_loops(size),
        "empty": ga.empty(size),
    }
    calls = {
        "band": lambda *a, **k: ga.band(size, *a, **k),
        "window": lambda *a, **k: ga.window(size, *a, **k),
        "prefix": lambda *a, **k: ga.prefix(size, *a, **k),
    }
    return eval(text, {"__builtins__": {}}, names | calls)


@pytest.mark.parametrize(
    "text",
    [
        "causal",
        "full - causal",
        "window(5) | causal & band(13) - band(7)",
        "causal - band(3) & band(11) | prefix(4) ^ window(2)",
        "~causal",
        "~~causal",
        "~causal & ~self_loops",
        "causal & ~band(3) - ~prefix(2)",
        "(causal | prefix(7)) - (band(2, 1) ^ self_loops)",
        "((((causal))))",
        "band(before=3, after=2)",
        "band( 3 ,after = 2 )",
        "  causal\n|\tprefix(3) ",
        "empty ^ full ^ causal ^ prefix(5)",
        "full - causal - band(0, 4) - empty",
    ],
)
def test_means_what_python_means(text: str) -> None:
    assert parse(text, N) == meaning(text.strip().replace("\n", " "), N)


def test_random_expressions_mean_what_python_means() -> None:
    rng = random.Random(7)

    def make(depth: int) -> str:
        if depth == 0 or rng.random() < 0.2:
            return rng.choice(["causal", "full", "self_loops", "band(3)", "band(2, 1)", "window(4)", "prefix(5)"])
        kind = rng.random()
        if kind < 0.2:
            return f"~{make(0)}"
        if kind < 0.4:
            return f"({make(depth - 1)})"
        return f"{make(depth - 1)} {rng.choice('|&^-')} {make(depth - 1)}"

    for _ in range(200):
        text = make(4)
        assert parse(text, 11) == meaning(text, 11), text


def test_issue_example() -> None:
    got = parse("window(16) | causal & band(64) - band(48)", 256)
    far = ga.band(256, 64) - ga.band(256, 48)
    assert got == ga.window(256, 16) | (ga.causal(256) & far)


def test_rectangle_and_words() -> None:
    assert parse("causal(align=end)", (3, 7)) == ga.causal(3, 7, align="end")
    assert parse("causal(align='start')", (3, 7)) == ga.causal(3, 7, align="start")
    assert parse("full", (0, 5)).shape == (0, 5)
    with pytest.raises(ParseError, match="align"):
        parse("causal", (3, 7))


def test_number_of_targets_is_refused() -> None:
    for text, at in (("causal(8)", 7), ("full | causal(8)", 14), ("band(8, 3, 0)", 11), ("full(8)", 5)):
        with pytest.raises(ParseError, match=f"never takes the number of targets, that is the size, {N}") as caught:
            parse(text, N)
        assert caught.value.at == at


@pytest.mark.parametrize(
    ("text", "at", "says"),
    [
        ("", 0, "empty"),
        ("   ", 3, "empty"),
        ("causl & band(3)", 0, "unknown pattern 'causl'"),
        ("causal & bnd(3)", 9, "unknown pattern 'bnd'"),
        ("causal &", 8, "ends where a pattern"),
        ("causal & & full", 9, "unexpected '&'"),
        ("causal full", 7, "unexpected 'f'"),
        ("(causal", 7, "opened at character 1 is not closed"),
        ("causal)", 6, "unexpected '\\)'"),
        ("band", 0, "needs before"),
        ("band()", 0, "needs before"),
        ("band(x=3)", 7, "no argument 'x'"),
        ("band(3, before=3)", 15, "before twice"),
        ("band(before=3, 3)", 15, "without a name follows"),
        ("band(3", 6, "not closed"),
        ("band(-)", 5, "whole number"),
        ("band(3 4)", 7, "comma or \\)"),
        ("band(,)", 5, "whole number should come"),
        ("band(1.2.3)", 5, "whole number"),
        ("band(9999999999999999999)", 5, "at most 2147483648"),
        ("expander(1000000000, 5)", 0, "degree 1000000000"),
        ("band('a)", 5, "quote is not closed"),
        ("window(0) | causal", 0, "window"),
        ("causal | window(1.5)", 16, "whole number"),
        ("@", 0, "file name should follow"),
        ("@nowhere.npz", 0, "no such file"),
        ("causal | @nowhere.npz", 9, "no such file"),
        ("@'a", 1, "quote is not closed"),
        ("3", 0, "a number stands"),
        ("causal; import os", 6, "unexpected ';'"),
        ("__import__('os')", 0, "unknown pattern"),
        ("causal.__class__", 6, "unexpected '.'"),
        ("documents([3, 2])", 0, "describes 5 targets, but the size is 23"),
        ("documents([3, x])", 14, "whole number should come"),
        ("documents([3", 12, "comma or \\]"),
        ("shifted_window([10, 3], 2)", 0, "describes 30 targets, but the size is 23"),
        ("neighborhood(23, 2)", 0, "shape whose product is the size, 23"),
        ("neighborhood(2000000000, 2)", 0, "shape whose product"),
        ("band(3000000000)", 5, "at most 2147483648"),
        ("padding(3)", 0, "unknown pattern"),
        ("²", 0, "a number stands"),
        ("é", 0, "unknown pattern"),
        ("causal \0", 7, "unexpected"),
    ],
)
def test_errors_point_at_the_character(text: str, at: int, says: str) -> None:
    with pytest.raises(ParseError, match=says) as caught:
        parse(text, N)
    error = caught.value
    assert error.at == at
    assert f"at character {at + 1}" in error.line and "\n" not in error.line
    first, shown, caret = str(error).split("\n")
    assert f"at character {at + 1}" in first
    assert caret.index("^") - 2 == at and shown[2:].startswith(text[:5].replace("\0", " "))
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.line) == (str(error), error.line)


def test_limits() -> None:
    assert parse("(" * MAX_DEPTH + "causal" + ")" * MAX_DEPTH, 5) == ga.causal(5)
    with pytest.raises(ParseError, match="parentheses inside each other"):
        parse("(" * 9000, 5)
    with pytest.raises(ParseError, match=f"at most {MAX_TEXT:,}"):
        parse("causal|" * 5000 + "causal", 5)
    assert parse("~" * 9000 + "causal", 5) == ga.causal(5)
    long = "causal | " * 200 + "cusal"
    with pytest.raises(ParseError) as caught:  # the caret still stands under it when only a part is shown
        parse(long, 5)
    _, shown, caret = str(caught.value).split("\n")
    assert len(shown) <= 102 and shown[caret.index("^") :].startswith("cusal")


def test_size_and_type_of_arguments() -> None:
    with pytest.raises(ValueError, match="size must not be negative"):
        parse("causal", -1)
    with pytest.raises(TypeError, match="string"):
        parse(3, 4)  # type: ignore[arg-type]
    assert parse("causal", 0).shape == (0, 0)


def test_module_and_function_share_a_name() -> None:
    assert ga.parse("causal", 3) == ga.causal(3)
    assert parse_module("causal", 3) == ga.causal(3)  # type: ignore[operator]


# ---------------------------------------------------------------------- files


def test_reads_an_edge_list(tmp_path, monkeypatch) -> None:
    edges = np.array([[0, 1, 0, 4, 0], [2, 2, 2, 1, 3]])
    np.savez(tmp_path / "edges.npz", edge_index=edges)
    wanted = ga.from_edge_index(torch.from_numpy(edges), (5, 5))
    monkeypatch.chdir(tmp_path)
    assert parse("@edges.npz", 5) == wanted
    assert parse("causal & @edges.npz|self_loops", 5) == ga.causal(5) & wanted | ga.self_loops(5)
    assert parse(f"(@'{tmp_path / 'edges.npz'}')", 5) == wanted
    np.savez(tmp_path / "small.npz", edge_index=edges.astype(np.int32), shape=np.array([5, 6]))
    assert parse("@small.npz", (5, 6)).shape == (5, 6)
    np.savez_compressed(tmp_path / "none.npz", edge_index=np.zeros((2, 0)))
    assert parse("@none.npz", 3) == ga.empty(3)


class _Boom:
    def __reduce__(self):
        import os

        return os.mkdir, ("executed",)


def test_refuses_bad_edge_files(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("big.npz", edge_index=np.array([[0], [7]]))
    np.savez("negative.npz", edge_index=np.array([[-1], [0]]))
    np.savez("float.npz", edge_index=np.array([[0.5], [1.0]]))
    np.savez("flat.npz", edge_index=np.arange(4))
    np.savez("other.npz", edges=np.arange(4))
    np.savez("shape.npz", edge_index=np.array([[0], [1]]), shape=np.array([4, 4]))
    np.savez("pickle.npz", edge_index=np.array([_Boom(), _Boom()], dtype=object))
    with open("text.npz", "w") as stream:
        stream.write("0 1\n")
    open("zero.npz", "w").close()
    with open("cut.npz", "wb") as stream, open("big.npz", "rb") as whole:
        stream.write(whole.read()[:60])
    with zipfile.ZipFile("bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        monkeypatch.setattr(parse_module, "MAX_EDGE_BYTES", 10**6)
        archive.writestr("edge_index.npy", b"\0" * 2 * 10**6)
    (tmp_path / "folder.npz").mkdir()
    names = ("big", "negative", "float", "flat", "other", "shape", "pickle", "text", "zero", "cut", "bomb", "folder")
    for name in names:
        with pytest.raises(ParseError, match=f"@{name}.npz") as caught:
            parse(f"causal | @{name}.npz", 3)
        assert caught.value.at == 9
    assert not (tmp_path / "executed").exists()


# ---------------------------------------------------------------------- nothing but graphs or ParseError


def random_text(rng: random.Random) -> str:
    """From well-formed to noise: grammar with random damage, or random tokens, or random characters."""
    words = [
        *NAMES,
        "band(3)",
        "window(2)",
        "prefix(-1)",
        "causal(8)",
        "align=end",
        "@x.npz",
        "documents([3,2])",
        "t=3",
    ]
    marks = list("|&^-~(),=[]@'\".;:\\#%\0\n") + [
        "1",
        "0",
        "-5",
        "1e9",
        "99999999999999999999",
        "3.5",
        "None",
        "é",
        "²",
    ]
    kind = rng.random()
    if kind < 0.2:
        return "".join(chr(rng.choice([rng.randrange(128), rng.randrange(0x110000)])) for _ in range(rng.randrange(30)))
    if kind < 0.6:
        return rng.choice(["", " "]).join(rng.choice(words + marks) for _ in range(rng.randrange(1, 12)))

    def make(depth: int) -> str:
        if depth == 0:
            if rng.random() < 0.6:
                return rng.choice(["full", "empty", "self_loops", "band(2)", "window(3)", "prefix(1)", "band(1, 2)"])
            name = rng.choice(NAMES)
            values = [str(rng.choice([rng.randrange(-3, 12), 10**9, 10**17, 0.5])) for _ in range(rng.randrange(3))]
            return f"{name}({', '.join(values)})" if values else name
        return rng.choice(["~{0}", "({0})", "{0} | {1}", "{0} & {1}", "{0} - {1}", "{0}^{1}"]).format(
            make(depth - 1), make(depth - 1)
        )

    text = make(rng.randrange(4))
    for _ in range(rng.choice([0, 0, 1, 2])):
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice([*marks, ""]) + text[at + rng.randrange(3) :]
    return text


def check_random_texts(count: int, seed: int) -> tuple[int, int]:
    """How many of `count` texts were graphs and how many refused; anything else escapes."""
    rng = random.Random(seed)
    graphs = 0
    for _ in range(count):
        text = random_text(rng)
        size = rng.choice([0, 1, 7, (3, 5)])
        try:
            g = parse(text, size)
        except ParseError as error:
            assert 0 <= error.at <= len(text) and "\n" not in error.line
        else:
            assert g.shape == (size if isinstance(size, tuple) else (size, size))
            graphs += 1
    return graphs, count - graphs


def test_random_texts() -> None:
    graphs, refused = check_random_texts(4000, seed=0)
    assert graphs > 100 and refused > 1000


# ---------------------------------------------------------------------- what was meant


def typos(name: str) -> list[str]:
    """One letter lost, doubled, changed, or two neighbours swapped."""
    at = range(len(name))
    lost = [name[:i] + name[i + 1 :] for i in at]
    twice = [name[: i + 1] + name[i:] for i in at]
    other = [name[:i] + "q" + name[i + 1 :] for i in at]
    swapped = [name[:i] + name[i + 1] + name[i] + name[i + 2 :] for i in at[:-1]]
    return [x for x in (*lost, *twice, *other, *swapped) if x != name]


@pytest.mark.parametrize("name", NAMES)
def test_a_mistyped_pattern_is_named(name: str) -> None:
    for wrong in typos(name) if len(name) > 4 else [name.upper(), name + name[-1]]:
        if wrong in NAMES:
            continue
        with pytest.raises(ParseError) as caught:
            parse(f"causal & {wrong}(3)", N)
        assert re.search(rf"unknown pattern '\w+' \(did you mean [^)]*'{name}'", caught.value.line), caught.value.line


def test_a_part_of_a_name_finds_it() -> None:
    for part, name in (("random", "random_regular"), ("global", "global_tokens"), ("block", "block_causal")):
        assert repr(name) in nearest(part, NAMES)
    assert nearest("xyz", NAMES) == nearest("", NAMES) == nearest("e", NAMES) == nearest("\0" * 10**6, NAMES) == ""
    with pytest.raises(ParseError, match=r"no argument 'befor' \(did you mean 'before'\?\)"):
        parse("band(befor=3)", N)
