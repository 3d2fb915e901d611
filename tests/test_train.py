"""Training: what a step is, which graphs are refused, and that stopping anywhere changes nothing."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import graphattn as ga
from graphattn import distributed
from graphattn.checkpoint import MANIFEST, Run, RunError
from graphattn.config import PRESETS, TrainConfig, model_config
from graphattn.data import Vocabulary, Windows
from graphattn.gpt import GPT, cycle
from graphattn.load import load
from graphattn.train import (
    LeakError,
    TrainError,
    _Signals,
    _Trainer,
    float32_products,
    learning_rate,
    make_optimizer,
    refuse_dtype,
    resume,
    sent,
    train,
)

TEXT = "to be, or not to be: that is the question. " * 60
TINY: dict = {
    "steps": 12, "layers": 2, "heads": 2, "width": 8, "block": 8, "batch": 4,
    "eval_every": 4, "save_every": 3, "sample": 9, "warmup": 3,
}  # fmt: skip
ROOT = Path(__file__).parent.parent


def bytes_of(folder: Path) -> dict[str, bytes]:
    """What must not depend on whether a run was stopped: everything but the seconds it took."""
    out = {p.name: p.read_bytes() for p in folder.iterdir()}
    for name in ("summary.json", MANIFEST):
        out.pop(name, None)
    return {k: v for k, v in out.items() if not k.endswith(".png")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    train(out, text=TEXT, **TINY, dropout=0.2)
    return out


# ---------------------------------------------------------------------- a step


def test_learning_rate() -> None:
    c = TrainConfig(steps=2000, warmup=100, lr=1e-3, min_lr=1e-4)
    rates = [learning_rate(c, s) for s in range(2001)]
    assert rates[0] == pytest.approx(1e-3 / 101) and rates[99] == pytest.approx(1e-3 * 100 / 101)
    assert rates[100] == 1e-3 and rates[1050] == pytest.approx(5.5e-4) and rates[2000] == pytest.approx(1e-4)
    assert all(a >= b for a, b in zip(rates[100:], rates[101:], strict=False))
    c.schedule = "constant"
    assert {learning_rate(c, s) for s in range(100, 2000)} == {1e-3}
    assert learning_rate(TrainConfig(steps=5, warmup=9), 7) < TrainConfig().lr


def test_decay_groups() -> None:
    config = TrainConfig(bias=True, qk_norm=True, position="relative")
    model = GPT(model_config(config, 5))
    groups = make_optimizer(model, config).param_groups
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert all(p.dim() >= 2 for p in groups[0]["params"]) and all(p.dim() < 2 for p in groups[1]["params"])
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))


def test_one_step_is_adamw_on_the_named_batch(tmp_path) -> None:
    train(tmp_path / "r", text=TEXT, **TINY | {"steps": 1, "warmup": 0, "clip": 0.0})
    got = Run.open(tmp_path / "r").tensors("weights")
    config = TrainConfig(**TINY)
    vocabulary = Vocabulary.of(TEXT)
    windows = Windows.split(vocabulary.encode(TEXT), 8, 0.1)
    from graphattn.data import mix

    model = GPT(model_config(config, len(vocabulary)))
    model.reset_parameters(torch.Generator().manual_seed(mix(1337, "weights")))
    x, y = windows.batch(windows.starts(1337, 0, 4))
    model(x, ga.causal(8), y)[1].backward()
    optimizer = torch.optim.AdamW(
        [{"params": [p], "weight_decay": 0.1 * (p.dim() > 1)} for p in model.parameters()],
        lr=config.lr,
        betas=(0.9, 0.99),
    )
    optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], p.detach(), rtol=1e-6, atol=1e-7)


def test_clipping_bounds_the_step(tmp_path) -> None:
    for clip, name in ((1e-3, "a"), (0.0, "b")):
        train(tmp_path / name, text=TEXT, **TINY | {"steps": 2, "clip": clip})
    a, b = (Run.open(tmp_path / n).metrics() for n in "ab")
    assert a[0]["grad_norm"] == b[0]["grad_norm"] > 1e-3 and a[1]["loss"] != b[1]["loss"]


def test_accumulation_changes_nothing_but_memory(tmp_path) -> None:
    for n in (1, 2, 4):
        train(tmp_path / str(n), text=TEXT, accumulate=n, **TINY)
    losses = [[m["loss"] for m in Run.open(tmp_path / str(n)).metrics()] for n in (1, 2, 4)]
    for other in losses[1:]:
        assert max(abs(a - b) for a, b in zip(losses[0], other, strict=True)) < 1e-5


def test_evaluation_is_the_mean_over_all_held_out_windows(whole) -> None:
    from graphattn.load import load

    loaded = load(whole, which="last")
    windows = Windows.split(loaded.vocabulary.encode(TEXT), 8, 0.1)
    x, y = windows.evaluation()
    with torch.no_grad():
        expected = float(loaded.model.double()(x, ga.causal(8), y)[1])
    summary = Run.open(whole).read_json("summary.json")
    assert abs(summary["val_loss"] - expected) < 1e-6


def test_it_learns(tmp_path) -> None:
    result = train(
        tmp_path / "r", text=TEXT, **TINY | {"steps": 150, "width": 32, "batch": 8, "lr": 5e-3, "save_every": 150}
    )
    records = Run.open(result.folder).metrics()
    assert records[0]["loss"] > 2.5 and records[-1]["loss"] < 0.8 and result.val_loss < 0.8  # type: ignore[operator]


def test_metrics_are_deterministic_and_complete(whole) -> None:
    records = Run.open(whole).metrics()
    assert [r["step"] for r in records] == list(range(1, 13))
    assert all({"step", "loss", "lr", "grad_norm"} <= set(r) for r in records)
    assert [r["step"] for r in records if "val_loss" in r] == [4, 8, 12]
    best = Run.open(whole).best
    assert best["val_loss"] == min(r["val_loss"] for r in records if "val_loss" in r)  # type: ignore[index]


def test_random_state_of_the_caller_is_kept(tmp_path) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    train(tmp_path / "r", text=TEXT, dropout=0.3, **TINY)
    assert torch.equal(state, torch.get_rng_state())


def test_hash_seed_does_not_matter(tmp_path, whole) -> None:
    code = (
        "import sys, json; from graphattn.train import train\n"
        "train(sys.argv[1], text=sys.argv[2], dropout=0.2, **json.loads(sys.argv[3]))"
    )
    for n in ("12345",):
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / n), TEXT, json.dumps(TINY)],
            env=os.environ | {"PYTHONHASHSEED": n, "LC_ALL": "C"}, check=True, cwd=ROOT,
        )  # fmt: skip
        a, b = bytes_of(tmp_path / n), bytes_of(whole)
        assert a == b


# ---------------------------------------------------------------------- graphs


def test_a_leaking_graph_is_refused_with_the_path(tmp_path) -> None:
    for graph, says in (
        (["full"], r"\d+ -> \d+ in layer 1: target \d+ reads its own label"),
        (["causal", "band(2, 1)"], "in layer 2"),
        (["prefix(4)"], "reads its own label"),
    ):
        with pytest.raises(LeakError, match=says) as caught:
            train(tmp_path / "r", text=TEXT, **TINY, graph=graph)
        assert "--allow-leak" in str(caught.value) and not (tmp_path / "r").exists()
    assert train(tmp_path / "r", text=TEXT, **TINY, graph=["full"], allow_leak=True).finished


def test_loss_from_makes_a_prefix_trainable(tmp_path) -> None:
    with pytest.raises(LeakError):
        train(tmp_path / "r", text=TEXT, **TINY, graph=["prefix(4)"], loss_from=2)
    result = train(tmp_path / "r", text=TEXT, **TINY, graph=["prefix(4)"], loss_from=4)
    from graphattn.load import load

    loaded = load(result.folder, which="last")
    x, y = Windows.split(loaded.vocabulary.encode(TEXT), 8, 0.1).evaluation()
    y = y.clone()
    y[:, :4] = -1
    with torch.no_grad():
        expected = float(loaded.model(x, ga.prefix(8, 4), y)[1])
    assert result.val_loss == pytest.approx(expected, abs=1e-5)


def test_any_graph_trains_and_backends_agree(tmp_path) -> None:
    keep = torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    holes = ga.from_mask(keep.tril() | torch.eye(8, dtype=torch.bool))
    for graph in (ga.causal(8), holes):
        losses = {}
        for backend in ("sdpa", "edges", "csr"):
            out = tmp_path / f"{backend}{graph.num_edges}"
            train(out, text=TEXT, graphs=graph, backend=backend, **TINY)
            losses[backend] = [m["loss"] for m in Run.open(out).metrics()]
        for other in ("edges", "csr"):
            assert max(abs(a - b) for a, b in zip(losses["sdpa"], losses[other], strict=True)) < 1e-4


def test_wrong_graphs(tmp_path) -> None:
    for graphs, says in (
        (ga.causal(7), "must be 8 <- 8"),
        ([ga.causal(8)] * 3, "at most one per layer, 2"),
        ([], "at most one per layer"),
        (ga.stack([ga.causal(8)] * 4, axis="batch"), "not between windows"),
        (ga.stack([ga.causal(8)] * 3, axis="head"), "between the 2 heads"),
    ):
        with pytest.raises(ValueError, match=says):
            train(tmp_path / "r", text=TEXT, graphs=graphs, **TINY)
    with pytest.raises(ValueError, match="unknown pattern"):
        train(tmp_path / "r", text=TEXT, graph=["cusal"], **TINY)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"block": 0}, "--block must be at least 1, got 0"),
        ({"layers": 0}, "--layers"),
        ({"width": 9}, "--width must be a multiple of heads, 2, got 9"),
        ({"kv_heads": 3}, "--kv-heads must be a divisor"),
        ({"lr": 0.0}, "--lr must be above 0"),
        ({"lr": math.nan}, "--lr must be finite"),
        ({"lr": "fast"}, "--lr must be a number, got 'fast'"),
        ({"steps": 2.5}, "--steps must be an integer"),
        ({"steps": -1}, "--steps"),
        ({"steps": True}, "--steps must be an integer"),
        ({"dropout": 1.0}, "--dropout must be in"),
        ({"holdout": 0.95}, "--holdout"),
        ({"seed": -1}, "--seed"),
        ({"loss_from": 8}, "--loss-from must be below block, 8"),
        ({"position": "sin"}, "--position must be one of"),
        ({"schedule": "step"}, "--schedule"),
        ({"dtype": "int8"}, "--dtype"),
        ({"device": "tpu"}, "--device must be"),
        ({"device": "cuda:99"}, "--device"),
        ({"accumulate": 3}, "--batch must be a multiple of accumulate, 3"),
        ({"graph": []}, "--graph"),
        ({"graph": ["causal"] * 3}, "--graph must be at most one per layer"),
        ({"backend": "magic"}, "backend must be"),
        ({"block": 4000}, "window of block 4000 needs 4001"),
        ({"width": 2**16, "layers": 1024}, "need at least [0-9,]+ GiB"),
        ({"batch": 2**20, "width": 2**12}, "or --accumulate more"),
        ({"position": "rotary", "width": 6, "heads": 2}, "even number of features"),
    ],
)
def test_wrong_options_write_nothing(tmp_path, change: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        train(tmp_path / "r", text=TEXT, **TINY | change)
    assert "\n" not in str(caught.value) and not (tmp_path / "r").exists()


def test_presets_are_configurations() -> None:
    cpu, gpu = (TrainConfig(**PRESETS[n]).check() for n in ("cpu", "gpu"))
    assert (cpu.layers, cpu.heads, cpu.width, cpu.block, cpu.batch, cpu.steps) == (4, 4, 128, 64, 12, 2000)
    assert (gpu.layers, gpu.heads, gpu.width, gpu.block, gpu.batch, gpu.steps) == (6, 6, 384, 256, 64, 5000)
    assert gpu.dropout == 0.2 and TrainConfig.from_dict(gpu.as_dict()) == gpu


def test_the_preset_for_a_gpu_says_what_is_missing(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device cuda: no CUDA device, .*: give --device cpu"):
        train(tmp_path / "r", text=TEXT, **PRESETS["gpu"])
    assert not (tmp_path / "r").exists()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    config = TrainConfig(**PRESETS["gpu"])
    with pytest.raises(ValueError, match="--dtype bfloat16 needs .* Tesla T4 has 7.5: give --dtype float32"):
        refuse_dtype(config, torch.device("cuda", 0))
    refuse_dtype(config.replace(dtype="float32"), torch.device("cuda", 0))


def test_the_recipe_and_the_lectures_rate_are_both_options() -> None:
    recipe = TrainConfig(**PRESETS["gpu"])
    rates = [learning_rate(recipe, s) for s in range(recipe.steps + 1)]
    assert max(rates) == rates[recipe.warmup] == 1e-3 and rates[0] < 1e-4 and abs(rates[-1] - 1e-4) < 1e-9
    lecture = recipe.replace(schedule="constant", lr=3e-4, warmup=0)
    assert {learning_rate(lecture, s) for s in range(recipe.steps)} == {3e-4}


def test_batches_reach_a_gpu_from_pinned_memory(monkeypatch) -> None:
    said = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: said.append("pin") or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, **how: said.append((device, how)) or self)
    x = torch.zeros(3)
    sent(x, torch.device("cpu"))
    sent(x, torch.device("cuda", 1))
    assert said == [(torch.device("cpu"), {}), "pin", (torch.device("cuda", 1), {"non_blocking": True})]


@pytest.mark.parametrize("before", ["highest", "high"])
@pytest.mark.parametrize("tf32", [False, True])
def test_a_run_decides_about_tf32_and_leaves_it_as_it_was(before: str, tf32: bool) -> None:
    usual = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(before)
        for device in ("cpu", "cuda"):
            with pytest.raises(KeyError), float32_products(torch.device(device), tf32):
                inside = "high" if tf32 else "highest"
                assert torch.get_float32_matmul_precision() == (before if device == "cpu" else inside)
                raise KeyError
            assert torch.get_float32_matmul_precision() == before
    finally:
        torch.set_float32_matmul_precision(usual)


def test_processes_share_no_gpu(monkeypatch) -> None:
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    with distributed.World.join("cuda:1") as world:  # alone: kernels must start where the tensors are
        assert world.device == torch.device("cuda", 1) and taken == [world.device]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with (
        pytest.raises(ValueError, match="--device cuda:1 is one GPU for 2 processes"),
        distributed.World.join("cuda:1"),
    ):
        raise AssertionError
    groups = []
    monkeypatch.setattr(torch.distributed, "init_process_group", groups.append)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: groups.append("left"))
    for device in ("auto", "cuda"):
        with distributed.World.join(device) as world:
            assert (world.rank, world.size, world.device) == (1, 2, torch.device("cuda", 1))
    assert groups == ["nccl", "left"] * 2


def test_every_kind_of_model_trains(tmp_path) -> None:
    for n, change in enumerate(
        (
            {"position": "rotary", "kv_heads": 1},
            {"position": "alibi", "softcap": 5.0},
            {"position": "relative", "qk_norm": True, "bias": True},
            {"position": "none", "tie": False, "schedule": "constant"},
            {"dtype": "bfloat16", "dropout": 0.1},
            {"dtype": "float64"},
            {"holdout": 0.0},
            {"steps": 0},
        )
    ):
        out = tmp_path / str(n)
        result = train(out, text=TEXT, **TINY | change)
        assert result.finished and (result.val_loss is None) == (change.get("holdout") == 0.0)
        assert all(math.isfinite(m["loss"]) for m in Run.open(out).metrics())


# ---------------------------------------------------------------------- stopping and going on


def test_resumed_anywhere_is_the_same_to_the_bit(tmp_path, whole) -> None:
    for stops in ([5], [1, 2, 7], [4], [11], [3, 6, 9]):
        out = tmp_path / "-".join(map(str, stops))
        result = train(out, text=TEXT, until=stops[0], **TINY, dropout=0.2)
        assert not result.finished and result.step == stops[0]
        for stop in stops[1:]:
            assert resume(out, until=stop).step == stop
        assert resume(out).finished
        assert bytes_of(out) == bytes_of(whole)
        assert (
            json.loads((out / "summary.json").read_text())["val_loss"]
            == Run.open(whole).read_json("summary.json")["val_loss"]
        )


def test_killed_after_a_step_that_was_not_saved(tmp_path, whole, monkeypatch) -> None:
    """The process ends between checkpoints: steps are repeated, and logged once."""

    class Dead(BaseException):
        pass

    step = _Trainer._one_step

    def mortal(self, model, out):
        if self.step == 8:
            raise Dead
        return step(self, model, out)

    with monkeypatch.context() as patch:
        patch.setattr(_Trainer, "_one_step", mortal)
        with pytest.raises(Dead):
            train(tmp_path / "r", text=TEXT, **TINY, dropout=0.2)
    assert Run.open(tmp_path / "r").step == 8 or Run.open(tmp_path / "r").step == 6
    assert len((tmp_path / "r" / "metrics.jsonl").read_bytes().splitlines()) == 8
    resume(tmp_path / "r")
    assert bytes_of(tmp_path / "r") == bytes_of(whole)


def test_more_steps_for_a_finished_run(tmp_path, whole) -> None:
    train(tmp_path / "r", text=TEXT, schedule="constant", **TINY)
    assert Run.open(tmp_path / "r").manifest["steps"] == 12
    assert resume(tmp_path / "r").step == 12  # nothing to do
    with pytest.raises(TrainError, match="step 12 already"):
        resume(tmp_path / "r", steps=5)
    result = resume(tmp_path / "r", steps=20)
    assert result.finished and result.step == 20 and Run.open(tmp_path / "r").config().steps == 20
    assert Run.open(tmp_path / "r").manifest["steps"] == 20
    train(tmp_path / "straight", text=TEXT, schedule="constant", **TINY | {"steps": 20})
    a, b = bytes_of(tmp_path / "r"), bytes_of(tmp_path / "straight")
    a.pop("config.json"), b.pop("config.json")
    assert a == b


def test_a_text_that_was_too_long_to_copy_must_be_the_same(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["graphattn.train"], "MAX_COPY", 10)
    file = tmp_path / "t.txt"
    file.write_text(TEXT)
    train(tmp_path / "r", text=None, until=3, **TINY, config=TrainConfig(text=[str(file)]))
    assert "text.txt" not in Run.open(tmp_path / "r").files
    file.write_text(TEXT + "!")
    with pytest.raises(TrainError, match="sha256 is another"):
        resume(tmp_path / "r")
    file.write_text(TEXT)
    assert resume(tmp_path / "r").finished


def test_a_loss_that_is_not_finite_stops_and_is_not_saved(tmp_path, monkeypatch) -> None:
    real = _Trainer.loss

    def poisoned(self, model, inputs, targets):
        loss = real(self, model, inputs, targets)
        return loss * math.nan if self.step == 7 and model.training else loss

    with monkeypatch.context() as patch:
        patch.setattr(_Trainer, "loss", poisoned)
        with pytest.raises(TrainError, match="the loss is nan in step 8: stopped and not saved"):
            train(tmp_path / "r", text=TEXT, **TINY)
    r = Run.open(tmp_path / "r")
    assert r.step in (4, 6) and all(bool(torch.isfinite(w).all()) for w in r.tensors("weights").values())
    assert resume(tmp_path / "r").finished


def test_weights_that_are_not_finite_are_not_saved(tmp_path, monkeypatch) -> None:
    step = _Trainer._one_step

    def overflow(self, model, out):
        record = step(self, model, out)
        if self.step == 6:
            self.model.norm.weight.data[0] = math.inf
        return record

    with monkeypatch.context() as patch:
        patch.setattr(_Trainer, "_one_step", overflow)
        with pytest.raises(TrainError, match="a weight is not finite after step 6: stopped"):
            train(tmp_path / "r", text=TEXT, **TINY)
    assert Run.open(tmp_path / "r").step == 4
    assert resume(tmp_path / "r").finished


def test_best_is_never_replaced_by_worse(tmp_path, monkeypatch) -> None:
    values = iter([3.0, 2.0, 2.5, 1.9, 1.8])
    monkeypatch.setattr(_Trainer, "evaluate", lambda self, most=0: next(values))
    train(tmp_path / "r", text=TEXT, **TINY)
    r = Run.open(tmp_path / "r")
    assert r.best == {"step": 8, "val_loss": 2.0}
    assert r.manifest["roles"]["best"] == "weights-8.safetensors"
    summary = r.read_json("summary.json")
    assert summary["val_loss"] == 1.9 and summary["best"] == {"step": 8, "val_loss": 2.0, "all_windows": 1.8}


def test_signals_finish_the_step(tmp_path, monkeypatch, whole) -> None:
    step = _Trainer._one_step
    for number in (signal.SIGINT, signal.SIGTERM):
        out = tmp_path / str(number)

        def interrupted(self, model, folder, number=number):
            record = step(self, model, folder)
            if self.step == 5:
                os.kill(os.getpid(), number)
            return record

        before = signal.getsignal(number)
        with monkeypatch.context() as patch:
            patch.setattr(_Trainer, "_one_step", interrupted)
            result = train(out, text=TEXT, **TINY, dropout=0.2)
        assert result.stopped_by == number and result.step == 5 and not result.finished
        assert signal.getsignal(number) == before
        assert Run.open(out).step == 5
        resume(out)
        assert bytes_of(out) == bytes_of(whole)


def test_second_ctrl_c_stops_at_once() -> None:
    with _Signals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)


def test_refusals_of_resume(tmp_path, whole) -> None:
    with pytest.raises(RunError, match="does not exist"):
        resume(tmp_path / "none")
    with pytest.raises(RunError, match="holds a run already"):
        train(whole, text=TEXT, **TINY)
    with Run.open(whole, write=True), pytest.raises(RunError, match="in use"):
        resume(whole, steps=20)


KILLED = """
import os, random, signal, sys, threading, time, json
from graphattn.train import resume, train
out, after, number, text, options = sys.argv[1:]
def die():
    time.sleep(float(after))
    os.kill(os.getpid(), int(number))
threading.Thread(target=die, daemon=True).start()
if os.path.exists(out + "/manifest.json"):
    result = resume(out)
else:
    result = train(out, text=text, dropout=0.2, **json.loads(options))
sys.exit(0 if result.finished else 9)
"""


def test_killed_processes_lose_nothing(tmp_path) -> None:
    """A short version of benchmarks/resilience.py: real signals to real processes."""
    options = TINY | {"steps": 150}
    train(tmp_path / "whole", text=TEXT, dropout=0.2, **options)
    out = tmp_path / "killed"
    for attempt in range(40):
        number = (signal.SIGKILL, signal.SIGTERM)[attempt % 2]
        after = 0.12 * (attempt + 1) if attempt < 4 else 100
        command = [sys.executable, "-c", KILLED, str(out), str(after), str(int(number)), TEXT, json.dumps(options)]
        code = subprocess.run(command, cwd=ROOT, stderr=subprocess.DEVNULL).returncode
        assert code in (0, 9, -number), code
        if (out / MANIFEST).exists():
            Run.open(out)  # readable whenever it died
        if code == 0:
            break
    assert bytes_of(out) == bytes_of(tmp_path / "whole")
    assert {p.name for p in out.iterdir()} == set(Run.open(out).files) | {MANIFEST}


@pytest.mark.parametrize("at", range(26))
def test_a_run_is_readable_while_another_process_moves_it_on(tmp_path, whole, monkeypatch, at: int) -> None:
    """Whichever file a reader is about to open when the next checkpoint replaces it."""
    shutil.copytree(whole, tmp_path / "run")
    writer = Run.open(tmp_path / "run", write=True)
    real, opened, moved = Path.open, [], []

    def opening(path: Path, *args, **options):
        opened.append(path)
        if len(opened) == at + 1:
            monkeypatch.setattr(Path, "open", real)
            step = writer.step + 1
            best = {"step": step, "val_loss": 1.0}
            writer.save(step, writer.tensors("weights"), writer.tensors("optimizer"), best)
            moved.append(writer.step)
            monkeypatch.setattr(Path, "open", opening)
        return real(path, *args, **options)

    monkeypatch.setattr(Path, "open", opening)
    step = load(tmp_path / "run").step
    monkeypatch.undo()
    writer.close()
    assert step in (*moved, Run.open(whole).best["step"])
    assert bool(moved) == (len(opened) > at)


# ---------------------------------------------------------------------- several processes

WORKER = """
import json, pathlib, sys
from graphattn.train import train
train(sys.argv[1], text=sys.argv[2], **json.loads(sys.argv[3]))
tasks = pathlib.Path("/proc/self/task")
names = [(t / "comm").read_text() for t in tasks.iterdir()] if tasks.exists() else []
# one left would abort a process that ends while it lets go of a tensor
sys.exit(3 if any("gloo" in name for name in names) else 0)
"""


def spawn(out: Path, options: dict, code: str = WORKER) -> list[int]:
    """Two processes on loopback, in the environment torchrun gives them."""
    with contextlib.closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    base = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(out), TEXT, json.dumps(options)],
            env=base | {"RANK": str(r), "LOCAL_RANK": str(r), "GLOO_SOCKET_IFNAME": "lo"}, cwd=ROOT,
        )
        for r in range(2)
    ]  # fmt: skip
    return [p.wait(timeout=300) for p in running]


def test_two_processes_train_as_one(tmp_path) -> None:
    options = TINY | {"steps": 50, "save_every": 50, "eval_every": 10}
    assert spawn(tmp_path / "two", options) == [0, 0]
    train(tmp_path / "one", text=TEXT, **options)
    one, two = Run.open(tmp_path / "one").metrics(), Run.open(tmp_path / "two").metrics()
    assert len(two) == 50
    for a, b in zip(one, two, strict=True):
        assert abs(a["loss"] - b["loss"]) < 1e-5 and abs(a.get("val_loss", 0) - b.get("val_loss", 0)) < 1e-5
    # and one process goes on with what two began
    assert resume(tmp_path / "two", steps=60).step == 60


def test_all_processes_hear_that_the_first_failed() -> None:
    world = distributed.World(0, 1, torch.device("cpu"))
    with pytest.raises(RunError, match="full"):
        world.on_first(lambda: (_ for _ in ()).throw(RunError("full")))
    two = distributed.World(1, 2, torch.device("cpu"))
    two.agree = lambda number: 1  # type: ignore[method-assign]
    with pytest.raises(distributed.Elsewhere):
        two.on_first(None)


def test_graph_cycle_is_what_is_audited(tmp_path) -> None:
    """A leak that needs a layer which only exists after cycling is found."""
    step = ga.band(8, 0, 1) - ga.self_loops(8)  # i reads i + 1: a leak by itself
    with pytest.raises(LeakError, match="layer 2"):
        train(tmp_path / "r", text=TEXT, graphs=[ga.causal(8), step], **TINY)
    assert cycle([ga.causal(8), step], 3)[2] == ga.causal(8)


# ---------------------------------------------------------------------- compiled


def test_compiled_training_gives_the_same_losses_and_names(tmp_path) -> None:
    for compiled in (False, True):
        train(tmp_path / str(compiled), text=TEXT, compile=compiled, graph=["causal", "window(3)"], **TINY)
    plain, fast = (Run.open(tmp_path / str(c)) for c in (False, True))
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(plain.metrics(), fast.metrics(), strict=True)) < 1e-3
    assert plain.tensors("weights").keys() == fast.tensors("weights").keys()
