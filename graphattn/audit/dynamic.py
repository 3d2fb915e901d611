"""A leak test of a running model: norms, scans and bugs can leak what no mask shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .flow import whole


def assert_no_leak(
    model: Callable[..., Any],
    inputs: Tensor,
    *args: Any,
    offset: int = 1,
    positions: Sequence[int] | None = None,
    vocab: int | None = None,
    tolerance: float | None = None,
    seed: int = 0,
    **kwargs: Any,
) -> None:
    """Changing inputs at and after position p must not move an output that predicts p or something earlier.

    Calls `model(inputs, *args, **kwargs)` in the mode it is in, with one random state, so that dropout and batch norm
    take part as in training; buffers are put back.  For each p all inputs from p on change at once, and a culprit is
    then looked for one by one.  With several samples, changing the first must not move the others.

    Args:
        model: returns a tensor, or a tuple or object (`.logits`) that holds it first.  Outputs have the positions where
            inputs have them: axis 1, or axis 0 of a 1-D input.
        inputs: integer tokens `(B, T)` or `(T,)`, or floats `(B, T, ...)`.
        offset: output i predicts input i + offset.
        positions: which p to try; all of them up to 128, else 128 spread evenly.
        vocab: number of tokens; without it changed tokens are others that occur in `inputs`.
        tolerance: movement that is rounding; 32 units in the last place of the largest output if not given.

    Raises:
        AssertionError: naming the input, the output, and by how much it moved.
        ValueError: outputs without a position for each input, or that are not finite.
    """
    offset = whole(offset, "offset")
    axis = min(inputs.dim() - 1, 1)
    t = inputs.shape[axis]
    modules = model.modules() if isinstance(model, torch.nn.Module) else []
    buffers = [(m, name, b.detach().clone()) for m in modules for name, b in m.named_buffers(recurse=False)]
    generator = torch.Generator().manual_seed(seed)
    changed = _other(inputs, vocab, generator)

    def run(x: Tensor) -> Tensor:
        devices = [inputs.device] if inputs.is_cuda else []
        with torch.no_grad(), torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            out = _first(model(x, *args, **kwargs)).detach()
        for module, name, value in buffers:
            getattr(module, name).copy_(value)
        return out

    base = run(inputs)
    dtype = base.dtype if base.dtype.is_floating_point else torch.float32
    base = base.double()
    if base.dim() <= axis or base.shape[axis] != t:
        raise ValueError(
            f"outputs of shape {tuple(base.shape)} have no position for each of the {t} inputs on axis {axis}"
        )
    if not bool(torch.isfinite(base).all()):
        raise ValueError("outputs are not finite before anything was changed")
    scale = float(base.abs().max()) if base.numel() else 0.0
    noise = float((run(inputs).double() - base).abs().max()) if base.numel() else 0.0
    limit = max(32 * torch.finfo(dtype).eps * scale if tolerance is None else tolerance, 4 * noise)

    def moved(pick: Tensor) -> Tensor:
        """How far each output moves, over positions, when the inputs picked are changed: `(T,)`."""
        shape = [1] * inputs.dim()
        shape[axis] = t
        out = run(torch.where(pick.view(shape), changed, inputs))
        gone = (out.double() - base).abs().nan_to_num(nan=torch.inf)
        return gone.movedim(axis, 0).reshape(t, -1).amax(1) if gone.numel() else gone.new_zeros(t)

    at = torch.arange(t, device=inputs.device)
    for p in _positions(positions, t, offset):
        bad = (moved(at >= p) > limit) & (at + offset <= p)
        if not bool(bad.any()):
            continue
        for source in range(p, t):  # which one of them is it
            shift = moved(at == source)
            one = (shift > limit) & (at + offset <= p)
            if bool(one.any()):
                target = int(one.nonzero()[0])
                raise AssertionError(
                    f"changing input {source} moves output {target}, which predicts input {target + offset}, by "
                    f"{float(shift[target]):.3g} (rounding: {limit:.1g})"
                )
        target = int(bad.nonzero()[0])
        raise AssertionError(
            f"changing inputs {p}..{t - 1} together moves output {target}, which predicts input {target + offset}"
        )
    if axis == 1 and inputs.shape[0] > 1 and base.shape[0] == inputs.shape[0]:
        first = torch.arange(inputs.shape[0], device=inputs.device).view(-1, *[1] * (inputs.dim() - 1)) == 0
        gone = (run(torch.where(first, changed, inputs)).double() - base)[1:].abs().nan_to_num(nan=torch.inf)
        if gone.numel() and float(gone.max()) > limit:
            sample = int(gone.reshape(gone.shape[0], -1).amax(1).argmax()) + 1
            raise AssertionError(
                f"changing sample 0 moves sample {sample} by {float(gone.max()):.3g} (rounding: {limit:.1g})"
            )


def _first(out: Any) -> Tensor:
    if isinstance(out, Tensor):
        return out
    if hasattr(out, "logits"):
        return out.logits
    if isinstance(out, (tuple, list)) and out and isinstance(out[0], Tensor):
        return out[0]
    raise ValueError(
        f"the model returned {type(out).__name__}: expected a tensor, a tuple that begins with one, or .logits"
    )


def _positions(positions: Sequence[int] | None, t: int, offset: int) -> list[int]:
    if positions is None:
        every = range(max(offset, 0), t)
        if len(every) <= 128:
            return list(every)
        return sorted({every[round(k * (len(every) - 1) / 127)] for k in range(128)})
    chosen = [whole(p, "a position") for p in positions]
    wrong = [p for p in chosen if not 0 <= p < t]
    if wrong:
        raise ValueError(f"position {wrong[0]} is out of range for {t} inputs")
    return chosen


def _other(inputs: Tensor, vocab: int | None, generator: torch.Generator) -> Tensor:
    """Inputs that differ everywhere."""
    if inputs.dtype.is_floating_point:
        spread = float(inputs.float().std()) if inputs.numel() > 1 else 1.0
        step = torch.randn(inputs.shape, generator=generator) * (spread if spread > 0 else 1.0)
        return inputs + step.to(inputs.device, inputs.dtype)
    known = torch.arange(vocab) if vocab is not None else torch.unique(inputs).cpu()
    if known.numel() < 2:
        if vocab is not None:
            raise ValueError(f"a vocabulary of {vocab} has no other token to put in place of one")
        known = torch.tensor([0, 1]) if not known.numel() or int(known[0]) in (0, 1) else torch.cat([known - 1, known])
    n = known.numel()
    place = torch.searchsorted(known, inputs.cpu().to(known.dtype).contiguous())
    step = torch.randint(1, n, inputs.shape, generator=generator)
    return known[(place + step) % n].to(inputs.device, inputs.dtype)
