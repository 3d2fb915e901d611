"""Graphs in files: the runs as plain arrays, nothing that is executed."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np
import torch

from ..graph import Graph

# of a file, unpacked; the runs of a million-token window take 24 MiB
MAX_BYTES = 2**32


def from_npz(path: str | os.PathLike[str]) -> Graph:
    """The graph that `to_npz` wrote; `from_npz` after `to_npz` is the same graph, leading axes included.

    Raises:
        TypeError: not a path.
        ValueError: a file without `indptr`, `start`, `stop`, `shape`, of runs that are no graph, or above 4 GiB.
        OSError: the file can't be read.
    """
    path = os.fspath(path)
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > MAX_BYTES:
            raise ValueError(f"{path} holds {size:,} bytes, at most {MAX_BYTES:,} are read")
        with np.load(path, allow_pickle=False) as data:
            return from_arrays(data)
    except (zipfile.BadZipFile, EOFError, KeyError, NotImplementedError) as error:
        raise ValueError(f"{path} is no graph that to_npz wrote ({error})") from None


def from_arrays(data: np.lib.npyio.NpzFile) -> Graph:
    """The graph of an open `.npz` file with `indptr`, `start`, `stop` and `shape`."""
    indptr, start, stop = (torch.from_numpy(np.asarray(data[name])) for name in ("indptr", "start", "stop"))
    return Graph.from_runs(indptr, start, stop, [int(n) for n in data["shape"]])


def to_npz(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Write the runs, `indptr`, `start`, `stop`, and the `shape`, int64; on the command line it is `--graph @FILE.npz`."""
    if Path(path).suffix != ".npz":
        raise ValueError(f"the file must end in .npz, got {path}")
    runs = {name: getattr(graph, name).cpu().numpy() for name in ("indptr", "start", "stop")}
    np.savez_compressed(path, shape=np.array(graph.shape, dtype=np.int64), **runs)
