"""Run folders: whole or not at all, every damage named, nothing executed, nothing allocated on a forged word."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import struct
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

import graphattn as ga
from graphattn import checkpoint
from graphattn.checkpoint import MANIFEST, Run, RunError, read_header, write_atomic
from graphattn.load import load, with_block
from graphattn.train import resume, train

TEXT = "to be, or not to be: that is the question. " * 40
TINY = {
    "steps": 6,
    "layers": 2,
    "heads": 2,
    "width": 8,
    "block": 8,
    "batch": 4,
    "eval_every": 3,
    "save_every": 2,
    "sample": 9,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "finished"
    train(out, text=TEXT, graph=["causal", "window(3)"], **TINY)
    return out


@pytest.fixture
def run(finished, tmp_path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def forge(folder: Path, change) -> None:
    """Change the manifest and make its checksums right again, as one who means harm would."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    change(manifest)
    for name, entry in manifest["files"].items():
        path = folder / name
        if path.is_file() and entry.pop("keep", None) is None:
            raw = path.read_bytes()
            entry |= {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    (folder / MANIFEST).write_bytes(checkpoint._dump_manifest(manifest))


def everything(folder: Path) -> None:
    """Whatever a command reads of a run."""
    load(folder)
    r = Run.open(folder)
    r.tensors("optimizer"), r.metrics(), r.read_json("summary.json")


# ---------------------------------------------------------------------- what a run holds


def test_a_finished_run_is_complete(finished) -> None:
    names = {p.name for p in finished.iterdir()}
    assert names == {
        "manifest.json", "config.json", "vocab.json", "text.txt", "graphs.safetensors", "weights-6.safetensors",
        "optimizer-6.safetensors", "metrics.jsonl", "loss.png", "graph-0.png", "graph-1.png", "sample.txt",
        "summary.json",
    } | {p for p in names if p == f"weights-{Run.open(finished).best['step']}.safetensors"}  # fmt: skip
    r = Run.open(finished)
    assert r.finished and r.step == 6 and set(r.files) == names - {MANIFEST}
    assert r.graphs() == [ga.causal(8), ga.window(8, 3)]
    assert [m["step"] for m in r.metrics()] == [1, 2, 3, 4, 5, 6]
    assert all(("val_loss" in m) == (m["step"] % 3 == 0) for m in r.metrics())
    assert (finished / "loss.png").read_bytes()[:4] == b"\x89PNG" and len(r.read("sample.txt")) == 9
    assert r.config().graph == ["causal", "window(3)"] and r.vocabulary().characters == "".join(sorted(set(TEXT)))
    assert not any(p.read_bytes()[:2] == b"\x80\x04" for p in finished.iterdir())  # no pickle


def test_loading_gives_the_trained_model(finished) -> None:
    loaded = load(finished)
    assert not loaded.model.training and not any(p.is_meta for p in loaded.model.parameters())
    x = loaded.vocabulary.encode("to be, o")[None]
    a = loaded.model(x, loaded.graphs)[0]
    assert torch.equal(a, load(finished, which="best").model(x, loaded.graphs)[0])
    with pytest.raises(ValueError, match="best or last"):
        load(finished, which="first")


def test_graphs_given_in_code_come_back(tmp_path) -> None:
    g = ga.causal(8) - ga.band(8, 3) | ga.self_loops(8)
    heads = ga.stack([g, ga.window(8, 2)], axis="head")
    train(tmp_path / "r", text=TEXT, graphs=[g, heads], **TINY)
    assert load(tmp_path / "r").graphs == [g, heads]
    assert Run.open(tmp_path / "r").config().graph == ["(given in code)"] * 2


@pytest.mark.parametrize("position", ["learned", "relative", "alibi", "rotary", "none"])
def test_another_block(tmp_path, position: str) -> None:
    train(tmp_path / "r", text=TEXT, position=position, **TINY)
    whole, short = load(tmp_path / "r"), load(tmp_path / "r", block=4)
    x = whole.vocabulary.encode("to b")[None]
    assert short.graphs == [ga.causal(4)] and short.model.config.block == 4
    assert torch.equal(short.model(x, short.graphs)[0], whole.model(x, ga.causal(4))[0])
    with pytest.raises(ValueError, match="trained with block 8"):
        load(tmp_path / "r", block=16)
    with pytest.raises(ValueError, match="trained with block 8"):
        with_block(whole.model, 16)


def test_no_compiled_names(finished) -> None:
    names = read_header(finished / "weights-6.safetensors")
    assert "tokens.weight" in names and not any("_orig_mod" in n or "module." in n for n in names)


# ---------------------------------------------------------------------- damage


def refused(folder: Path, name: str) -> str:
    """Reading the run fails within two seconds in one line that names the file."""
    began = time.perf_counter()
    with pytest.raises(RunError) as caught:
        everything(folder)
    message = str(caught.value)
    assert name in message and "\n" not in message, message
    assert time.perf_counter() - began < 2
    return message


def damage_once(folder: Path, rng: random.Random, how: str) -> None:
    path = rng.choice(sorted(folder.iterdir()))
    raw = path.read_bytes()
    if how == "flip":
        at = rng.randrange(len(raw))
        bad = raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1 :]
    else:
        bad = raw[: rng.choice([0, len(raw) // 2, rng.randrange(len(raw))])]
    path.write_bytes(bad)
    try:
        refused(folder, path.name)
    finally:
        path.write_bytes(raw)


def check_damage(folder: Path, flips: int, cuts: int, seed: int = 0) -> None:
    """Random flipped bits and truncations in any file: each refused by name."""
    rng = random.Random(seed)
    for how, count in (("flip", flips), ("cut", cuts)):
        for _ in range(count):
            damage_once(folder, rng, how)
    everything(folder)


def test_flipped_and_cut_files(run) -> None:
    check_damage(run, 60, 40)


def test_missing_files(run) -> None:
    for path in sorted(run.iterdir()):
        aside = path.rename(run.parent / "aside")
        refused(run, path.name)
        aside.rename(path)


class _Boom:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_a_pickle_is_never_read(run, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in sorted(p.name for p in run.iterdir() if p.name != MANIFEST):
        raw = (run / name).read_bytes()
        for bad in (pickle.dumps(_Boom()), pickle.dumps(_Boom(), 0)):
            (run / name).write_bytes(bad)
            refused(run, name)
            if name.endswith((".safetensors", ".json")):  # with right checksums, too
                before = (run / MANIFEST).read_bytes()
                forge(run, lambda m: None)
                refused(run, name)
                (run / MANIFEST).write_bytes(before)
        (run / name).write_bytes(raw)
    import io

    buffer = io.BytesIO()
    torch.save({"tokens.weight": torch.zeros(3)}, buffer)
    (run / "weights-6.safetensors").write_bytes(buffer.getvalue())
    forge(run, lambda m: None)
    refused(run, "weights-6.safetensors")
    assert not (tmp_path / "executed").exists()


def header(entries: dict, data: bytes = b"") -> bytes:
    raw = json.dumps(entries).encode()
    return struct.pack("<Q", len(raw)) + raw + data


BOMBS = {
    "shape without bytes": header({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}),
    "wrong span": header({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 4]}}, b"1234"),
    "overlap": header({k: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for k in "ab"}, b"1234"),
    "negative": header({"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}, b"1234"),
    "many axes": header({"a": {"dtype": "F32", "shape": [1] * 5000, "data_offsets": [0, 4]}}, b"1234"),
    "unknown dtype": header({"a": {"dtype": "O", "shape": [1], "data_offsets": [0, 4]}}, b"1234"),
    "header longer than the file": struct.pack("<Q", 2**62) + b"{}",
    "header of 4 GB": struct.pack("<Q", 2**32) + b"{}",
    "nested": struct.pack("<Q", 100_000) + b"[" * 100_000,
    "no mapping": header([]),  # type: ignore[arg-type]
    "huge numbers": header({"a": {"dtype": "F32", "shape": [10**400], "data_offsets": [0, 10**401]}}),
    "trailing bytes": header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"12345678"),
}


@pytest.mark.parametrize("kind", list(BOMBS))
def test_tensor_bombs(run, kind: str) -> None:
    for role in ("weights-6.safetensors", "optimizer-6.safetensors", "graphs.safetensors"):
        raw, before = (run / role).read_bytes(), (run / MANIFEST).read_bytes()
        (run / role).write_bytes(BOMBS[kind])
        refused(run, role)
        forge(run, lambda m: None)
        refused(run, role)
        (run / role).write_bytes(raw)
        (run / MANIFEST).write_bytes(before)


def test_weights_must_fit_the_configuration(run) -> None:
    path = run / Run.open(run).manifest["roles"]["best"]
    good = Run.open(run).tensors("best")
    for change in (
        {"tokens.weight": torch.zeros(3, 8)},
        {"extra": torch.zeros(1)},
        {"norm.weight": torch.full((8,), float("nan"))},
        {"norm.weight": torch.zeros(8, dtype=torch.int64)},
    ):
        path.write_bytes(save(good | change))
        forge(run, lambda m: None)
        refused(run, path.name)
    path.write_bytes(save({k: v for k, v in good.items() if k != "norm.weight"}))
    forge(run, lambda m: None)
    assert "norm.weight is missing" in refused(run, path.name)
    config = json.loads((run / "config.json").read_bytes())
    for wide in ({"width": 2**16}, {"layers": 1024}, {"block": 2**20}):  # nothing of that size is allocated
        (run / "config.json").write_text(json.dumps(config | wide))
        forge(run, lambda m: None)
        refused(run, "")


def test_configurations_and_vocabularies_are_checked(run) -> None:
    for name, bad in (
        ("config.json", "[]"),
        ("config.json", '{"block": 0}'),
        ("config.json", '{"exec": "rm"}'),
        ("config.json", "[" * 200_000),
        ("config.json", '{"lr": NaN}'),
        ("vocab.json", "{}"),
        ("vocab.json", '{"characters": "ba"}'),
        ("vocab.json", '{"characters": 3}'),
        ("vocab.json", '{"characters": "\\ud800"}'),
    ):
        raw = (run / name).read_bytes()
        (run / name).write_text(bad)
        forge(run, lambda m: None)
        refused(run, name)
        (run / name).write_bytes(raw)


def test_paths_outside_the_folder(run, tmp_path) -> None:
    secret = tmp_path / "secret.safetensors"
    secret.write_bytes(save({"a": torch.zeros(1)}))
    entry = {"bytes": secret.stat().st_size, "sha256": hashlib.sha256(secret.read_bytes()).hexdigest(), "keep": 1}
    before = (run / MANIFEST).read_bytes()
    for name in ("../secret.safetensors", str(secret), "a/b", "..", ".hidden", "", "a\nb", "x" * 200, MANIFEST):

        def point(manifest: dict, name: str = name) -> None:
            manifest["files"][name] = dict(entry)
            manifest["files"][name].pop("keep")
            manifest["roles"]["weights"] = name

        manifest = json.loads(before)
        point(manifest)
        (run / MANIFEST).write_bytes(checkpoint._dump_manifest(manifest))
        assert "leads outside the run" in refused(run, MANIFEST)
    (run / MANIFEST).write_bytes(before)
    weights = run / "optimizer-6.safetensors"
    raw = weights.read_bytes()
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    assert "no plain file" in refused(run, weights.name)
    weights.unlink()
    weights.mkdir()
    assert "no plain file" in refused(run, weights.name)
    weights.rmdir()
    os.mkfifo(weights)
    assert "no plain file" in refused(run, weights.name)
    weights.unlink()
    weights.write_bytes(raw)
    everything(run)
    (run / MANIFEST).rename(tmp_path / "m")
    (run / MANIFEST).symlink_to(tmp_path / "m")
    refused(run, MANIFEST)


def test_a_wrong_manifest(run) -> None:
    before = (run / MANIFEST).read_bytes()
    for bad in (b"", b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b"9" * 10_000, before + b" ", before[:-1]):
        (run / MANIFEST).write_bytes(bad)
        refused(run, MANIFEST)
    for key, value in (
        ("step", -1), ("step", True), ("step", 10**400), ("finished", 1), ("best", {"step": 1}), ("roles", []),
        ("files", []), ("files", {}), ("roles", {"weights": "nothing"}), ("roles", {"x": "text.txt"}), ("steps", -1),
        ("best", {"step": 1, "val_loss": float("nan")}), ("more", 1),
    ):  # fmt: skip
        manifest = json.loads(before) | {key: value}
        (run / MANIFEST).write_bytes(checkpoint._dump_manifest(manifest))
        refused(run, MANIFEST)
    with (run / MANIFEST).open("wb") as stream:
        stream.truncate(2**40)  # a terabyte, sparse
    refused(run, MANIFEST)


def test_sizes_are_capped_before_reading(run, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint, "_MAX_TENSORS", 100)
    assert "at most 100 are read" in refused(run, "")


def test_missing_runs(tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name, says in (("none", "does not exist"), ("empty", "holds no run"), ("file", "is no folder")):
        with pytest.raises(RunError, match=says):
            load(tmp_path / name)


# ---------------------------------------------------------------------- writing


def test_atomic_write_keeps_the_old_file(tmp_path, monkeypatch) -> None:
    path = tmp_path / "x"
    write_atomic(path, b"old")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(RunError, match="x can't be written: No space left"):
                write_atomic(path, b"new")
        assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_failed_save_leaves_the_last_checkpoint(tmp_path, monkeypatch) -> None:
    """At every single write of a save, the disk fills up."""
    weights = {"w": torch.arange(4.0)}
    real = checkpoint.write_atomic
    for fail_at in range(3):
        with Run.create(tmp_path / f"r{fail_at}") as r:
            for name in ("config.json", "vocab.json"):
                r.put_json(name, {})
            r.put_graphs([ga.causal(3)])
            r.save(0, weights, {})
            r.save(1, {"w": torch.ones(4)}, {"m": torch.ones(4)}, {"step": 1, "val_loss": 2.0})
            r.log({"step": 2})
            before = (r.folder / MANIFEST).read_bytes()
            calls = 0

            def sometimes(path: Path, raw: bytes, fail_at: int = fail_at) -> None:
                nonlocal calls
                calls += 1
                if calls == fail_at + 1:
                    raise RunError(f"{path} can't be written: No space left on device")
                real(path, raw)

            with monkeypatch.context() as patch:
                patch.setattr(checkpoint, "write_atomic", sometimes)
                with pytest.raises(RunError, match="No space left"):
                    r.save(2, {"w": torch.zeros(4)}, {"m": torch.zeros(4)}, {"step": 2, "val_loss": 1.0})
            assert (r.folder / MANIFEST).read_bytes() == before
            again = Run.open(r.folder)
            assert again.step == 1 and again.best == {"step": 1, "val_loss": 2.0}
            assert torch.equal(again.tensors("weights")["w"], torch.ones(4))
            assert not [p.name for p in r.folder.iterdir() if "-2" in p.name or p.suffix == ".tmp"]
            r.save(2, weights, {})
            assert Run.open(r.folder).step == 2


def test_best_weights_are_kept_until_better_ones(tmp_path) -> None:
    with Run.create(tmp_path / "r") as r:
        for name in ("config.json", "vocab.json"):
            r.put_json(name, {})
        r.put_graphs([ga.causal(3)])
        for step, loss in ((1, 2.0), (2, None), (3, 1.5), (4, None), (5, None)):
            best = None if loss is None else {"step": step, "val_loss": loss}
            r.save(step, {"w": torch.tensor([float(step)])}, {}, best)
            again = Run.open(r.folder)
            wanted = 1 if step < 3 else 3
            assert float(again.tensors("best")["w"]) == wanted == again.best["step"]  # type: ignore[index]
            assert float(again.tensors("weights")["w"]) == step
            kept = sorted(p.name for p in r.folder.glob("weights-*"))
            assert kept == sorted({f"weights-{wanted}.safetensors", f"weights-{step}.safetensors"})


def test_one_writer_at_a_time(run) -> None:
    with Run.open(run, write=True):
        with pytest.raises(RunError, match="in use by another process"):
            Run.open(run, write=True)
        Run.open(run)  # reading goes on
    Run.open(run, write=True).close()


def test_leftovers_are_removed_and_foreign_files_stay(run) -> None:
    for name in ("weights-99.safetensors", "optimizer-7.safetensors.tmp", "manifest.json.tmp", "config.json.tmp"):
        (run / name).write_bytes(b"half")
    (run / "notes.md").write_text("mine")
    Run.open(run)
    assert (run / "weights-99.safetensors").exists()  # reading changes nothing
    Run.open(run, write=True).close()
    names = {p.name for p in run.iterdir()}
    assert names == set(Run.open(run).files) | {MANIFEST, "notes.md"}


def test_folders_that_are_taken(run, tmp_path) -> None:
    with pytest.raises(RunError, match="holds a run already.*--resume"):
        Run.create(run)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(RunError, match=r"holds other files \(thesis.tex\)"):
        Run.create(tmp_path / "mine")
    with pytest.raises(RunError, match="is no folder"):
        Run.create(tmp_path / "mine" / "thesis.tex")
    with pytest.raises(RunError, match="can't be made"):
        Run.create(tmp_path / "mine" / "thesis.tex" / "x")
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "x"
    # what a dead process left before its first checkpoint is no obstacle
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text("{")
    (tmp_path / "half" / "metrics.jsonl").write_text("{")
    train(tmp_path / "half", text=TEXT, **TINY)
    everything(tmp_path / "half")


def test_writes_that_the_system_refuses(tmp_path) -> None:
    """A file-size limit stands for a full disk: no privileges needed, and the errors are the kernel's."""
    import resource

    train(tmp_path / "r", text=TEXT, until=3, **TINY)
    before = {p.name: p.read_bytes() for p in (tmp_path / "r").iterdir() if p.name != "metrics.jsonl"}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (100, 400, 2000, 4000):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            with pytest.raises(RunError, match="can't be written: File too large"):
                resume(tmp_path / "r")
            with pytest.raises(RunError, match="can't be written: File too large"):
                train(tmp_path / "new", text=TEXT, **TINY)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert {p.name: p.read_bytes() for p in (tmp_path / "r").iterdir() if p.name != "metrics.jsonl"} == before
        load(tmp_path / "r")
        assert not (tmp_path / "new").exists()
    assert resume(tmp_path / "r").finished
