"""Everything that decides a training run, as one flat dataclass; presets are changes to it."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from graphattn.nearest import nearest

if TYPE_CHECKING:
    from graphattn.gpt import GPTConfig

POSITIONS = ("learned", "none", "rotary", "alibi", "relative")


def _option(default: Any, text: str) -> Any:
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": text})
    return field(default=default, metadata={"help": text})


@dataclass
class TrainConfig:
    """A run is a function of these values and the text."""

    text: list[str] = _option([], "UTF-8 file or folder of .txt files; may be repeated (none: Python's help topics)")
    dataset: str = _option("", "a named text to download and cache instead: shakespeare")
    graph: list[str] = _option(
        ["causal"], "who reads whom, as 'causal & band(16)'; repeat it for one per layer, cycled"
    )
    loss_from: int = _option(0, "first position whose prediction counts, for graphs with a prefix")
    allow_leak: bool = _option(False, "train even if a position can read the character it predicts")

    layers: int = _option(4, "blocks of attention and feed-forward")
    heads: int = _option(4, "attention heads per layer")
    kv_heads: int = _option(0, "key/value heads per layer, shared by groups of heads; 0: as many as heads")
    width: int = _option(128, "features per position")
    block: int = _option(64, "positions per window, the graph's size")
    position: str = _option("learned", f"how order enters: {', '.join(POSITIONS)}")
    qk_norm: bool = _option(False, "normalise queries and keys")
    softcap: float = _option(0.0, "bound scores to +-this by tanh; 0: off")
    bias: bool = _option(False, "biases in linear layers and norms")
    tie: bool = _option(True, "one table for reading and for predicting characters")
    dropout: float = _option(0.0, "dropout of edges, embeddings and both residual branches")
    backend: str = _option("auto", "attention backend")

    batch: int = _option(12, "windows per step, over all processes and micro-batches")
    accumulate: int = _option(1, "micro-batches one step is split into")
    steps: int = _option(2000, "optimiser steps")
    lr: float = _option(2e-3, "learning rate after warm-up")
    min_lr: float = _option(1e-4, "learning rate at the end of the cosine")
    schedule: str = _option("cosine", "cosine or constant, after a linear warm-up")
    warmup: int = _option(100, "steps of warm-up")
    decay: float = _option(0.1, "weight decay of matrices")
    beta1: float = _option(0.9, "AdamW beta1")
    beta2: float = _option(0.99, "AdamW beta2")
    clip: float = _option(1.0, "largest gradient norm; 0: off")

    holdout: float = _option(0.1, "last part of the text kept for evaluation; 0: none")
    eval_every: int = _option(250, "steps between evaluations")
    eval_windows: int = _option(256, "held-out windows of an evaluation on the way; the last one reads all; 0: all")
    save_every: int = _option(250, "steps between checkpoints")
    sample: int = _option(500, "characters of the sample a finished run writes")
    seed: int = _option(1337, "of initial weights, batches and dropout")

    device: str = _option("auto", "auto, cpu, cuda or cuda:N")
    dtype: str = _option("float32", "float32, or bfloat16 for autocast with float32 weights")
    tf32: bool = _option(False, "on a GPU, matrix products of float32 numbers in TF32")
    compile: bool = _option(False, "torch.compile the model")

    def check(self) -> TrainConfig:
        """Itself, or a ValueError that names the option, what it was and what it needs."""
        for f in fields(self):
            setattr(self, f.name, coerce(f.name, getattr(self, f.name)))
        for name in ("layers", "heads", "width", "block", "batch", "accumulate", "eval_every", "save_every"):
            _need(self, name, getattr(self, name) >= 1, "at least 1")
        for name in (
            "steps",
            "warmup",
            "kv_heads",
            "eval_windows",
            "softcap",
            "decay",
            "clip",
            "min_lr",
            "loss_from",
            "sample",
        ):
            _need(self, name, getattr(self, name) >= 0, "at least 0")
        for name, most in (
            ("layers", 1024),
            ("width", 2**16),
            ("block", 2**20),
            ("batch", 2**20),
            ("steps", 2**40),
            ("lr", 1e3),
        ):
            _need(self, name, getattr(self, name) <= most, f"at most {most}")
        _need(self, "lr", self.lr > 0, "above 0")
        for name in ("dropout", "beta1", "beta2"):
            _need(self, name, 0 <= getattr(self, name) < 1, "in [0, 1)")
        _need(self, "holdout", 0 <= self.holdout <= 0.9, "in [0, 0.9]")
        _need(self, "seed", 0 <= self.seed < 2**63, "in [0, 2**63)")
        _need(self, "loss_from", self.loss_from < self.block, f"below block, {self.block}")
        _need(self, "position", self.position in POSITIONS, f"one of {', '.join(POSITIONS)}")
        _need(self, "schedule", self.schedule in ("cosine", "constant"), "cosine or constant")
        _need(self, "dtype", self.dtype in ("float32", "bfloat16", "float64"), "float32, bfloat16 or float64")
        _need(self, "width", self.width % self.heads == 0, f"a multiple of heads, {self.heads}")
        kv = self.kv_heads or self.heads
        _need(self, "kv_heads", kv <= self.heads and self.heads % kv == 0, f"a divisor of heads, {self.heads}")
        even = self.position != "rotary" or (self.width // self.heads) % 2 == 0
        _need(self, "width", even, "an even number of features per head for rotary positions")
        _need(self, "batch", self.batch % self.accumulate == 0, f"a multiple of accumulate, {self.accumulate}")
        _need(self, "graph", len(self.graph) >= 1, "at least one expression")
        _need(self, "graph", len(self.graph) <= self.layers, f"at most one per layer, {self.layers}")
        if self.text and self.dataset:
            raise ValueError("--text and --dataset both name the text: give one of them")
        return self

    def replace(self, **changes: Any) -> TrainConfig:
        return dataclasses.replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """From `as_dict()`, or a ValueError for an option there is not."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            near = nearest(unknown[0], sorted(known))
            raise ValueError(f"there is no option {unknown[0]!r}{near}; known are {', '.join(sorted(known))}")
        return cls(**values).check()


PRESETS: dict[str, dict[str, Any]] = {
    # nanoGPT's recipe for a laptop with twice its learning rate: 0.1 nats better after 2000 steps of tiny shakespeare
    "cpu": {},
    # nanoGPT's config/train_shakespeare_char.py; the lecture's own: --schedule constant --lr 3e-4 --warmup 0
    "gpu": {
        "layers": 6,
        "heads": 6,
        "width": 384,
        "block": 256,
        "batch": 64,
        "steps": 5000,
        "lr": 1e-3,
        "dropout": 0.2,
        "device": "cuda",
        "dtype": "bfloat16",
        "tf32": True,
        "compile": True,
    },
}


def model_config(config: TrainConfig, vocab: int) -> GPTConfig:
    """The model a run trains."""
    from graphattn.gpt import GPTConfig

    return GPTConfig(
        vocab=vocab,
        block=config.block,
        layers=config.layers,
        heads=config.heads,
        width=config.width,
        kv_heads=config.kv_heads or None,
        position=config.position,
        qk_norm=config.qk_norm,
        softcap=config.softcap or None,
        bias=config.bias,
        tie=config.tie,
        dropout=config.dropout,
    )


_TYPES = typing.get_type_hints(TrainConfig)


def coerce(name: str, value: Any) -> Any:
    """`value` as the option's type, or a ValueError naming it."""
    kind = _TYPES[name]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if isinstance(kind, types.GenericAlias):
        value = [value] if isinstance(value, str) else value
        if isinstance(value, (list, tuple)) and all(isinstance(x, str) for x in value):
            return list(value)
        raise ValueError(f"--{flag(name)} must be text or a list of texts, got {value!r}")
    if type(value) is not kind:
        raise ValueError(f"--{flag(name)} must be {_KINDS[kind]}, got {value!r}")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"--{flag(name)} must be finite, got {value}")
    return value


_KINDS = {int: "an integer", float: "a number", str: "text", bool: "true or false"}


def flag(name: str) -> str:
    """An option's name on the command line."""
    return name.replace("_", "-")


def _need(config: TrainConfig, name: str, holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"--{flag(name)} must be {what}, got {getattr(config, name)}")
