"""The models against torch's own layers and GPT-2's block, with the same weights."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphattn as ga
from graphattn.gpt import Block, GPTConfig
from graphattn.seq2seq import CrossBlock

B, T, S, HEADS, WIDTH = 3, 7, 11, 3, 12
SIZE = WIDTH // HEADS


def config(bias: bool = True) -> GPTConfig:
    return GPTConfig(vocab=5, block=T, layers=1, heads=HEADS, width=WIDTH, bias=bias)


def scramble(*modules: nn.Module) -> None:
    """Weights of ordinary size, biases and norms included: zeros and ones would hide a mistake."""
    for module in modules:
        for p in module.parameters():
            nn.init.normal_(p, mean=1.0 if p.dim() == 1 else 0.0, std=0.4)


def same(got: Tensor, wanted: Tensor) -> None:
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def take(ours: nn.Module, theirs: nn.Module) -> None:
    ours.load_state_dict(theirs.state_dict())


def take_attention(head: ga.Head, out: nn.Linear, theirs: nn.MultiheadAttention) -> None:
    """torch keeps the three projections as one matrix, unless the widths of the streams differ."""
    if theirs.in_proj_weight is not None:
        weights = theirs.in_proj_weight.chunk(3)
    else:
        weights = (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight)
    with torch.no_grad():
        for n, layer in enumerate((head.query, head.key, head.value)):
            layer.weight.copy_(weights[n])
            if theirs.in_proj_bias is not None:
                layer.bias.copy_(theirs.in_proj_bias.chunk(3)[n])
    take(out, theirs.out_proj)


def take_block(ours: Block, theirs: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> None:
    take_attention(ours.head, ours.out, theirs.self_attn)
    take(ours.norm1, theirs.norm1)
    take(ours.up, theirs.linear1)
    take(ours.down, theirs.linear2)
    if isinstance(ours, CrossBlock):
        take_attention(ours.cross, ours.out_cross, theirs.multihead_attn)
        take(ours.norm_cross, theirs.norm2)
        take(ours.norm2, theirs.norm3)
    else:
        take(ours.norm2, theirs.norm2)


# ---------------------------------------------------------------------- nn.MultiheadAttention


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("graph", ["full", "causal", "lopsided"])
def test_self_attention_is_torch_multihead_attention(graph: str, bias: bool) -> None:
    theirs = nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=True)
    head, out = ga.Head(WIDTH, SIZE, HEADS, bias=bias), nn.Linear(WIDTH, WIDTH, bias=bias)
    scramble(theirs)
    take_attention(head, out, theirs)
    g = {"full": ga.full(T), "causal": ga.causal(T), "lopsided": ga.band(T, 1, 3)}[graph]
    x = torch.randn(B, T, WIDTH)
    # torch's mask says where not to look
    wanted, weights = theirs(x, x, x, attn_mask=~ga.to_mask(g), average_attn_weights=False)
    same(out(head(x, g)), wanted)
    row, source = g.targets_sources()
    same(head.weights(x, g), weights[:, :, row, source])


def test_cross_attention_with_other_widths_and_padding_is_torch_multihead_attention() -> None:
    theirs = nn.MultiheadAttention(WIDTH, HEADS, kdim=5, vdim=5, batch_first=True)
    head, out = ga.Head(WIDTH, SIZE, HEADS, context_dim=5, bias=True), nn.Linear(WIDTH, WIDTH)
    scramble(theirs)
    take_attention(head, out, theirs)
    x, context, lengths = torch.randn(B, T, WIDTH), torch.randn(B, S, 5), torch.tensor([11, 2, 7])
    drop = torch.arange(S) >= lengths[:, None]
    wanted = theirs(x, context, context, key_padding_mask=drop, need_weights=False)[0]
    same(out(head(x, ga.padding(lengths, S, T), context)), wanted)


# ---------------------------------------------------------------------- nn.TransformerEncoderLayer, DecoderLayer


def encoder_layer(norm_first: bool) -> nn.TransformerEncoderLayer:
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=norm_first
    )
    scramble(layer)
    return layer  # in training mode: the other has a fused path of its own


def test_block_is_torch_encoder_layer() -> None:
    theirs, ours = encoder_layer(norm_first=True), Block(config())
    take_block(ours, theirs)
    x, lengths = torch.randn(B, T, WIDTH), torch.tensor([7, 3, 5])
    wanted = theirs(x, src_key_padding_mask=torch.arange(T) >= lengths[:, None])
    same(ours(x, ga.padding(lengths, T)), wanted)
    same(ours(x, ga.causal(T)), theirs(x, src_mask=nn.Transformer.generate_square_subsequent_mask(T)))


def test_block_has_the_gradients_of_torch_encoder_layer() -> None:
    theirs, ours = encoder_layer(norm_first=True), Block(config())
    take_block(ours, theirs)
    x, direction = torch.randn(B, T, WIDTH), torch.randn(B, T, WIDTH)
    mine, other = (x.clone().requires_grad_() for _ in range(2))
    (ours(mine, ga.causal(T)) * direction).sum().backward()
    (theirs(other, src_mask=~ga.to_mask(ga.causal(T))) * direction).sum().backward()
    torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4)
    stacked = torch.cat([layer.weight.grad for layer in (ours.head.query, ours.head.key, ours.head.value)])
    torch.testing.assert_close(stacked, theirs.self_attn.in_proj_weight.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padded", [False, True])
def test_the_parts_in_the_other_order_are_torch_post_norm_encoder_layer(padded: bool) -> None:
    theirs, ours = encoder_layer(norm_first=False), Block(config())
    take_block(ours, theirs)
    x, lengths = torch.randn(B, T, WIDTH), torch.tensor([7, 3, 5])
    g = ga.padding(lengths, T) if padded else ga.causal(T)
    y = ours.norm1(x + ours.out(ours.head(x, g)))
    got = ours.norm2(y + ours.down(F.gelu(ours.up(y))))
    if padded:
        same(got, theirs(x, src_key_padding_mask=torch.arange(T) >= lengths[:, None]))
    else:
        same(got, theirs(x, src_mask=~ga.to_mask(g)))


def decoder_layer(norm_first: bool) -> nn.TransformerDecoderLayer:
    layer = nn.TransformerDecoderLayer(
        WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=norm_first
    )
    scramble(layer)
    return layer


def in_the_order_of(ours: CrossBlock, norm_first: bool, x: Tensor, g: ga.Graph, memory: Tensor, c: ga.Graph) -> Tensor:
    """The block, which is pre-norm; or its parts as Vaswani et al. 2017 put them, each sum normalised."""
    if norm_first:
        return ours(x, g, memory, c)
    x = ours.norm1(x + ours.out(ours.head(x, g)))
    x = ours.norm_cross(x + ours.out_cross(ours.cross(x, c, memory)))
    return ours.norm2(x + ours.down(F.gelu(ours.up(x))))


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_cross_block_is_torch_decoder_layer(norm_first: bool) -> None:
    theirs, ours = decoder_layer(norm_first), CrossBlock(config())
    take_block(ours, theirs)
    x, memory, lengths = torch.randn(B, T, WIDTH), torch.randn(B, S, WIDTH), torch.tensor([4, 11, 1])
    g, c = ga.causal(T), ga.padding(lengths, S, T)
    wanted = theirs(x, memory, tgt_mask=~ga.to_mask(g), memory_key_padding_mask=torch.arange(S) >= lengths[:, None])
    same(in_the_order_of(ours, norm_first, x, g, memory, c), wanted)


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_cross_block_has_the_gradients_of_torch_decoder_layer(norm_first: bool) -> None:
    theirs, ours = decoder_layer(norm_first), CrossBlock(config())
    take_block(ours, theirs)
    x, memory, direction = torch.randn(B, T, WIDTH), torch.randn(B, S, WIDTH), torch.randn(B, T, WIDTH)
    mine, other = ([z.clone().requires_grad_() for z in (x, memory)] for _ in range(2))
    g, c = ga.band(T, 2, 1), ga.from_mask((torch.arange(T)[:, None] + torch.arange(S)) % 3 > 0)
    (in_the_order_of(ours, norm_first, mine[0], g, mine[1], c) * direction).sum().backward()
    (theirs(*other, tgt_mask=~ga.to_mask(g), memory_mask=~ga.to_mask(c)) * direction).sum().backward()
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)
    for head, attn in ((ours.head, theirs.self_attn), (ours.cross, theirs.multihead_attn)):
        stacked = torch.cat([layer.weight.grad for layer in (head.query, head.key, head.value)])
        torch.testing.assert_close(stacked, attn.in_proj_weight.grad, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------- GPT-2's block, as nanoGPT has it


def gpt2_block(w: dict[str, Tensor], x: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """Written from its description: one matrix for q, k, v side by side, pre-norm, exact GELU, biases optional."""

    def norm(name: str, y: Tensor) -> Tensor:
        return F.layer_norm(y, (WIDTH,), w[f"{name}.weight"], w.get(f"{name}.bias"), 1e-5)

    def linear(name: str, y: Tensor) -> Tensor:
        return F.linear(y, w[f"{name}.weight"], w.get(f"{name}.bias"))

    parts = linear("attn", norm("ln_1", x)).split(WIDTH, -1)
    q, k, v = (part.view(*x.shape[:2], HEADS, SIZE).transpose(1, 2) for part in parts)
    x = x + linear("attn_out", attend(q, k, v).transpose(1, 2).reshape(x.shape))
    return x + linear("mlp_out", F.gelu(linear("mlp", norm("ln_2", x))))


def by_kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT / math.sqrt(SIZE)).masked_fill(torch.ones(T, T).tril() == 0, -math.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("attend", [by_kernel, by_hand])
def test_block_is_the_causal_block_of_nanogpt(attend: Callable[..., Tensor], bias: bool) -> None:
    ours = Block(config(bias))
    scramble(ours)
    names = {"ln_1": ours.norm1, "attn_out": ours.out, "ln_2": ours.norm2, "mlp": ours.up, "mlp_out": ours.down}
    w = {f"{n}.{kind}": p for n, layer in names.items() for kind, p in layer.named_parameters()}
    projections = (ours.head.query, ours.head.key, ours.head.value)
    w["attn.weight"] = torch.cat([p.weight for p in projections])
    if bias:
        w["attn.bias"] = torch.cat([p.bias for p in projections])
    x = torch.randn(B, T, WIDTH)
    same(ours(x, ga.causal(T)), gpt2_block(w, x, attend))
