"""Every example, called with few steps; those that need no training are held to their figures."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import graphattn as ga

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NAMES = sorted(p.stem for p in EXAMPLES.glob("*.py") if p.stem != "loop")
WITH_TEXT = {"communication", "positions", "break_the_mask", "masked_tokens", "qk_norm"}


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pydoc_data.topics import topics

    file = tmp_path_factory.mktemp("text") / "some.txt"
    file.write_text("".join(topics[name] for name in sorted(topics))[:30_000], encoding="utf-8")
    return file


@pytest.fixture
def call(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    def run(name: str, steps: int = 2, **options: Any) -> dict[str, Any]:
        if name in WITH_TEXT:
            options["text"] = str(text)
        torch.manual_seed(1337)
        found = importlib.import_module(name).main(steps=steps, out=str(tmp_path), **options)
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1].startswith("result: ")
        pictures = sorted(tmp_path.glob("*.png"))
        assert pictures and all(p.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for p in pictures)
        assert all(f"figure: {p}" in lines for p in pictures)
        return found

    yield run


def test_each_example_is_in_the_table() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert f"`{name}.py`" in page


def test_examples_run_as_commands(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "cross_head.py", "--steps", "2", "--out", str(tmp_path)]
    path = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": path})
    assert done.stdout.splitlines()[-1].startswith("result: ")
    assert (tmp_path / "cross_head.png").exists()


def test_communication(call: Any) -> None:
    found = call("communication")
    assert found["edges"] == 36 and found["degree"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert found["same_shape"] and found["differ"]


def test_positions(call: Any) -> None:
    found = call("positions")
    moved, bags = found["moved"], found["bags"]
    assert moved["full graph"] < 1e-12 < 0.01 < moved["causal graph"]
    assert moved["causal graph, permuted with the tokens"] < 1e-12
    assert bags["full, positions none"] < 1e-12
    assert min(value for name, value in bags.items() if name != "full, positions none") > 0.01
    assert found["leaked"] < 1e-9
    assert all(losses.shape == (64,) and losses.isfinite().all() for losses in found["position"].values())


def test_batch(call: Any) -> None:
    found = call("batch")
    assert found["never"] == [31, 30, 29, 28, 27, 26, 25, 24] and found["by_batch"] == 24
    assert found["difference"] < 1e-5
    assert found["crossing"]["attention"] == found["crossing"]["LayerNorm"] == 0 < 0.01 < found["crossing"]["BatchNorm"]


def test_break_the_mask(call: Any) -> None:
    found = call("break_the_mask")
    assert found["kept_leak"] is None and found["two"] is None and found["once"] is None
    assert str(found["leak"]) == "1 -> 0 in layer 1: target 0 reads its own label"
    assert len(found["twice"].path) == 2
    assert all(len(s) == 300 for s in found["samples"].values())


def test_masked_tokens(call: Any) -> None:
    found = call("masked_tokens")
    assert found["blind"] is None and found["sighted"] is not None
    assert found["padded"] < 1e-5
    assert 0 < found["unigram"] < 1


def test_masked_tokens_hides_what_it_asks_for(call: Any) -> None:
    module = importlib.import_module("masked_tokens")
    tokens = torch.randint(9, (50, 40))
    seen, targets = module.hide(tokens, 9, 3)
    chosen = targets >= 0
    assert torch.equal(targets[chosen], tokens[chosen]) and bool((seen[chosen] == 9).all())
    assert torch.equal(seen[~chosen], tokens[~chosen]) and 0.1 < float(chosen.float().mean()) < 0.2


def test_cross_head(call: Any) -> None:
    found = call("cross_head")
    assert found["wei"] == (2, 4, 6) and found["out"] == (2, 4, 16)
    assert found["difference"] < 1e-6


def test_translate(call: Any) -> None:
    found = call("translate")
    assert found["held_out"] == 399 and 0 <= found["there"] <= 1


def test_translate_numbers() -> None:
    module = importlib.import_module("translate")
    assert "".join(module.roman_of(1984)) == "MCMLXXXIV" and module.words_of(3000) == ["three", "thousand"]
    assert " ".join(module.words_of(1984)) == "one thousand nine hundred eighty four"
    values = dict(zip("IVXLCDM", (1, 5, 10, 50, 100, 500, 1000), strict=True))
    for n in range(1, module.MOST + 1):
        digits = [values[c] for c in module.roman_of(n)]
        signed = [-a if a < b else a for a, b in zip(digits, [*digits[1:], 0], strict=True)]
        assert sum(signed) == n
    for read in (module.words_of, module.roman_of):
        assert len({tuple(read(n)) for n in range(1, module.MOST + 1)}) == module.MOST
        # block 16 holds every source, and every answer with its end
        assert max(len(read(n)) for n in range(1, module.MOST + 1)) <= 15


def test_gated_cross_attention(call: Any) -> None:
    found = call("gated_cross_attention")
    assert found["same_at_0"] and found["unchanged"]
    assert found["true"] != found["shuffled"]  # the gates have opened, a little


def test_scaling(call: Any) -> None:
    found = call("scaling", steps=2)
    torch.testing.assert_close(torch.tensor(found["scaled"]), torch.tensor([0.36] * 3), atol=0.01, rtol=0)
    # the truth at head size 16 is 0.7494 +- 0.0005
    torch.testing.assert_close(torch.tensor(found["raw"]), torch.tensor([0.745, 0.875, 0.94]), atol=0.01, rtol=0)
    assert found["factor"] == pytest.approx(6**0.5)
    assert found["moved"]["key"] < 1e-12 and found["moved"]["query"] > 0.01
    assert found["soft"] < 0.3 < 0.7 < found["sharp"]


def test_qk_norm(call: Any) -> None:
    found = call("qk_norm")
    assert found["plain"] > 0 and 0 < found["normed"] < 10


# ---------------------------------------------------------------------- the models the examples share


def test_encoder_decoder_ignores_filler_and_the_future() -> None:
    from graphattn.gpt import GPTConfig
    from graphattn.seq2seq import EncoderDecoder, Graphs

    model = EncoderDecoder(GPTConfig(vocab=9, block=7, layers=2, heads=2, width=16)).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    lengths, s, t = [3, 7, 1], 7, 5
    source, target = torch.randint(9, (3, s)), torch.randint(9, (3, t))
    graphs = Graphs.of(lengths, s, t)
    logits, none = model(source, target, graphs)
    assert logits.shape == (3, t, 9) and none is None
    other = source.clone()
    other[0, 3:], other[2, 1:] = (source[0, 3:] + 1) % 9, (source[2, 1:] + 1) % 9
    later = target.clone()
    later[:, 3:] = (target[:, 3:] + 1) % 9
    same = model(other, later, graphs)[0]
    torch.testing.assert_close(same[:, :3], logits[:, :3])
    assert not torch.allclose(same[:, 3:], logits[:, 3:])
    # a sample alone, without its filler
    alone = model(source[:1, :3], target[:1], Graphs(ga.full(3), ga.causal(t), ga.bipartite(t, 3)))[0]
    torch.testing.assert_close(alone[0], logits[0])
    other[1, 6] = (source[1, 6] + 1) % 9
    assert not torch.allclose(model(other, target, graphs)[0][1], logits[1])


def test_greedy_takes_the_most_likely_token_and_stops() -> None:
    from graphattn.gpt import GPTConfig
    from graphattn.seq2seq import EncoderDecoder, Graphs

    model = EncoderDecoder(GPTConfig(vocab=6, block=9, layers=1, heads=2, width=16))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    lengths, start, stop = [2, 5, 3], 0, 1
    source = torch.randint(2, 6, (3, 5))
    found = model.greedy(source, lengths, start, stop, 8)
    assert found.shape[0] == 3 and 1 <= found.shape[1] <= 8
    for b in range(3):
        row = found[b].tolist()
        n = row.index(stop) + 1 if stop in row else len(row)
        assert all(x == stop for x in row[n:])
        given = torch.tensor([[start, *row[: n - 1]]])
        logits = model(source[b : b + 1], given, Graphs.of(lengths[b : b + 1], 5, n))[0]
        assert logits[0].argmax(-1).tolist() == row[:n]


def test_encoder_decoder_refuses_other_positions() -> None:
    from graphattn.gpt import GPTConfig
    from graphattn.seq2seq import EncoderDecoder

    with pytest.raises(ValueError, match="learned positions, got position='rotary'"):
        EncoderDecoder(GPTConfig(vocab=6, position="rotary"))


def test_conditioned_is_the_frozen_model_until_a_gate_opens() -> None:
    from graphattn.gpt import GPT, GPTConfig
    from graphattn.seq2seq import Conditioned

    model = GPT(GPTConfig(vocab=7, block=5, layers=2, heads=2, width=8))
    reader = Conditioned(model, context_dim=3)
    tokens, context, cross = torch.randint(7, (2, 5)), torch.randn(2, 4, 3), ga.bipartite(5, 4)
    with torch.no_grad():  # so that both go through the same backend
        plain = model(tokens, ga.causal(5))[0]
        assert torch.equal(reader(tokens, ga.causal(5), context, cross)[0], plain)
    learns = {name for name, p in reader.named_parameters() if p.requires_grad}
    assert learns and all(name.startswith("gated.") for name in learns)
    torch.nn.init.ones_(reader.gated[0].gate_attend)
    one = reader(tokens, ga.causal(5), context, cross)[0]
    assert not torch.allclose(one, plain)
    # only what the cross graph allows: source 3 is read by target 4 alone
    some = cross - ga.from_mask((torch.arange(4) == 3) & (torch.arange(5) < 4)[:, None])
    moved = context.clone()
    moved[:, 3] += 1
    a, b = (reader(tokens, ga.causal(5), c, some)[0] for c in (context, moved))
    assert torch.equal(a[:, :4], b[:, :4]) and not torch.equal(a[:, 4], b[:, 4])
