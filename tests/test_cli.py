"""The command line: what it prints, what it refuses in one line, and that it starts quickly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import graphattn as ga
from graphattn import cli
from graphattn.checkpoint import MANIFEST, Run

ROOT = Path(__file__).parent.parent
TEXT = "to be, or not to be: that is the question. " * 60
TINY = [
    *("--steps", "6", "--layers", "2", "--heads", "2", "--width", "8", "--block", "8", "--batch", "4"),
    *("--eval-every", "3", "--save-every", "2", "--sample", "9"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "text.txt").write_text(TEXT)
    out = folder / "run"
    assert cli.main(["train", "--text", str(folder / "text.txt"), "--out", str(out), *TINY, "--quiet"]) == 0
    return str(out)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> None:
    """Relative paths of a test are its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)


def shell(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(
        [sys.executable, "-m", "graphattn.cli", *args], capture_output=True, text=True, env=env, encoding="utf-8"
    )


# ---------------------------------------------------------------------- train


def test_train_prints_what_it_does(capsys) -> None:
    graph = "causal & band(4)"
    assert cli.main(["train", "--text", "text.txt", "--graph", graph, *TINY]) == 0
    out, err = capsys.readouterr()
    assert "causal & band(4): Graph(8 <- 8, 30 edges" in out and "run folder: runs/1" in out
    assert "held-out loss " in out and "6/6" in err  # the progress bar
    assert Run.open("runs/1").graphs() == [ga.band(8, 4)]
    assert cli.main(["train", "--text", "text.txt", *TINY, "--quiet"]) == 0 and Path("runs/2", MANIFEST).exists()


def test_stop_and_go_on(capsys) -> None:
    train = ["train", "--text", "text.txt", "--out", "r", *TINY, "--quiet"]
    assert cli.main([*train, "--until", "3"]) == 0
    assert "stopped after step 3; go on with: graphattn train --resume r" in capsys.readouterr().out
    Path("text.txt").unlink()  # the run has all it needs
    assert cli.main(["train", "--resume", "r", "--quiet"]) == 0
    assert Run.open("r").finished
    assert cli.main(["train", "--resume", "r"]) == 0
    assert "r is finished: it has all 6 steps" in capsys.readouterr().out
    assert cli.main(["train", "--resume", "r", "--steps", "8", "--quiet"]) == 0 and Run.open("r").step == 8


def test_precedence_of_preset_file_and_options() -> None:
    Path("c.yaml").write_text(
        "steps: 4\nlr: 1e-3\ngraph: [causal, window(3)]\nblock: 8\nwidth: 8\nheads: 2\nlayers: 2\n"
    )
    Path("c.json").write_text(json.dumps({"graph": "window(2)", "text": ["text.txt"], "block": 8, "steps": 2}))
    tiny = ["--batch", "4", "--sample", "5", "--quiet"]
    assert cli.main(["train", "--text", "text.txt", "--config", "c.yaml", "--out", "a", *tiny]) == 0
    a = Run.open("a").config()
    assert (a.steps, a.lr, a.graph, a.eval_every) == (4, 1e-3, ["causal", "window(3)"], 250)
    more = ["--graph", "full", "--allow-leak", "--steps", "2", "--lr", "3e-3"]
    assert cli.main(["train", "--text", "text.txt", "--config", "c.yaml", "--out", "b", *more, *tiny]) == 0
    b = Run.open("b").config()
    assert (b.steps, b.lr, b.graph, b.allow_leak) == (2, 3e-3, ["full"], True)
    assert cli.main(["train", "--preset", "gpu", "--config", "c.json", "--out", "c", "--heads", "2", "--width", "8",
                     "--dtype", "float32", "--no-compile", "--device", "cpu", *tiny]) == 0  # fmt: skip
    c = Run.open("c").config()
    assert (c.layers, c.dropout, c.compile, c.width, c.graph) == (6, 0.2, False, 8, ["window(2)"])
    # a run's own configuration starts the same run again
    assert cli.main(["train", "--config", "b/config.json", "--out", "d", "--quiet"]) == 0
    assert (
        Path("b", Run.open("b").manifest["roles"]["weights"]).read_bytes()
        == Path("d", Run.open("d").manifest["roles"]["weights"]).read_bytes()
    )


def test_edges_from_a_file_and_one_graph_per_layer() -> None:
    i, j = np.tril_indices(8)
    np.savez("edges.npz", edge_index=np.stack([j, i]))
    graphs = ["--graph", "@edges.npz & window(4)", "--graph", "causal"]
    assert cli.main(["train", "--text", "text.txt", "--out", "r", *graphs, *TINY, "--quiet"]) == 0
    assert Run.open("r").graphs() == [ga.window(8, 4), ga.causal(8)]


# ---------------------------------------------------------------------- sample


def test_sample(run, capsys) -> None:
    def out(*args: str) -> str:
        assert cli.main(["sample", run, *args]) == 0
        return capsys.readouterr().out

    a = out("--prompt", "to be", "--length", "30", "--seed", "1")
    assert a.startswith("to be") and len(a) == 36 and a == out("--prompt", "to be", "--length", "30", "--seed", "1")
    assert a != out("--prompt", "to be", "--length", "30", "--seed", "2")
    greedy = out("--prompt", "to be", "--length", "20", "--temperature", "0")
    assert greedy == out("--prompt", "to be", "--length", "20", "--temperature", "0", "--no-cache")
    assert greedy == out("--prompt", "to be", "--length", "20", "--top-k", "1")
    assert out("--prompt", "to be", "--length", "0") == "to be\n" and len(out("--length", "7")) == 8
    assert out("--length", "9", "--graph", "window(3)", "--block", "6", "--weights", "last", "--top-p", "0.9")
    stop = a[12:15]
    cut = out("--prompt", "to be", "--length", "30", "--seed", "1", "--stop", stop, "--stop", "Ω")
    assert cut == a[: a.index(stop, 5)] + "\n" or stop in a[:8]


def test_recomputation_is_said_on_stderr(capsys) -> None:
    assert (
        cli.main(["train", "--text", "text.txt", "--out", "r", "--graph", "full", "--allow-leak", *TINY, "--quiet"])
        == 0
    )
    capsys.readouterr()
    assert cli.main(["sample", "r", "--length", "4"]) == 0
    assert capsys.readouterr().err.count("computed from its whole context") == 1


# ---------------------------------------------------------------------- draw and audit


def test_draw(run, capsys) -> None:
    assert cli.main(["draw", "--graph", "causal", "--size", "8", "-o", "causal.png"]) == 0
    assert "causal.png: Graph(8 <- 8, 36 edges" in capsys.readouterr().out
    assert Path("causal.png").read_bytes()[:4] == b"\x89PNG"
    assert cli.main(["draw", "--graph", "causal(align=end)", "--size", "2", "--sources", "5", "-o", "r.svg"]) == 0
    assert b"<svg" in Path("r.svg").read_bytes()
    assert cli.main(["draw", "--graph", "causal", "--graph", "full", "--size", "4", "-o", "two.pdf"]) == 0
    assert Path("two-0.pdf").exists() and Path("two-1.pdf").exists()
    assert cli.main(["draw", "--run", run, "-o", "run.png"]) == 0
    assert cli.main(["draw", run, "-o", "run.html"]) == 0
    first = Path(run, "text.txt").read_text(encoding="utf-8")[:3]
    for name in ("attention.png", "attention.html"):
        assert cli.main(["draw", run, "--prompt", first, "-o", name]) == 0
        assert Path(name).stat().st_size > 1000
    assert "over 3 characters" in capsys.readouterr().out


def test_audit(run, capsys) -> None:
    assert cli.main(["audit", "--graph", "causal", "--size", "64", "--layers", "4"]) == 0
    said = capsys.readouterr().out
    assert "no leak: " in said and "after  4 layers" in said and "a target reads 1 to 64 sources" in said
    assert cli.main(["audit", "--graph", "causal", "--graph", "full", "--size", "5"]) == 1
    assert "reads its own label" in capsys.readouterr().out
    assert cli.main(["audit", "--graph", "prefix(16)", "--size", "64", "--loss-from", "16"]) == 0
    assert cli.main(["audit", "--graph", "prefix(16)", "--size", "64"]) == 1
    assert cli.main(["audit", "--run", run, "-o", "audit.png"]) == 0
    assert Path("audit.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("graph", ["causal", "full"])
def test_audit_searches_once(graph: str, monkeypatch, capsys) -> None:
    from graphattn import audit
    from graphattn.audit import find_leak, flow, page

    asked = []

    def once(*args, **options):
        asked.append(options)
        return find_leak(*args, **options)

    for module in (audit, flow, page):
        monkeypatch.setattr(module, "find_leak", once)
    leaks = graph == "full"
    assert cli.main(["audit", "--graph", graph, "--size", "8", "-o", "audit.png"]) == leaks
    out = capsys.readouterr().out
    assert len(asked) == 1 and ("leak: 1 -> 0 in layer 1" in out) == leaks and ("no leak" in out) != leaks


def test_nodes(capsys) -> None:
    assert cli.main(["nodes", "--dataset", "karate", "--seeds", "1", "--epochs", "2", "--out", "nodes"]) == 0
    assert "karate: test accuracy" in capsys.readouterr().out
    assert Path("nodes", "karate-published.json").exists()


# ---------------------------------------------------------------------- every wrong input is one line

WRONG = [
    # (arguments, what the line says, exit code)
    ("foo", "there is no command 'foo'", 2),
    ("train --zzz", "--zzz", 2),
    ("train --steps many", "--steps must be an integer, got many", 2),
    ("train --preset tpu", "tpu", 2),
    ("train --block 0", "--block must be at least 1, got 0", 1),
    ("train --lr -1", "--lr must be above 0", 1),
    ("train --lr nan", "--lr must be a finite number, got nan", 2),
    ("train --dropout 1", "--dropout", 1),
    ("train --text nowhere.txt", "nowhere.txt does not exist", 1),
    ("train --text empty.txt", "empty.txt is empty", 1),
    ("train --text short.txt", "a window of block 64 needs 65", 1),
    ("train --text binary.bin", "binary.bin is not UTF-8", 1),
    ("train --text nul.txt", "nul.txt looks binary", 1),
    ("train --text folder", "folder has no .txt", 1),
    ("train --text text.txt --dataset shakespeare", "--text and --dataset", 1),
    ("train --dataset mars", "no dataset 'mars'", 1),
    ("train --text text.txt --graph full", "reads its own label", 1),
    ("train --text text.txt --graph causal(8)", "never takes the number of targets", 1),
    ("train --text text.txt --graph cusal", "unknown pattern 'cusal'", 1),
    ("train --text text.txt --graph @no.npz", "@no.npz: there is no such file", 1),
    ("train --text text.txt --graph @text.txt", "no .npz file", 1),
    ("train --text text.txt --out folder", "folder holds other files", 1),
    ("train --text text.txt --out text.txt", "is no folder", 1),
    ("train --text text.txt --out text.txt/r", "can't be made", 1),
    ("train --text text.txt --out {run}", "holds a run already", 1),
    ("train --text text.txt --device cuda:77", "cuda:77", 1),
    ("train --text text.txt --backend magic", "magic", 1),
    ("train --text text.txt --loss-from 64", "--loss-from", 1),
    ("train --resume nowhere", "nowhere does not exist", 1),
    ("train --resume folder", "folder holds no run", 1),
    ("train --resume {run} --lr 0.1", "--lr can't be changed", 2),
    ("train --resume {run} --out x", "--out can't be changed", 2),
    ("train --resume {run} --steps 2", "at step 6 already", 1),
    ("train --config nowhere.yaml", "nowhere.yaml does not exist", 2),
    ("train --config bad.yaml", "no YAML", 2),
    ("train --config list.yaml", "holds no options", 2),
    ("train --config unknown.yaml", "no option 'stepz'", 1),
    ("train --config type.yaml", "--steps must be an integer", 1),
    ("train --config python.yaml", "no YAML", 2),
    ("sample", "run", 2),
    ("sample nowhere", "nowhere does not exist", 1),
    ("sample folder", "folder holds no run", 1),
    ("sample text.txt", "is no folder", 1),
    ("sample {run} --prompt toΩ", "character 'Ω' (at 3) is not one of", 1),
    ("sample {run} --temperature -1", "temperature must be at least 0", 1),
    ("sample {run} --temperature nan", "--temperature must be a finite number", 2),
    ("sample {run} --top-k 0", "top_k must be at least 1, got 0", 1),
    ("sample {run} --top-p 2", "top_p", 1),
    ("sample {run} --length -1", "--length", 2),
    ("sample {run} --seed -1", "--seed", 2),
    ("sample {run} --block 99", "trained with block 8", 1),
    ("sample {run} --block 0", "block", 1),
    ("sample {run} --graph causal(8)", "never takes the number of targets", 1),
    ("sample {run} --device mars", "--device", 1),
    ("draw --graph causal -o x.png", "--size", 2),
    ("draw --size 8 -o x.png", "--graph", 2),
    ("draw --graph causal --size 8 -o x.exe", "--out must end in .png, .svg, .pdf, .html, .graphml, .dot", 2),
    ("draw --prompt abc -o x.png", "--prompt needs a run", 2),
    ("draw {run} --prompt abc -o x.dot", "attention weights are drawn as", 2),
    ("draw {run} --prompt \u20ac -o x.png", "--prompt: ", 1),
    ("draw {run} --run {run} -o x.png", "given twice", 2),
    ("audit --graph causal --size 5 -o x.txt", "--out must end in", 2),
    ("nodes --dataset cora --path nowhere.npz", "nowhere.npz", 1),
    ("nodes --recipe fast", "recipe", 1),
    ("nodes --epochs 0", "--epochs", 2),
    ("draw --graph causal --size 8", "out", 2),
    ("draw --graph causal --size -8 -o x.png", "--size must be in", 2),
    ("draw --graph causal --size 99999999999 -o x.png", "--size must be in", 2),
    ("draw --graph causal --size 8 --layout spiral -o x.png", "spiral", 1),
    ("draw --graph causal --size 8 -o no/such/x.png", "can't be written", 1),
    ("draw --run nowhere -o x.png", "does not exist", 1),
    ("draw --run {run} --size 4 -o x.png", "leave out", 2),
    ("bench", "--graph", 2),
    ("bench --graph causal& --size 5", "ends where a pattern", 1),
    ("bench --graph causal --size 5 --heads 0", "--heads", 2),
    ("bench --graph causal --size 5 --dtype int99", "--dtype must be float16", 2),
    ("bench --graph causal --size 4 --backend foo", "--backend must be auto", 2),
    ("bench --graph causal --size 4 --kv-heads 3", "--kv-heads must divide", 2),
    ("audit --graph causal --size 4 --offset 99999999999999999999", "--offset", 2),
    ("audit --graph causal --size 4 --loss-from -5", "--loss-from", 2),
    ("bench --graph causal --size 5 --peer magic", "magic", 1),
    ("audit", "--graph", 2),
    ("audit --graph causal --size 5 --layers 0", "--layers", 2),
    ("audit --graph causal& --size 5", "ends where a pattern", 1),
]


@pytest.mark.parametrize(("line", "says", "code"), WRONG, ids=[w[0] for w in WRONG])
def test_wrong_input_is_one_line(line: str, says: str, code: int, run, capsys) -> None:
    files = {
        "empty.txt": b"", "short.txt": b"to be", "binary.bin": b"\x7fELF\xff\xfe", "nul.txt": b"ab\0",
        "folder/mine.md": b"", "bad.yaml": b"a: [", "list.yaml": b"- 1", "unknown.yaml": b"stepz: 3",
        "type.yaml": b"steps: [3]", "python.yaml": b"steps: !!python/object/apply:os.mkdir [executed]",
    }  # fmt: skip
    for name, raw in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(raw)
    before = {p: p.read_bytes() for p in [*Path().rglob("*"), *Path(run).iterdir()] if p.is_file()}
    assert cli.main([a.replace("{run}", run) for a in line.split(" ")]) == code
    out, err = capsys.readouterr()
    assert says in err and err.startswith("graphattn: ") and err.count("\n") == 1, err
    after = {p: p.read_bytes() for p in [*Path().rglob("*"), *Path(run).iterdir()] if p.is_file()}
    assert before == after  # nothing lost and nothing left behind


def test_a_caret_on_a_terminal(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    cli._fail(_error("causal & bnd(3)"), 1)
    assert capsys.readouterr().err.splitlines()[1:] == ["  causal & bnd(3)", "           ^"]


def _error(text: str) -> Exception:
    try:
        ga.parse(text, 4)
    except ValueError as error:
        return error
    raise AssertionError


def test_damaged_runs_are_named(run, capsys, tmp_path) -> None:
    import shutil

    shutil.copytree(run, "r")
    path = next(Path("r").glob("optimizer-*"))
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 4
    path.write_bytes(raw)
    for command in (["sample", "r"], ["train", "--resume", "r", "--steps", "9"], ["draw", "--run", "r", "-o", "x.png"]):
        assert cli.main(command) == 1
        err = capsys.readouterr().err
        assert path.name in err and "damaged" in err and err.count("\n") == 1


def test_a_full_disk_is_one_line(monkeypatch, capsys) -> None:
    from graphattn import checkpoint

    real, calls = checkpoint.write_atomic, 0

    def full(path: Path, raw: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls > 12:
            raise checkpoint.RunError(f"{path} can't be written: No space left on device")
        real(path, raw)

    monkeypatch.setattr(checkpoint, "write_atomic", full)
    assert cli.main(["train", "--text", "text.txt", "--out", "r", *TINY, "--quiet"]) == 1
    err = capsys.readouterr().err
    assert "No space left on device" in err and err.count("\n") == 1
    assert Run.open("r").step > 0


# ---------------------------------------------------------------------- as a process


def test_processes() -> None:
    """Help, UTF-8 under an ASCII locale, and both signals, in one environment that is not ours."""
    help_ = shell("--help")
    assert help_.returncode == 0 and help_.stderr == "" and "train" in help_.stdout
    assert shell().stdout == help_.stdout and shell("--version").stdout.startswith("graphattn ")
    Path("t.txt").write_bytes("né — “ok” 🙂 ".encode() * 80)
    ascii_ = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    made = shell("train", "--text", "t.txt", "--out", "r", *TINY, **ascii_)
    assert made.returncode == 0 and "Traceback" not in made.stderr
    text = shell("sample", "r", "--length", "60", "--seed", "3", **ascii_).stdout
    assert len(text) == 61 and set(text[:-1]) <= set("né — “ok” 🙂 ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_save_and_say_how_to_go_on(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "graphattn.cli", "train", "--text", "text.txt", "--out", "r", *TINY]
    command[command.index("--steps") + 1] = "1000000"
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    until = time.monotonic() + 120
    while not (Path("r") / MANIFEST).exists() or Run.open("r").step < 2:
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Traceback" not in err
    step = Run.open("r").step
    assert f"stopped after step {step}; go on with: graphattn train --resume r" in out
    assert len((Path("r") / "metrics.jsonl").read_text().splitlines()) == step


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_tells_what_options_do(command: str, monkeypatch, capsys) -> None:
    found = {}

    def look(parser, argv):
        found["parser"] = parser
        raise cli.UsageError("seen")

    monkeypatch.setattr(cli, "_parse", look)
    assert cli.main([command]) == 2
    for action in found["parser"]._actions:
        assert action.help and action.help[0] not in "[(", action.option_strings
    text = " ".join(found["parser"].format_help().split())
    assert "null" not in text and "type: " not in text and "None" not in text
    for default in {"train": ["2000", "0.002", "causal", "yes"], "bench": ["4", "64", "auto"], "nodes": ["0"]}.get(
        command, []
    ):
        assert f"default: {default})" in text


def test_mistyped_names_say_what_was_meant(capsys) -> None:
    for words, says in (
        ("trian", "no command 'trian' (did you mean 'train'?)"),
        ("train --text text.txt --graph cusal", "unknown pattern 'cusal' (did you mean 'causal'?)"),
        ("train --dataset shakespare", "no dataset 'shakespare' (did you mean 'shakespeare'?)"),
    ):
        assert cli.main(words.split()) != 0
        assert says in capsys.readouterr().err


def test_nothing_heavy_is_imported_for_help() -> None:
    code = (
        "import sys; from graphattn import cli; cli.main(['--help']); import graphattn\n"
        "heavy = {'torch', 'jsonargparse', 'matplotlib', 'networkx', 'torch_geometric', 'numpy', 'scipy', 'yaml'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr.strip() == "[]"
