"""Text, vocabulary and windows: exact, UTF-8 everywhere, and every wrong text refused in one line."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
import torch

from graphattn import data
from graphattn.data import Vocabulary, Windows, fetch, mix, read_text

STRANGE = "né — “ok” 🙂\r\nline\u2028two\tæ\n"


def test_default_text_is_the_standard_library() -> None:
    text, source = read_text()
    assert source == "pydoc_data.topics" and len(text) > 100_000 and text == read_text()[0]


def test_files_and_folders_in_a_fixed_order(tmp_path) -> None:
    (tmp_path / "d" / "e").mkdir(parents=True)
    for name, text in {"d/b.txt": "B", "d/a.txt": "A", "d/e/c.txt": "C", "d/z.md": "no", "one": STRANGE}.items():
        (tmp_path / name).write_bytes(text.encode("utf-8"))
    assert read_text([str(tmp_path / "one"), str(tmp_path / "d")])[0] == STRANGE + "ABC"
    (tmp_path / "bom").write_bytes("\ufeffhey".encode())
    assert read_text([str(tmp_path / "bom")])[0] == "hey"


def test_utf8_whatever_the_locale(tmp_path) -> None:
    file = tmp_path / "t.txt"
    file.write_bytes(STRANGE.encode("utf-8"))
    code = (
        "import sys; from graphattn.data import *; t = read_text([sys.argv[1]])[0]; v = Vocabulary.of(t)\n"
        "import hashlib; print(hashlib.sha256(v.decode(v.encode(t)).encode()).hexdigest())"
    )
    environment = os.environ | {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "ascii",
    }
    out = subprocess.run([sys.executable, "-c", code, str(file)], env=environment, capture_output=True, text=True)
    assert out.stdout.strip() == hashlib.sha256(STRANGE.encode()).hexdigest(), out.stderr


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "is empty"),
        (b"ok \xff\xfe", "not UTF-8 text: byte 0xff at offset 3"),
        (b"\x7fELF\0\0\0", "binary: a NUL character at offset 4"),
        ("caf\u00e9".encode("latin-1"), "byte 0xe9 at offset 3"),
        ("hello".encode("utf-16"), "byte 0xff at offset 0"),
    ],
)
def test_wrong_files(tmp_path, raw: bytes, says: str) -> None:
    file = tmp_path / "t.txt"
    file.write_bytes(raw)
    with pytest.raises(ValueError, match=says) as caught:
        read_text([str(file)])
    assert "t.txt" in str(caught.value) and "\n" not in str(caught.value)


def test_missing_and_empty_places(tmp_path) -> None:
    with pytest.raises(ValueError, match="nowhere.txt does not exist"):
        read_text([str(tmp_path / "nowhere.txt")])
    with pytest.raises(ValueError, match="no .txt file"):
        read_text([str(tmp_path)])
    with pytest.raises(ValueError, match="known are shakespeare"):
        read_text(dataset="shakespear")


# ---------------------------------------------------------------------- characters


def test_vocabulary_round_trip() -> None:
    v = Vocabulary.of(STRANGE)
    assert v.characters == "".join(sorted(set(STRANGE)))
    ids = v.encode(STRANGE)
    assert ids.dtype == torch.int64 and v.decode(ids) == STRANGE
    assert v.decode(ids.tolist()) == STRANGE and v.decode([]) == "" and v.encode("").shape == (0,)


def test_unknown_characters_are_named() -> None:
    v = Vocabulary.of("abc")
    with pytest.raises(ValueError, match=r"character 'z' \(at 3\) is not one of the 3 the model knows: 'abc'"):
        v.encode("abz")
    for text in ("é", "\U0010ffff", "\0"):
        with pytest.raises(ValueError, match="not one of the 3"):
            v.encode(text)
    with pytest.raises(ValueError, match="surrogate"):
        v.encode("a\udc80")
    for ids in ([3], [-1], [0, 7]):
        with pytest.raises(ValueError, match=r"ids must be in \[0, 3\)"):
            v.decode(ids)
    for wrong in ("", "ba", "aa"):
        with pytest.raises(ValueError, match="vocabulary"):
            Vocabulary(wrong)
    with pytest.raises(ValueError, match="empty"):
        Vocabulary.of("")


# ---------------------------------------------------------------------- windows


def test_text_shorter_than_a_window() -> None:
    for n in (5, 8):
        with pytest.raises(ValueError, match=f"has {n} characters, a window of block 8 needs 9"):
            Windows.split(torch.arange(n), 8, 0.0)
    w = Windows.split(torch.arange(9), 8, 0.0)
    assert w.starts(1, 0, 50).unique().tolist() == [0]
    x, y = w.batch(torch.tensor([0]))
    assert x.tolist() == [list(range(8))] and y.tolist() == [list(range(1, 9))]
    with pytest.raises(ValueError, match="held-out part has 2 of the text's 20 characters.*needs 9"):
        Windows.split(torch.arange(20), 8, 0.1)
    with pytest.raises(ValueError, match="to train on has 6 characters of the text's 70"):
        Windows.split(torch.arange(70), 8, 0.9)


def test_split_keeps_the_last_tenth() -> None:
    w = Windows.split(torch.arange(1115394), 64, 0.1)
    assert (len(w.train), len(w.held_out)) == (1003854, 111540)
    x, y = w.evaluation()
    assert x.shape == (1742, 64) and int(x[0, 0]) == 1003854 and torch.equal(y[:, :-1], x[:, 1:])
    assert torch.equal(x.flatten(), torch.arange(1003854, 1003854 + 1742 * 64))
    some = w.evaluation(100)[0]
    assert (
        some.shape == (100, 64) and (some[:, 0].diff() > 0).all() and (some[:, 0] - 1003854).remainder(64).eq(0).all()
    )


def test_every_window_is_drawn_and_none_beyond() -> None:
    w = Windows.split(torch.arange(13), 8, 0.0)
    starts = torch.cat([w.starts(3, step, 12) for step in range(50)])
    assert starts.unique().tolist() == [0, 1, 2, 3, 4]


def test_batches_are_keyed_by_seed_and_step() -> None:
    w = Windows.split(torch.arange(5000), 8, 0.0)
    state = torch.get_rng_state()
    first = [w.starts(1337, step, 12) for step in range(10)]
    assert torch.equal(state, torch.get_rng_state())
    again = [w.starts(1337, step, 12) for step in (9, 3, 5)]
    assert all(torch.equal(a, first[i]) for a, i in zip(again, (9, 3, 5), strict=True))
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[0], w.starts(1338, 0, 12))
    # known values: the same on every platform and in every process
    assert mix(1337, "batch", 0) == 3553707468010712514


# ---------------------------------------------------------------------- downloads


def test_offline_says_which_file_to_put_where(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(data.DATASETS, "shakespeare", ("http://127.0.0.1:9/input.txt", "86c4" + "0" * 60, 1_115_394))
    with pytest.raises(ValueError, match="could not be downloaded") as caught:
        fetch("shakespeare")
    message = str(caught.value)
    assert "http://127.0.0.1:9/input.txt" in message and "shakespeare.txt" in message and "\n" not in message


def test_a_file_put_there_by_hand_is_checked(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    digest = hashlib.sha256(b"To be").hexdigest()
    monkeypatch.setitem(data.DATASETS, "shakespeare", ("http://127.0.0.1:9/input.txt", digest, 5))
    with pytest.raises(ValueError, match="at (.*shakespeare.txt), or") as caught:
        fetch("shakespeare")
    import pathlib
    import re

    file = pathlib.Path(re.search(r" at (\S*shakespeare\.txt),", str(caught.value)).group(1))  # type: ignore[union-attr]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"To be")
    assert read_text(dataset="shakespeare") == ("To be", "shakespeare")
    file.write_bytes(b"To Be")
    with pytest.raises(ValueError, match="sha256 is another"):
        fetch("shakespeare")


def test_a_download_is_checked(tmp_path, monkeypatch) -> None:
    import http.server
    import threading

    class Serve(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"To be")

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Serve)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    url = f"http://127.0.0.1:{server.server_port}/input.txt"
    try:
        monkeypatch.setitem(data.DATASETS, "shakespeare", (url, "0" * 64, 5))
        with pytest.raises(ValueError, match="another content arrived"):
            fetch("shakespeare")
        monkeypatch.setitem(data.DATASETS, "shakespeare", (url, hashlib.sha256(b"To be").hexdigest(), 5))
        assert fetch("shakespeare").read_bytes() == b"To be"
    finally:
        server.shutdown()
        server.server_close()
