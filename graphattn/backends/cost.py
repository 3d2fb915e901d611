"""What a backend's estimate is worth on this machine: measured once, kept in the user's cache folder.

Each backend estimates its seconds by a formula with built-in constants (`cost(call)`).  Calibration times a few small
calls, and keeps per backend, kind of work and phase the factor between what it took and what the formula said.
Only ratios between backends matter to `auto`, so a machine that is as slow for all of them needs no factors at all.

`import graphattn` and small calls never calibrate: `factor` answers 1 until `calibrate` has run here or in another
process of the same machine, torch and thread count.  `auto` starts it by itself at the first call that is both long
(`LARGE` seconds estimated) and undecided (the second choice within `CLOSE` of the first).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..graph import Graph
from .call import Call

VERSION = 1
LARGE = 0.3
CLOSE = 3.0
# One noisy measurement must not turn a choice around for good.
LEAST, MOST = 1 / 6, 6.0

# by thread count, or name of a GPU: a file holds the factors of one
_tables: dict[int | str, dict[str, float]] = {}
_busy = threading.Lock()
_CPU = torch.device("cpu")


# ---------------------------------------------------------------------- what auto asks


def factor(backend: str, call: Call) -> float:
    """Measured over estimated seconds of this backend for such a call; 1 where nothing was measured."""
    if call.q.device.type not in ("cpu", "cuda"):
        return 1.0
    return table(call.q.device).get(key(backend, call), 1.0)


def table(device: torch.device = _CPU) -> dict[str, float]:
    """The factors for the present thread count, or of a GPU; read from the file once, empty if missing or broken."""
    unit = _unit(device)
    found = _tables.get(unit)
    if found is None:
        try:
            found = _read(cache_file(device))
        except RuntimeError:  # no home folder
            found = {}
        _tables[unit] = found
    return found


def _unit(device: torch.device) -> int | str:
    """What factors belong to: a number of threads, or a model of GPU."""
    return torch.get_num_threads() if device.type == "cpu" else torch.cuda.get_device_name(device)


def key(backend: str, call: Call) -> str:
    """What calibration tells apart: the backend, the kind of work, forward alone or with the gradient; 16 bits on GPUs."""
    half = " half" if call.q.device.type == "cuda" and call.q.element_size() == 2 else ""
    return f"{backend} {kind(call)} {'both' if call.needs_grad else 'forward'}{half}"


def kind(call: Call) -> str:
    """ "full", "causal", "long" runs of 16 sources or more, or "short" ones."""
    graph = call.graph
    if graph.is_full():
        return "full"
    if graph.is_causal():
        return "causal"
    return "long" if graph.num_edges >= 16 * graph.num_runs else "short"


def worth_measuring(ranked: list[tuple[float, str]], call: Call) -> bool:
    """A long call whose choice is not clear, on a machine that was never calibrated."""
    if call.q.device.type != "cpu" or len(ranked) < 2 or torch.compiler.is_compiling():
        return False
    first, second = ranked[0][0], ranked[1][0]
    return first > LARGE and second < CLOSE * first and not table()


# ---------------------------------------------------------------------- measuring


def calibrate(
    backends: dict[str, Any], make: Callable[..., Call], *, seconds: float = 2.0, path: Path | None = None,
    device: torch.device = _CPU,
) -> dict[str, float]:  # fmt: skip
    """Time each backend on a few small calls, keep the factors, and return them.

    Args:
        backends: name to module, those to measure.
        make: `call.make_call`, handed down.
        seconds: to spend, about.
        path: file to write; default `cache_file(device)`.  A folder that can't be written to is no error: the factors then
            last as long as the process.

    Returns:
        Nothing, and writes nothing, if other processes kept the machine busy meanwhile.
    """
    with _busy:
        began, used = time.perf_counter(), time.process_time()
        found = _measure(backends, make, seconds, device)
        idle = (time.process_time() - used) < 0.8 * (time.perf_counter() - began)
        if idle and device.type == "cpu":
            # other processes had the machine: what was measured is their doing, and a wrong factor would stay
            found = {}
        _tables[_unit(device)] = found or {"": 1.0}
    if found:
        _write(path or cache_file(device), found)
    return found


def _measure(
    backends: dict[str, Any], make: Callable[..., Call], seconds: float, device: torch.device
) -> dict[str, float]:
    ratios: dict[str, float] = {}
    on_gpu = device.type == "cuda"
    # a GPU needs more work than a CPU to be busy, and has two kinds of arithmetic
    t, heads, dtypes = (4096, 8, (torch.bfloat16, torch.float32)) if on_gpu else (512, 4, (torch.float32,))
    probes = [(g.to(device), grad, dtype) for g in _graphs(t) for grad in (False, True) for dtype in dtypes]
    # inputs of its own, so that torch's random state is left alone
    noise = torch.Generator().manual_seed(0)
    for graph, needs_grad, dtype in probes:
        q, k, v, go = (torch.randn(1, heads, graph.t, 64, generator=noise).to(device, dtype) for _ in range(4))
        with torch.set_grad_enabled(needs_grad):
            for x in (q, k, v):
                x.requires_grad_(needs_grad)
            call = make(q, k, v, graph)
            able = {n: m for n, m in backends.items() if m.why_not(call) is None}
            estimates = {n: m.cost(call) for n, m in able.items()}
            # what is far from being chosen needs no factor
            near = 30 * min(estimates.values())
            work = {n: functools.partial(_once, m, call, go) for n, m in able.items() if estimates[n] < near}
            for name, took in _time(work, seconds / len(probes), device).items():
                ratio = took / estimates[name]
                ratios[key(name, call)] = round(min(MOST, max(LEAST, ratio)), 4)
    return ratios


def _graphs(t: int = 512) -> list[Graph]:
    """One small graph of each kind."""
    row = torch.arange(t)
    noise = torch.Generator().manual_seed(0)
    scattered = torch.randint(0, t, (t, 12), generator=noise)
    ptr = torch.arange(t + 1)
    return [
        Graph._new(ptr, torch.zeros_like(row), torch.full_like(row, t), (t, t)),
        Graph._new(ptr, torch.zeros_like(row), row + 1, (t, t)),
        Graph._new(ptr, (row - 64).clamp(min=0), row + 1, (t, t)),
        Graph.from_keys((row[:, None] * (t + 1) + scattered).reshape(-1), (t, t), owned=True),
    ]


def _once(module: Any, call: Call, go: Tensor) -> None:
    out = module.attend(call)[0]
    if call.needs_grad:
        torch.autograd.grad(out, (call.q, call.k, call.v), go)


def _time(work: Mapping[str, Callable[[], None]], seconds: float, device: torch.device = _CPU) -> dict[str, float]:
    """The best time of each, in turns, so that all meet the same machine."""
    best = dict.fromkeys(work, math.inf)
    wait = functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    for f in work.values():
        f()
    wait()
    end, turns = time.perf_counter() + seconds, 0
    while turns < 3 or (turns < 100 and time.perf_counter() < end):
        for name, f in work.items():
            began = time.perf_counter()
            f()
            wait()
            best[name] = min(best[name], time.perf_counter() - began)
        turns += 1
    return best


# ---------------------------------------------------------------------- the file


def cache_folder() -> Path:
    """Where the operating system wants caches of a user: XDG_CACHE_HOME or ~/.cache, ~/Library/Caches, LOCALAPPDATA."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "graphattn"


def cache_file(device: torch.device = _CPU) -> Path:
    """The file of this machine, torch version and thread count, or of this kind of GPU."""
    if device.type != "cpu":
        return _file(f"{VERSION} {torch.__version__} {_unit(device)}")
    name = f"{VERSION} {torch.__version__} {_cpu()} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"
    return _file(name)


def _file(name: str) -> Path:
    return cache_folder() / f"calibration-{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"


@functools.cache
def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _read(path: Path) -> dict[str, float]:
    try:
        content = json.loads(path.read_text())
        factors = content["factors"]
        if content["version"] != VERSION or not isinstance(factors, dict):
            return {}
        good = {str(k): float(v) for k, v in factors.items()}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return good if all(LEAST <= x <= MOST for x in good.values()) else {}


def _write(path: Path, factors: dict[str, float]) -> None:
    """Whole or not at all: written aside under a lock, then moved into place."""
    with contextlib.suppress(OSError), _locked(path):
        known = {"version": VERSION, "torch": torch.__version__, "cpu": _cpu(), "factors": factors}
        content = json.dumps(known, indent=1)
        handle, aside = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
        try:
            with os.fdopen(handle, "w") as f:
                f.write(content)
            os.replace(aside, path)
        except OSError:
            Path(aside).unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone with the file, or OSError if that takes more than a few seconds."""
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(str(path) + ".lock", timeout=5):
            yield
    except Timeout:
        raise OSError(f"{path} is locked by another process") from None
