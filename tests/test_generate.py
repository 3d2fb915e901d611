"""Generation: what is drawn, from which context, and that a cache changes nothing but the time."""

from __future__ import annotations

import math

import pytest
import torch

import graphattn as ga
from graphattn.generate import _Cache, cacheable_from, choose, generate, last_reader, next_logits
from graphattn.gpt import GPT, GPTConfig

BLOCK, VOCAB = 17, 13
POSITIONS = ("learned", "none", "rotary", "alibi", "relative")


def model_of(**changes: object) -> GPT:
    values: dict = {"vocab": VOCAB, "block": BLOCK, "layers": 3, "heads": 2, "width": 12} | changes
    model = GPT(GPTConfig(**values))
    model.reset_parameters(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("table"):
                p.normal_(generator=torch.Generator().manual_seed(1))
            elif p.dim() > 1:
                p.mul_(15)
    return model.double().eval()


def holes() -> ga.Graph:
    """Causal, but no row of it is one run, and some sources are read again after a pause."""
    keep = torch.rand(BLOCK, BLOCK, generator=torch.Generator().manual_seed(5)) < 0.4
    return ga.from_mask(keep.tril() | torch.eye(BLOCK, dtype=torch.bool))


GRAPHS = {
    "causal": ga.causal(BLOCK),
    "window": ga.window(BLOCK, 4),
    "prefix": ga.prefix(BLOCK, 5),
    "documents": ga.causal(BLOCK) & ga.disjoint([ga.full(6), ga.full(4), ga.full(7)]),
    "holes": holes(),
    "strict": ga.causal(BLOCK) - ga.self_loops(BLOCK),
    "full": ga.full(BLOCK),
    "heads": ga.stack([ga.causal(BLOCK), ga.window(BLOCK, 3)], axis="head"),
}


def prompt_of(length: int, batch: int | None = None) -> torch.Tensor:
    shape = (length,) if batch is None else (batch, length)
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def definition(
    model: GPT, graphs: list[ga.Graph], prompt: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens and the logits they come from, each from its whole context."""
    tokens, seen = prompt[None], []
    for _ in range(length):
        part = tokens[:, -BLOCK:]
        m = part.shape[1]
        seen.append(model(part, [g[:m, :m] for g in graphs])[0][0, -1])
        tokens = torch.cat([tokens, seen[-1].argmax()[None, None]], 1)
    return tokens[0], torch.stack(seen)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("name", list(GRAPHS))
def test_cache_changes_nothing(name: str, position: str) -> None:
    model, graph = model_of(position=position), GRAPHS[name]
    for length in (1, 7, 20):
        prompt = prompt_of(length)
        expected, logits = definition(model, [graph], prompt, 19)
        for cache in (True, False):
            assert torch.equal(generate(model, graph, prompt, 19, temperature=0, cache=cache), expected)
            stream = next_logits(model, graph, prompt[None], cache=cache)
            with torch.no_grad():
                got = [next(stream)[0]]
                got += [stream.send(t[None])[0] for t in expected[length:-1]]
            torch.testing.assert_close(torch.stack(got), logits, rtol=0, atol=1e-10)


def test_cache_with_a_graph_per_layer_and_grouped_heads() -> None:
    for changes in ({"kv_heads": 1}, {"softcap": 1.5, "qk_norm": True}, {"bias": True, "tie": False}):
        model = model_of(**changes)
        graphs = [GRAPHS["window"], GRAPHS["causal"], GRAPHS["holes"]]
        expected, _ = definition(model, graphs, prompt_of(2), 25)
        assert torch.equal(generate(model, graphs, prompt_of(2), 25, temperature=0), expected)


def test_cache_keeps_only_what_is_still_read() -> None:
    model = model_of()
    for name, kept in (("window", [3] * 3), ("causal", [12] * 3), ("documents", [2] * 3), ("strict", [12] * 3)):
        cache = _Cache(model, [GRAPHS[name]] * 3)
        tokens = prompt_of(12, 1)
        with torch.no_grad():
            cache.extend(tokens[:, :9])
            for m in range(10, 13):
                cache.extend(tokens[:, :m])
        assert [k.shape[-2] for k in cache.keys] == kept, name
        assert [v.shape[-2] for v in cache.values] == kept


def test_which_graphs_can_be_cached() -> None:
    ready = {name: cacheable_from(g) for name, g in GRAPHS.items()}
    assert ready == {
        "causal": 0, "window": 0, "prefix": 5, "documents": 0, "holes": 0, "strict": 0, "full": BLOCK, "heads": 0,
    }  # fmt: skip
    assert last_reader(ga.window(5, 2)).tolist() == [1, 2, 3, 4, 4]
    assert last_reader(ga.causal(3) - ga.self_loops(3)).tolist() == [2, 2, -1]
    assert last_reader(GRAPHS["heads"]).tolist() == [BLOCK - 1] * BLOCK


def test_recomputation_is_said_once() -> None:
    said: list[str] = []
    generate(model_of(), ga.full(BLOCK), prompt_of(3), 9, seed=0, say=said.append)
    assert len(said) == 1 and "whole context" in said[0]
    for name in ("causal", "prefix", "window"):
        generate(model_of(), GRAPHS[name], prompt_of(3), 9, seed=0, say=said.append)
    assert len(said) == 1


def test_past_the_block() -> None:
    model, graph = model_of(), ga.causal(BLOCK)
    assert generate(model, graph, prompt_of(3), 30, seed=0).shape == (33,)
    long = prompt_of(30)
    out = generate(model, graph, long, 5, temperature=0)
    assert torch.equal(out[:30], long)
    assert torch.equal(out[30:], generate(model, graph, long[-BLOCK:], 5, temperature=0)[BLOCK:])
    shorter = generate(model, ga.causal(6), prompt_of(9), 4, temperature=0)  # the graph is the limit
    assert torch.equal(shorter[9:], generate(model, ga.causal(6), prompt_of(9)[-6:], 4, temperature=0)[6:])


def test_batches_are_independent() -> None:
    model, graph, prompts = model_of(), GRAPHS["window"], prompt_of(4, 3)
    together = generate(model, graph, prompts, 12, temperature=0)
    for row, prompt in zip(together, prompts, strict=True):
        assert torch.equal(row, generate(model, graph, prompt, 12, temperature=0))


def test_mode_and_random_state_are_kept() -> None:
    model = model_of(dropout=0.5)
    a = generate(model, ga.causal(BLOCK), prompt_of(3), 9, temperature=0)
    model.train()
    state = torch.get_rng_state()
    b = generate(model, ga.causal(BLOCK), prompt_of(3), 9, temperature=0, seed=4)
    assert model.training and torch.equal(a, b) and torch.equal(state, torch.get_rng_state())


def test_seeds() -> None:
    model, graph, prompt = model_of(), ga.causal(BLOCK), prompt_of(3)
    a, b, c = (generate(model, graph, prompt, 40, temperature=2.0, seed=s) for s in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_stop() -> None:
    model, graph, prompt = model_of(), ga.causal(BLOCK), prompt_of(3)
    whole = generate(model, graph, prompt, 30, seed=3, temperature=2.0)
    for at in (4, 9, 25):
        stop = whole[at - 1 : at + 1]
        out = generate(model, graph, prompt, 30, seed=3, temperature=2.0, stop=[torch.tensor([99]), stop])
        assert torch.equal(out, whole[: len(out)]) and torch.equal(out[-2:], stop) and len(out) <= at + 1
    with pytest.raises(ValueError, match="one prompt at a time"):
        generate(model, graph, prompt_of(3, 2), 3, stop=[torch.tensor([1])])


def test_wrong_arguments() -> None:
    model, graph = model_of(), ga.causal(BLOCK)
    for prompt, says in (
        (prompt_of(0), "T at least 1"),
        (torch.tensor([VOCAB]), "the model knows 0..12"),
        (torch.tensor([-1]), "the model knows"),
    ):
        with pytest.raises(ValueError, match=says):
            generate(model, graph, prompt, 3)
    for changes, says in (
        ({"temperature": -0.1}, "temperature must be at least 0"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"length": -1}, "length must be at least 0"),
    ):
        with pytest.raises(ValueError, match=says):
            generate(model, graph, prompt_of(3), **({"length": 3} | changes))
    with pytest.raises(ValueError, match="square graphs of one size"):
        generate(model, [graph, ga.causal(5)], prompt_of(3), 3)
    assert torch.equal(generate(model, graph, prompt_of(3), 0), prompt_of(3))


def test_non_finite_weights_are_named() -> None:
    for value in (math.nan, math.inf):
        model = model_of()
        with torch.no_grad():
            model.blocks[1].down.weight[0, 0] = value
        for temperature in (0.0, 1.0):
            for cache in (True, False):
                with pytest.raises(ValueError, match="not finite"):
                    generate(model, ga.causal(BLOCK), prompt_of(3), 3, temperature=temperature, cache=cache)
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="not finite"):
            choose(torch.tensor([[0.0, bad, 1.0]]))


# ---------------------------------------------------------------------- one draw


def draws(logits: list[float], n: int = 1000, **options: object) -> list[int]:
    rows = torch.tensor([logits]).expand(n, -1)
    return choose(rows, generator=torch.Generator().manual_seed(0), **options).tolist()  # type: ignore[arg-type]


def test_temperature_zero_is_the_largest() -> None:
    assert draws([1, 2, 0, -1], 3, temperature=0) == [1, 1, 1]
    assert set(draws([1, 2, 0, -1], temperature=1e-30)) == {1}


def test_filtered_logits_are_gone() -> None:
    assert set(draws([-5, -1, -3], top_k=1)) == {1}
    assert set(draws([-5, -1, -3], top_k=2)) == {1, 2}
    assert set(draws([0.0] * 4, top_k=4)) == set(draws([0.0] * 4, top_k=9)) == {0, 1, 2, 3}
    assert set(draws([0.0] * 4, top_k=2)) == {0, 1}  # ties: exactly k remain
    p = [math.log(x) for x in (0.5, 0.3, 0.15, 0.05)]
    for top_p, kept in ((1e-9, {0}), (0.5, {0}), (0.51, {0, 1}), (0.8, {0, 1}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        assert set(draws(p, 4000, top_p=top_p)) == kept, top_p
    assert set(draws(p, 4000, top_k=2, top_p=0.99)) == {0, 1}


def test_frequencies() -> None:
    p = torch.tensor([0.1, 0.2, 0.3, 0.4])
    n = 40_000
    for temperature in (0.5, 1.0, 2.0):
        expected = (p.log() / temperature).softmax(0)
        got = torch.bincount(torch.tensor(draws(p.log().tolist(), n, temperature=temperature)), minlength=4) / n
        assert (got - expected).abs().max() < 4 * math.sqrt(0.25 / n)
