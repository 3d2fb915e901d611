"""The cost model: what `auto` picks, calibration and its file, and that nothing of it slows a small call."""

from __future__ import annotations

import json
import math
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import graphattn as ga
from graphattn import backends
from graphattn.backends import cost, make_call


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cost, "_tables", {})
    yield tmp_path


def call_of(graph: ga.Graph, d: int = 16, heads: int = 2, **options):
    q, k = torch.zeros(heads, graph.t, d), torch.zeros(heads, graph.s, d)
    return make_call(q, k, k, graph, **options)


def test_kinds() -> None:
    assert cost.kind(call_of(ga.full(5, 7))) == "full"
    assert cost.kind(call_of(ga.causal(5))) == "causal"
    assert cost.kind(call_of(ga.window(99, 40))) == "long"
    assert cost.kind(call_of(ga.self_loops(9))) == "short"


def test_a_factor_turns_the_choice() -> None:
    graph, q = ga.causal(512), torch.zeros(2, 512, 16)
    first = next(e.backend for e in ga.explain(graph, q, q, q) if e.chosen)
    cost._tables[torch.get_num_threads()] = {f"{first} causal forward": 1e6}
    table = ga.explain(graph, q, q, q)
    assert next(e.backend for e in table if e.chosen) != first
    slow = next(e for e in table if e.backend == first)
    assert slow.seconds is not None and slow.seconds > 1


def test_calibration_is_written_read_and_leaves_random_state_alone(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_rng_state()
    # the clock of a machine that is all ours
    monkeypatch.setattr(cost.time, "process_time", cost.time.perf_counter)
    found = backends.calibrate(seconds=0.2)
    assert torch.equal(torch.get_rng_state(), before)
    assert found and all(cost.LEAST <= x <= cost.MOST for x in found.values())
    assert any(k.startswith("sdpa causal") for k in found)
    path = cost.cache_file()
    assert path.is_file() and own_cache in path.parents
    cost._tables.clear()
    assert cost.table() == found
    assert [p.suffix for p in path.parent.iterdir() if not p.name.endswith(".lock")] == [".json"]


def test_a_busy_machine_is_not_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost.time, "process_time", lambda: 0.0)
    assert backends.calibrate(seconds=0.0) == {}
    assert not cost.cache_file().exists()
    call = call_of(ga.causal(64))
    assert cost.factor("sdpa", call) == 1.0
    assert not cost.worth_measuring([(1.0, "a"), (1.1, "b")], call)  # once is enough


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"version": 1}',
        '{"version": 0, "factors": {"sdpa full forward": 2}}',
        '{"version": 1, "factors": {"sdpa full forward": "much"}}',
        '{"version": 1, "factors": {"sdpa full forward": 1e9}}',
        '{"version": 1, "factors": {"sdpa full forward": NaN}}',
        "\x00\xff",
    ],
)
def test_a_broken_file_is_ignored_and_rewritten(content: str) -> None:
    path = cost.cache_file()
    path.parent.mkdir(parents=True)
    path.write_bytes(content.encode("latin-1"))
    assert cost.table() == {}
    q = torch.zeros(1, 8, 4)
    ga.attend(q, q, q, ga.causal(8))
    cost._write(path, {"sdpa full forward": 2.0})
    cost._tables.clear()
    assert cost.table() == {"sdpa full forward": 2.0}


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    cost._write(cost.cache_file(), {"a": 1.0})
    assert cost.table() == {}


def test_the_file_is_that_of_the_thread_count() -> None:
    threads, one = torch.get_num_threads(), cost.cache_file()
    try:
        torch.set_num_threads(threads + 1)
        assert cost.cache_file() != one
    finally:
        torch.set_num_threads(threads)


def _writer(path: Path, n: int) -> None:
    for _ in range(5):
        cost._write(path, {f"backend {n}": 1.0 + n / 10})


def test_many_writers_leave_one_whole_file() -> None:
    path = cost.cache_file()
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_writer, args=(path, n)) for n in range(2)]
    for w in writers:
        w.start()
    for w in writers:
        w.join(60)
        assert w.exitcode == 0
    assert len(json.loads(path.read_text())["factors"]) == 1


def test_small_and_clear_calls_never_calibrate(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("calibrated")

    monkeypatch.setattr(cost, "calibrate", never)
    for graph in (ga.causal(300), ga.window(300, 9), ga.self_loops(300)):
        q = torch.randn(1, graph.t, 8, requires_grad=True)
        ga.attend(q, q, q, graph).sum().backward()
    call = call_of(ga.causal(64))
    assert not cost.worth_measuring([(0.1, "a"), (0.11, "b")], call)  # not long
    assert not cost.worth_measuring([(1.0, "a"), (9.0, "b")], call)  # clear
    assert not cost.worth_measuring([(1.0, "a")], call)
    assert cost.worth_measuring([(1.0, "a"), (1.1, "b")], call)
    cost._tables[torch.get_num_threads()] = {"a": 1.0}
    assert not cost.worth_measuring([(1.0, "a"), (1.1, "b")], call)  # done before


def test_auto_calibrates_at_a_long_undecided_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(cost, "LARGE", 0.0)
    monkeypatch.setattr(cost, "CLOSE", math.inf)
    monkeypatch.setattr(backends, "calibrate", lambda: seen.append(1))
    q = torch.zeros(1, 8, 4)
    graph = ga.causal(8)
    ga.attend(q, q, q, graph)
    ga.attend(q, q, q, graph)
    assert seen == [1]


def test_estimates_grow_with_work_and_gradient() -> None:
    for name in ("dense", "sdpa", "edges", "csr", "tiles", "native"):
        module, _ = backends._try_module(name)
        small, large = call_of(ga.causal(64)), call_of(ga.causal(2048))
        if module is None or module.why_not(small) is not None:  # such as native without a compiler
            continue
        assert 0 < module.cost(small) < module.cost(large), name
        learning = call_of(ga.causal(2048))
        learning.needs_grad = True
        assert module.cost(learning) > module.cost(large), name


def test_sparse_graphs_are_not_given_to_dense_backends() -> None:
    t = 20_000
    q = torch.zeros(1, t, 8)
    table = {e.backend: e for e in ga.explain(ga.window(t, 9), q, q, q)}
    assert not table["dense"].chosen and not table["sdpa"].chosen
    assert table["tiles"].seconds is not None and table["dense"].seconds is not None
    assert table["tiles"].seconds < table["dense"].seconds


def test_explain_says_over_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_BUDGET", 2**20)
    q = torch.zeros(1, 3000, 8)
    table = {e.backend: e for e in ga.explain(ga.window(3000, 9), q, q, q)}
    assert "memory budget" in table["dense"].reason
    assert not table["dense"].chosen


def test_the_quick_ranking_agrees_with_the_whole_one() -> None:
    for graph in (ga.causal(64), ga.causal(3000), ga.window(3000, 129), ga.documents([512] * 8), ga.self_loops(50)):
        for needs_grad in (False, True):
            call = call_of(graph)
            call.needs_grad = needs_grad
            assert backends._ranked(call, quick=True)[0] == backends._ranked(call)[0]
