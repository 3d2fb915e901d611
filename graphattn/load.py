"""A trained model back from its run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from graphattn.checkpoint import MANIFEST, Run, RunError, read_header
from graphattn.config import TrainConfig, model_config
from graphattn.data import Vocabulary
from graphattn.gpt import GPT, GPTConfig, cycle
from graphattn.graph import Graph


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, the graphs it was trained on, and its vocabulary."""

    model: GPT
    graphs: list[Graph]
    vocabulary: Vocabulary
    config: TrainConfig
    step: int


def load(folder: str | Path, *, which: str = "best", block: int | None = None, device: str = "cpu") -> Loaded:
    """The model of a run, every file checked first.

    Args:
        which: `best` weights on the held-out text (the last ones if nothing was held out) or `last`.
        block: a shorter window than the run's: graphs and position table are cut to it.

    Raises:
        RunError: missing or damaged, naming the file.
        ValueError: a longer block than was trained.
    """
    if which not in ("best", "last"):
        raise ValueError(f"which must be best or last, got {which!r}")
    return Run.reading(folder, lambda run: _load(run, which, block, device))


def _load(run: Run, which: str, block: int | None, device: str) -> Loaded:
    config, vocabulary, graphs = run.config(), run.vocabulary(), run.graphs()
    wanted = config.block if block is None else block
    if not 1 <= wanted <= config.block:
        raise ValueError(f"the run was trained with block {config.block}: a block of {wanted} needs another model")
    for g in graphs:
        if g.shape[-2:] != (config.block, config.block):
            raise RunError(f"{run.folder / 'graphs.safetensors'} holds {g!r}, but the block is {config.block}")
    cycle(graphs, config.layers)
    best = which == "best" and run.best is not None
    role = "best" if best else "weights"
    _check_layers(run, role, config.layers)
    with torch.device("meta"):
        model = GPT(model_config(config, len(vocabulary)))
    load_weights(model, run, role)
    model = model.to(device).eval()
    step = run.best["step"] if best and run.best else run.step
    if wanted < config.block:
        graphs = [g[:wanted, :wanted] for g in graphs]
        model = with_block(model, wanted)
    return Loaded(model, graphs, vocabulary, config, step)


def load_weights(model: GPT, run: Run, role: str) -> None:
    """Put `weights` or `best` into the model, all or none; a model on the meta device takes the tensors over."""
    name = run.manifest["roles"].get(role)
    if name is None:
        raise RunError(f"{run.folder} has no {role}")
    path = run.folder / name
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
    found = {name: shape for name, (_, shape) in read_header(path).items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise RunError(
                f"{path} does not fit the configuration: {name} is {_shape(found.get(name))}, "
                f"needed {_shape(wanted.get(name))}"
            )
    tensors = run.tensors(role)
    dtypes = {x.dtype for x in tensors.values()}
    if len(dtypes) != 1 or not next(iter(dtypes)).is_floating_point:
        raise RunError(f"{path} must hold weights of one floating-point dtype, got {sorted(map(str, dtypes))}")
    if any(not bool(torch.isfinite(x).all()) for x in tensors.values()):
        raise RunError(f"{path} holds weights that are not finite")
    on_meta = any(p.is_meta for p in model.parameters())
    model.load_state_dict(tensors, strict=True, assign=on_meta)
    if on_meta:
        for block in model.blocks:
            block.reset_buffers()  # type: ignore[operator]


def _check_layers(run: Run, role: str, layers: int) -> None:
    """Before a model of that many layers is built, even without memory for its weights."""
    path = run.folder / run.manifest["roles"].get(role, MANIFEST)
    if path.name == MANIFEST:
        raise RunError(f"{run.folder} has no {role}")
    found = sum(name.endswith(".out.weight") for name in read_header(path))
    if found != layers:
        raise RunError(f"{path} does not fit the configuration: it has {found} layers, needed {layers}")


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(shape)


def with_block(model: GPT, block: int) -> GPT:
    """The same weights for a shorter window: what depends on the length is cut, what does not is shared.

    Raises:
        ValueError: a longer block, whose positions were never trained.
    """
    old = model.config
    if block > old.block:
        raise ValueError(f"the model was trained with block {old.block}: {block} positions need another model")
    values = {name: getattr(old, name) for name in old.__dataclass_fields__} | {"block": block}
    with torch.device("meta"):
        out = GPT(GPTConfig(**values))
    state = dict(model.state_dict())
    if "positions.weight" in state:
        state["positions.weight"] = state["positions.weight"][:block]
    for name in [n for n in state if n.endswith(".table")]:
        reach = state[name].shape[1] // 2
        state[name] = state[name][:, reach - block + 1 : reach + block]
    out.load_state_dict(state, strict=True, assign=True)
    for b in out.blocks:
        b.reset_buffers()  # type: ignore[operator]
    return out.train(model.training).to(next(model.parameters()).device)
