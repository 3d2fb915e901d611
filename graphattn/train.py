"""Train a character GPT on any graph: stoppable at any moment, resumable to the bit.

Everything random is keyed by (seed, step), so a run is a function of its configuration and text, and a checkpoint
needs no random state.
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graphattn.audit import find_leak
from graphattn.checkpoint import Run, RunError
from graphattn.config import TrainConfig, model_config
from graphattn.data import Vocabulary, Windows, mix, read_text
from graphattn.distributed import World, memory_of
from graphattn.gpt import GPT, cycle
from graphattn.graph import Graph
from graphattn.parse import parse

# longest text that is copied into the run folder, so that it can go on wherever the folder is
MAX_COPY = 2**26
GIVEN = "(given in code)"


class TrainError(ValueError):
    """A run that can't start or had to stop; one line that says why and what is safe."""


class LeakError(TrainError):
    """A position can read the character it has to predict."""


@dataclass(frozen=True)
class Result:
    """Where a run stands: `val_loss` is over all held-out windows, in nats per character, once it is finished."""

    folder: Path
    step: int
    finished: bool
    val_loss: float | None
    stopped_by: int | None = None


def train(
    out: str | Path,
    config: TrainConfig | None = None,
    *,
    graphs: Graph | Sequence[Graph] | None = None,
    text: str | None = None,
    until: int | None = None,
    say: Callable[[str], None] | None = None,
    progress: bool = False,
    **options: Any,
) -> Result:
    """Start a run in the folder `out` and follow it to its end, or to step `until`, or to a signal.

    Args:
        config: see `TrainConfig`; `options` are changes to it, such as `steps=100`.
        graphs: one `block <- block` Graph, or several cycled over the layers, instead of `config.graph`.
        text: instead of `config.text` and `config.dataset`.
        say: gets lines about what happens.  progress: draw a progress bar on stderr.

    Raises:
        ValueError: one line, before anything is written, for a wrong option, text or graph; `LeakError` for a graph
            that lets a position read its label; `RunError` for the folder; `TrainError` for a loss that is not finite.
    """
    config = (config or TrainConfig()).replace(**options).check()
    with World.join(config.device) as world:
        return _train(world, out, config, graphs, text, until, say, progress)


def _train(
    world: World, out: str | Path, config: TrainConfig, graphs: Graph | Sequence[Graph] | None, text: str | None,
    until: int | None, say: Callable[[str], None] | None, progress: bool,
) -> Result:  # fmt: skip
    """A function of its own, so that nothing of the training is left when the processes part."""
    if config.batch % (config.accumulate * world.size):
        needed = f"{config.accumulate} x {world.size}"
        raise TrainError(f"--batch must be a multiple of accumulate x processes, {needed}, got {config.batch}")
    source = "given in code"
    if text is None:
        text, source = read_text(config.text, config.dataset)
        config = config.replace(text=[str(Path(p).absolute()) for p in config.text])
    if graphs is None:
        graphs = [parse(e, config.block) for e in config.graph]
    else:
        graphs = [graphs] if isinstance(graphs, Graph) else list(graphs)
        for g in graphs:
            if not isinstance(g, Graph):
                raise TypeError(
                    f"graphs must be Graphs, got {g!r}: an expression goes into graph=['causal & band(16)']"
                )
        config = config.replace(graph=[GIVEN] * len(graphs))
    vocabulary = Vocabulary.of(text)
    trainer = _Trainer(config, vocabulary, graphs, text, world, say, progress)
    trainer.introduce(source)
    with _Signals() as signals:
        run: Run | None = None

        def make() -> None:
            nonlocal run
            run = Run.create(out, config.steps)

        try:
            world.on_first(make if world.first else None)
            trainer.begin(run)
            return trainer.follow(run, Path(out), until, signals)
        finally:
            if run is not None:
                run.close()


def resume(
    out: str | Path,
    *,
    steps: int | None = None,
    until: int | None = None,
    say: Callable[[str], None] | None = None,
    progress: bool = False,
) -> Result:
    """Go on with the run in `out` from its last checkpoint, to the bit as if it had never stopped.

    Args:
        steps: a new total instead of the run's own; the learning rate from here on is that of the new total.

    Raises:
        RunError: missing, damaged or in use.  Otherwise as `train`.
    """
    # every process checks the folder; the first one then owns it
    run = Run.open(out)
    config = run.config()
    if steps is not None:
        config = config.replace(steps=steps).check()
        if steps < run.step:
            raise TrainError(f"{out} is at step {run.step} already: --steps must be at least that, got {steps}")
    with World.join(config.device) as world, _Signals() as signals:
        return _resume(world, signals, run, config, steps, until, say, progress)


def _resume(
    world: World, signals: _Signals, run: Run, config: TrainConfig, steps: int | None, until: int | None,
    say: Callable[[str], None] | None, progress: bool,
) -> Result:  # fmt: skip
    out = run.folder

    def own() -> None:
        nonlocal run
        run = Run.open(out, write=True)

    try:
        world.on_first(own if world.first else None)
        if run.finished and config.steps == run.step:
            if say is not None and world.first:
                say(f"{out} is finished: it has all {run.step} steps")
            return Result(out, run.step, True, run.read_json("summary.json").get("val_loss"))
        trainer = _Trainer(config, run.vocabulary(), run.graphs(), _text_of(run, config), world, say, progress)
        trainer.restore(run)
        if steps is not None:
            run.manifest["steps"] = steps  # joins the run with its next checkpoint
        return trainer.follow(run if world.first else None, out, until, signals)
    finally:
        run.close()


def _text_of(run: Run, config: TrainConfig) -> str:
    if "text.txt" in run.files:
        return run.read("text.txt").decode("utf-8")
    wanted = run.read_json("text.json")["sha256"]
    text, source = read_text(config.text, config.dataset)
    if _sha256(text) != wanted:
        raise TrainError(f"{source} is not the text this run began with (its sha256 is another): put it back to go on")
    return text


def _sha256(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode("utf-8")).hexdigest()


# ---------------------------------------------------------------------- one run


class _Trainer:
    """Model, optimiser and data of one run, on one of its processes."""

    def __init__(
        self,
        config: TrainConfig,
        vocabulary: Vocabulary,
        graphs: list[Graph],
        text: str,
        world: World,
        say: Callable[[str], None] | None,
        progress: bool,
    ):
        self.config, self.vocabulary, self.graphs, self.text, self.world = config, vocabulary, graphs, text, world
        self.say = say if say is not None and world.first else lambda line: None
        self.progress = progress and world.first
        self.device = world.device
        self.windows = Windows.split(vocabulary.encode(text).to(torch.int32), config.block, config.holdout)
        refuse_leak(config, graphs)
        refuse_dtype(config, self.device)
        refuse_size(config, len(vocabulary), world)
        with _random_state(self.device):
            self.model = GPT(model_config(config, len(vocabulary)))
        self.model.reset_parameters(torch.Generator().manual_seed(mix(config.seed, "weights")))
        self.model.to(self.device, torch.float64 if config.dtype == "float64" else torch.float32)
        self.here = [g.to(self.device) for g in graphs]
        if config.backend != "auto":  # one that can't do this says so before anything is written
            with torch.no_grad():
                self.loss(self.model, *self.windows.batch(torch.tensor([0])))
        self.optimizer = make_optimizer(self.model, config)
        self.step = 0
        self.best: dict[str, Any] | None = None

    def introduce(self, source: str) -> None:
        size = sum(p.numel() for p in self.model.parameters())
        self.say(f"text: {source}, {len(self.text):,} characters, {len(self.vocabulary)} different")
        for expression, g in zip(self.config.graph, self.graphs, strict=True):
            self.say(f"graph: {expression}: {g!r}")
        self.say(f"model: {size:,} weights in {self.config.layers} layers, on {self.device}")

    def begin(self, run: Run | None) -> None:
        """The folder's own files and a checkpoint of step 0, so that there is always one."""

        def write() -> None:
            assert run is not None
            run.put_json("config.json", self.config.as_dict())
            run.put_json("vocab.json", {"characters": self.vocabulary.characters})
            run.put_graphs(self.graphs)
            raw = self.text.encode("utf-8")
            if len(raw) <= MAX_COPY:
                run.put("text.txt", raw)
            else:
                run.put_json("text.json", {"sha256": _sha256(self.text), "characters": len(self.text)})
            run.save(0, weights_of(self.model), {})

        try:
            self.world.on_first(write if run is not None else None)
        except BaseException:
            if run is not None:
                run.discard()
            raise

    def restore(self, run: Run) -> None:
        from graphattn.load import load_weights

        load_weights(self.model, run, "weights")
        load_optimizer(self.optimizer, self.model, run)
        self.step, self.best = run.step, run.best

    def follow(self, run: Run | None, out: Path, until: int | None, signals: _Signals) -> Result:
        """Train from the current step; save on the way, at the end, and before leaving early."""
        config, world = self.config, self.world
        last = config.steps if until is None else min(until, config.steps)
        model = self._wrapped()
        began, first_step = time.perf_counter(), self.step
        stopped: int | None = None
        final: float | None = None
        saved = self.step
        # what the bar shows: the mean of the last ten or so losses, and the last evaluation
        total, weight, held = 0.0, 0.0, ""
        if last <= config.warmup:
            self.say(
                f"note: the run ends at step {last}, within its warm-up of {config.warmup} steps, before the learning rate "
                f"is at its peak of {config.lr:g}: for a short run pass --warmup"
            )
        with self._bar(last) as bar, _random_state(self.device), float32_products(self.device, config.tf32):
            if run is not None:
                run.reopen()
            while self.step < last:
                stopped = world.agree(signals.received)
                if stopped:
                    break
                record = self._one_step(model, out)
                better = False
                total, weight = 0.9 * total + record["loss"], 0.9 * weight + 1
                if config.holdout and (self.step % config.eval_every == 0 or self.step == config.steps):
                    record["val_loss"] = self.evaluate(config.eval_windows)
                    better = self.best is None or record["val_loss"] < self.best["val_loss"]
                    held = f", held out {record['val_loss']:.3f}"
                bar.set_postfix_str(f"loss {total / weight:.3f}{held}", refresh=False)
                if better:
                    self.best = {"step": self.step, "val_loss": record["val_loss"]}
                self._on_first(run, partial(_log, run, record))
                bar.update()
                if better or self.step % config.save_every == 0 or self.step == last:
                    self._save(run, better)
                    saved = self.step
            if stopped is None:
                stopped = world.agree(signals.received)
            if self.step > saved:
                self._save(run, False)
            if self.step == config.steps and not stopped:
                final = self._finish(run, out, time.perf_counter() - began, self.step - first_step)
        return Result(out, self.step, self.step == config.steps and not stopped, final, stopped or None)

    def _on_first(self, run: Run | None, action: Callable[[], None]) -> None:
        if self.world.size == 1:
            action()
        else:
            self.world.on_first(action if run is not None else None)

    def _save(self, run: Run | None, better: bool) -> None:
        weights = weights_of(self.model)
        if not all(bool(torch.isfinite(w).all()) for w in weights.values()):
            raise TrainError(f"a weight is not finite after step {self.step}: stopped; the last checkpoint is kept")
        state = optimizer_state(self.optimizer, self.model)
        best = self.best if better else None
        self._on_first(run, lambda: run.save(self.step, weights, state, best))  # type: ignore[union-attr]

    def _wrapped(self) -> nn.Module:
        model: nn.Module = self.model
        if self.config.compile:
            model = torch.compile(model)  # type: ignore[assignment]
        return self.world.wrap(model)

    @contextlib.contextmanager
    def _bar(self, last: int) -> Iterator[Any]:
        from tqdm import tqdm

        calm = 0.5 if sys.stderr.isatty() else 5.0
        with tqdm(
            total=last, initial=self.step, unit="step", mininterval=calm, disable=not self.progress, dynamic_ncols=True
        ) as bar:
            yield bar

    # ------------------------------------------------------------------ one step

    def _one_step(self, model: nn.Module, out: Path) -> dict[str, Any]:
        config, world = self.config, self.world
        rate = learning_rate(config, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if config.dropout:
            torch.manual_seed(mix(config.seed, "dropout", self.step, world.rank))
        model.train()
        self.optimizer.zero_grad(set_to_none=True)
        starts = self.windows.starts(config.seed, self.step, config.batch)
        mine = starts.view(config.accumulate, world.size, -1)[:, world.rank]  # (micro-batches, windows)
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        for n, some in enumerate(mine):
            last = n + 1 == len(mine)
            with contextlib.nullcontext() if last or world.size == 1 else model.no_sync():  # type: ignore[operator]
                inputs, targets = self.windows.batch(some)
                loss = self.loss(model, inputs, targets)
                (loss if len(mine) == 1 else loss / len(mine)).backward()
                total += loss.detach()
        value = world.mean(total / len(mine))
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), config.clip or math.inf)
        loss_value, norm_value = float(value), float(norm)
        if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
            bad_loss = not math.isfinite(loss_value)
            what = f"the loss is {loss_value}" if bad_loss else f"the gradient's norm is {norm_value}"
            raise TrainError(
                f"{what} in step {self.step + 1}: stopped and not saved; the last checkpoint in {out} is from before it"
            )
        self.optimizer.step()
        self.step += 1
        return {"step": self.step, "loss": loss_value, "lr": rate, "grad_norm": norm_value}

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean over the positions that count, in nats."""
        config = self.config
        if config.loss_from:
            targets = targets.clone()
            targets[:, : config.loss_from] = -1
        inputs, targets = sent(inputs, self.device), sent(targets, self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=config.dtype == "bfloat16"):
            return model(inputs, self.here, targets, backend=config.backend)[1]

    @torch.no_grad()
    def evaluate(self, most: int = 0) -> float:
        """Mean loss over the held-out windows, all or `most` of them; each process takes a share."""
        inputs, targets = self.windows.evaluation(most)
        model = self.model
        training = model.training
        model.eval()
        size = max(self.config.batch, 2**14 // self.config.block)
        both = torch.zeros(2, device=self.device, dtype=torch.float64)
        for n, at in enumerate(range(0, len(inputs), size)):
            if n % self.world.size == self.world.rank:
                part = inputs[at : at + size]
                both += both.new_tensor([len(part), 0])
                both[1] += self.loss(model, part, targets[at : at + size]).double() * len(part)
        model.train(training)
        count, total = self.world.sum(both).tolist()
        return total / count

    # ------------------------------------------------------------------ the end

    def _finish(self, run: Run | None, out: Path, seconds: float, steps: int) -> float | None:
        """The one evaluation over all held-out windows, pictures, a sample of the best weights; the run is finished."""
        from graphattn.load import load_weights

        config = self.config
        final = self.evaluate() if config.holdout else None
        best = None if self.best is None else self.best | {"all_windows": final}
        if best is not None and best["step"] != self.step:
            load_weights(self.model, run or Run.open(out), "best")
            best["all_windows"] = self.evaluate()
        summary = {
            "step": self.step,
            "val_loss": final,
            "best": best,
            "seconds": round(seconds, 3),
            "steps_per_second": round(steps / seconds, 2) if steps else None,
            "torch": torch.__version__,
            "device": str(self.device),
            "threads": torch.get_num_threads(),
        }

        def write() -> None:
            from graphattn.report import write_pictures, write_sample

            assert run is not None
            run.put_json("summary.json", summary)
            write_pictures(run, cycle(self.graphs, len(self.graphs)), config)
            write_sample(run, self.model, self.graphs, self.vocabulary, config)
            run.commit(finished=True)

        self._on_first(run, write)
        return final


def sent(x: Tensor, device: torch.device) -> Tensor:
    """On the device; to a GPU from pinned memory, so that the host does not wait for the copy."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


@contextlib.contextmanager
def float32_products(device: torch.device, tf32: bool) -> Iterator[None]:
    """On a GPU, float32 matrix products in TF32 or exactly, as the run has it; then as before."""
    if device.type != "cuda":
        yield
        return
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # set by the newer names, which this one does not read
        before = "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def refuse_leak(config: TrainConfig, graphs: Sequence[Graph]) -> None:
    """Raise `LeakError`, naming a path, if a position whose prediction counts can read its own label."""
    if not graphs or len(graphs) > config.layers:
        raise ValueError(f"give one graph, or at most one per layer, {config.layers}; got {len(graphs)}")
    for g in graphs:
        if (g.t, g.s) != (config.block, config.block):
            raise ValueError(f"a graph must be {config.block} <- {config.block}, as the block; got {g!r}")
        if g.lead and (g.lead[0] != 1 or g.lead[1] not in (1, config.heads)):
            raise ValueError(f"a graph may differ between the {config.heads} heads, not between windows; got {g!r}")
    if config.allow_leak:
        return
    leak = find_leak(cycle(graphs, config.layers), targets=torch.arange(config.block) >= config.loss_from)
    if leak is not None:
        raise LeakError(f"the graph leaks what is to be predicted: {leak}; --allow-leak trains on it all the same")


def refuse_dtype(config: TrainConfig, device: torch.device) -> None:
    """Raise ValueError for bfloat16 on a GPU that only imitates it."""
    if config.dtype == "bfloat16" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        major, minor = torch.cuda.get_device_capability(device)
        raise ValueError(
            f"--dtype bfloat16 needs a GPU of compute capability 8.0 or later, {torch.cuda.get_device_name(device)} has "
            f"{major}.{minor}: give --dtype float32"
        )


def refuse_size(config: TrainConfig, vocab: int, world: World) -> None:
    """Raise ValueError, with the figure, for what can't fit into memory, rather than be killed for it on the way."""
    width, layers = config.width, config.layers
    weights = 12 * layers * width**2 + (vocab + config.block) * width
    positions = config.batch * config.block // (config.accumulate * world.size)
    # weight, gradient and two moments; per position at least the inputs of each matrix, and the predictions
    needed = 16 * weights + 4 * positions * (10 * layers * width + 2 * vocab)
    memory = memory_of(world.device)
    if memory and needed > memory:
        raise ValueError(
            f"{weights:,} weights and {positions:,} positions at a time need at least {needed / 2**30:,.0f} GiB, "
            f"there are {memory / 2**30:,.0f}: choose a smaller --width, --layers, --block or --batch, or "
            "--accumulate more"
        )


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then a cosine from `lr` to `min_lr` or a constant."""
    if step < config.warmup:
        return config.lr * (step + 1) / (config.warmup + 1)
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * min(1.0, done))) * (config.lr - config.min_lr)


# ---------------------------------------------------------------------- optimiser and its state as plain tensors


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices and tables, not norms and biases."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": config.decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = params[0].device.type == "cuda"
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=fused or None)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by name, on the CPU; those of the plain model, whatever wraps it."""
    return {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """`exp_avg.NAME`, `exp_avg_sq.NAME`, `step.NAME` of every parameter that has been stepped."""
    out = {}
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            out[f"{key}.{name}"] = value.detach().cpu().contiguous()
    return out


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, run: Run) -> None:
    tensors = run.tensors("optimizer")
    path = run.folder / run.manifest["roles"]["optimizer"]
    if run.step == 0 and not tensors:
        return
    numbers: dict[Tensor, int] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            numbers[p] = len(numbers)
    state: dict[int, dict[str, Tensor]] = {}
    for name, p in model.named_parameters():
        entry = {key: tensors.pop(f"{key}.{name}", None) for key in ("step", "exp_avg", "exp_avg_sq")}
        wanted = {"step": torch.Size(), "exp_avg": p.shape, "exp_avg_sq": p.shape}
        for key, value in entry.items():
            if value is None or value.shape != wanted[key]:
                raise RunError(f"{path} does not fit the model: {key}.{name} is missing or of another shape")
        state[numbers[p]] = entry  # type: ignore[assignment]
    if tensors:
        raise RunError(f"{path} does not fit the model: it also holds {sorted(tensors)[0]}")
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _log(run: Run | None, record: dict[str, Any]) -> None:
    assert run is not None
    run.log(record)


# ---------------------------------------------------------------------- signals and random state


class _Signals:
    """Ctrl-C and SIGTERM become a request to stop after the current step; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._take)
        return self

    def _take(self, number: int, frame: object) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _random_state(device: torch.device) -> Iterator[None]:
    """Leave the caller's random state as it was."""
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


class _CallableModule(types.ModuleType):
    """Importing this module puts it where `graphattn.train` was a function: it must go on being one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
