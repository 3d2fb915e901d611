"""Graphs in .npz files: the same value back, and nothing but a graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import graphattn as ga
from tests.test_conformance import NAMED


@pytest.mark.parametrize("name", NAMED)
def test_the_same_graph_back(name: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.npz"
    ga.to_npz(NAMED[name], path)
    assert ga.from_npz(path) == NAMED[name]
    if not NAMED[name].lead:
        assert ga.parse(f"@{path}", NAMED[name].shape) == NAMED[name]


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"end in \.npz"):
        ga.to_npz(ga.causal(3), tmp_path / "graph.pt")
    path = tmp_path / "graph.npz"
    path.write_bytes(b"no archive")
    with pytest.raises(ValueError, match="no graph"):
        ga.from_npz(path)
    np.savez(path, edge_index=np.zeros((2, 0), dtype=np.int64))
    with pytest.raises(ValueError, match="no graph"):
        ga.from_npz(path)
    good = dict(indptr=[0, 1], start=[0], stop=[3], shape=[1, 4])
    for change in (dict(stop=[5]), dict(indptr=[0, 2]), dict(shape=[1, 2]), dict(shape=[1, -4]), dict(start=[0.5])):
        np.savez(path, **{k: np.array(v) for k, v in (good | change).items()})
        with pytest.raises((ValueError, TypeError)):
            ga.from_npz(path)
    np.savez(path, **{k: np.array(v) for k, v in good.items()} | {"start": np.array([object()])}, allow_pickle=True)
    with pytest.raises(ValueError, match="pickle"):
        ga.from_npz(path)
    ga.to_npz(ga.causal(4), path)
    with pytest.raises(ValueError, match="size is 5"):
        ga.parse(f"@{path}", 5)
