"""The kernels: one program per target (or source) and a block of heads on sparse graphs, tiles of both on denser ones.

Axes are named by their block sizes: BE edges, HB heads, BD and BDV the widths padded to powers of two, BM targets, BN
sources.  In the sparse kernels each of the BE lanes keeps a softmax of its own, and lanes are merged once at the end:
the loop over blocks of edges then reduces over the width alone.  Nothing is added atomically: a number has one owner.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


# ---------------------------------------------------------------------- seeded dropout, numerics.hash32 in 32 bits


@triton.jit
def _mix(h, word):
    x = word.to(tl.uint32) * 0xCC9E2D51
    x = ((x << 15) | (x >> 17)) * 0x1B873593
    h = h ^ x
    return ((h << 13) | (h >> 19)) * 5 + 0xE6546B64


@triton.jit
def _finish(h):
    h = h ^ 20  # bytes hashed
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _seeded(seed, b):
    """The hash after the seed and the batch index."""
    value = tl.load(seed)
    return _mix(_mix((value & 0xFFFFFFFF).to(tl.uint32), value >> 32), b)


@triton.jit
def _kept(state, word, threshold):
    """Whether the edge whose last word this is survives; threshold is below 2**32, in 64 bits."""
    return _finish(_mix(state, word)).to(tl.int64) >= threshold


# ---------------------------------------------------------------------- one block of edges


@triton.jit
def _leaky(z, slope):
    return tl.where(z > 0, z, z * slope)


@triton.jit
def _raw_score(q, k, vector, slope, KIND: tl.constexpr):
    """(BE, HB) from broadcastable (BE, HB, BD): the dot product, or GATv2's."""
    if KIND == 0:
        return tl.sum(q * k, 2)
    return tl.sum(_leaky(q + k, slope) * vector, 2)


@triton.jit
def _tanh(x):
    # by the exponential of a negative number, which cannot overflow
    e = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def _position(values, head, away, reach, width, mask, POS: tl.constexpr):
    """Alibi's or the table's bias at distance j - (i + offset); head and away broadcast."""
    if POS == 1:
        return -tl.load(values + head).to(tl.float32) * tl.abs(away).to(tl.float32)
    at = tl.minimum(tl.maximum(away, -reach), reach) + reach
    return tl.load(values + head * width + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _shaped(
    s, bias, place, position, head, away, cap, reach, width, mask, CAP: tl.constexpr, POS: tl.constexpr
):  # fmt: skip
    """Scaled scores with softcap, the bias at `place` and that of the distance; and softcap's slope for the gradient."""
    slack = s
    if CAP:
        bent = _tanh(s / cap)
        s = cap * bent
        slack = 1.0 - bent * bent
    if bias is not None:
        s += tl.load(bias + place, mask=mask, other=0.0).to(tl.float32)
    if POS > 0:
        s += _position(position, head, away, reach, width, mask, POS)
    return s, slack


@triton.jit
def _where_am_i(item_row, T, H, HG, HB: tl.constexpr, OWN_B: tl.constexpr, OWN_H: tl.constexpr):
    """Of this program: node within its leading index, batch index, heads (HB), and its place beside shared axes."""
    row = tl.load(item_row + tl.program_id(0)).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    heads = tl.program_id(1).to(tl.int64) * HB + tl.arange(0, HB)
    node = row
    if OWN_B or OWN_H:
        lead = row // T
        node = row - lead * T
        if OWN_B:
            b = lead // HG
        if OWN_H:
            heads = lead % HG + tl.arange(0, HB)
    return node, b, heads, heads < H


# ---------------------------------------------------------------------- sparse graphs: a program per target


@triton.jit
def rows_forward(
    q, k, v, out, lse, part_out, part_lse,
    item_row, item_begin, item_end, item_run, cols, run_start, run_stop, run_edge,
    bias, edge_key, edge_value, vector, position, seed,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sob, soh, sot, sbb, sbh, ske, skeh, sve, sveh,
    T, H, HG, NB, NH, scale, cap, slope, offset, reach, width, threshold, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BE: tl.constexpr, HB: tl.constexpr,
    GROUP: tl.constexpr, KIND: tl.constexpr, RUNS: tl.constexpr, WIDE: tl.constexpr, POS: tl.constexpr,
    CAP: tl.constexpr, DROP: tl.constexpr, SPLIT: tl.constexpr, OWN_B: tl.constexpr, OWN_H: tl.constexpr,
):  # fmt: skip
    i, b, heads, hmask = _where_am_i(item_row, T, H, HG, HB, OWN_B, OWN_H)
    item = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(item_begin + item), tl.load(item_end + item)
    d, dv = tl.arange(0, BD), tl.arange(0, BDV)
    qmask = hmask[:, None] & (d < D)[None, :]
    query = tl.load(q + b * sqb + heads[:, None] * sqh + i * sqt + d[None, :], mask=qmask, other=0.0).to(tl.float32)
    query = query[None, :, :]
    vec = query
    if KIND == 1:
        vec = tl.load(vector + heads[:, None] * D + d[None, :], mask=qmask, other=0.0).to(tl.float32)[None, :, :]
    kbase = k + b * skb + (heads // GROUP)[None, :, None] * skh + d[None, None, :]
    vbase = v + b * svb + (heads // GROUP)[None, :, None] * svh + dv[None, None, :]
    if DROP:
        state = _mix(_mix(_seeded(seed, b), heads[None, :]), i)
    m = tl.full((BE, HB), float("-inf"), tl.float32)
    total = tl.zeros((BE, HB), tl.float32)
    acc = tl.zeros((BE, HB, BDV), tl.float32)
    first_run, last_run = 0, 1
    if RUNS:
        first_run, last_run = tl.load(item_run + 2 * item), tl.load(item_run + 2 * item + 1)
    for r in range(first_run, last_run):
        low, high, shift = begin, end, begin * 0
        if RUNS:
            # of this run, the sources whose edges are in [begin, end)
            shift = tl.load(run_edge + r) - tl.load(run_start + r)
            low = tl.maximum(tl.load(run_start + r), begin - shift)
            high = tl.minimum(tl.load(run_stop + r), end - shift)
        for x in range(low, high, BE):
            at = x + tl.arange(0, BE)
            inside = at < high
            if RUNS:
                j, edge = at, (at + shift).to(tl.int64)
            else:
                j, edge = tl.load(cols + at, mask=inside, other=0), at.to(tl.int64)
            if WIDE:
                j = j.to(tl.int64)
            mask = inside[:, None] & hmask[None, :]
            wmask = mask[:, :, None]
            key = tl.load(kbase + j[:, None, None] * skt, mask=wmask & (d < D)[None, None, :], other=0.0).to(tl.float32)
            if edge_key is not None:
                extra = edge_key + edge[:, None, None] * ske + heads[None, :, None] * skeh + d[None, None, :]
                key += tl.load(extra, mask=wmask & (d < D)[None, None, :], other=0.0).to(tl.float32)
            s = _raw_score(query, key, vec, slope, KIND) * scale
            s, _ = _shaped(
                s, bias, b * sbb + heads[None, :] * sbh + edge[:, None], position, heads[None, :] * hmask,
                (j - i - offset)[:, None], cap, reach, width, mask, CAP, POS,
            )  # fmt: skip
            s = tl.where(mask, s, float("-inf"))
            peak = tl.maximum(m, s)
            base = tl.where(peak == float("-inf"), 0.0, peak)
            p = tl.exp(s - base)
            fade = tl.exp(m - base)
            m = peak
            total = total * fade + p
            if DROP:
                p = tl.where(_kept(state, j[:, None], threshold), p, 0.0)
            vmask = wmask & (dv < DV)[None, None, :]
            value = tl.load(vbase + j[:, None, None] * svt, mask=vmask, other=0.0).to(tl.float32)
            if edge_value is not None:
                extra = edge_value + edge[:, None, None] * sve + heads[None, :, None] * sveh + dv[None, None, :]
                value += tl.load(extra, mask=vmask, other=0.0).to(tl.float32)
            acc = acc * fade[:, :, None] + p[:, :, None] * value
    # merge the lanes
    peak = tl.max(m, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    share = tl.exp(m - base[None, :])
    mass = tl.sum(share * total, 0)
    result = tl.sum(share[:, :, None] * acc, 0) * keep_scale
    log = tl.where(mass == 0.0, float("-inf"), tl.log(mass) + base)
    omask = hmask[:, None] & (dv < DV)[None, :]
    if SPLIT:
        result = result / tl.where(mass == 0.0, 1.0, mass)[:, None]
        slot = item
        place = (slot * NB + tl.program_id(2)) * NH + tl.program_id(1) * HB + tl.arange(0, HB)
        tl.store(part_out + place[:, None] * DV + dv[None, :], result, mask=omask)
        tl.store(part_lse + place, log, mask=hmask)
    else:
        # a row without edges is 0; a row whose scores are all -inf is 0 / 0, as softmax has it
        result = result / tl.where(begin == end, 1.0, mass)[:, None]
        tl.store(out + b * sob + heads[:, None] * soh + i * sot + dv[None, :], result, mask=omask)
        tl.store(lse + (b * H + heads) * T + i, log, mask=hmask)


@triton.jit
def merge_parts(
    part_out, part_lse, out, lse, hub_row, hub_ptr, sob, soh, sot, T, H, HG, NB, NH,
    DV: tl.constexpr, BDV: tl.constexpr, BS: tl.constexpr, OWN_B: tl.constexpr, OWN_H: tl.constexpr,
):  # fmt: skip
    """Unite the parts of a target that was split, by their log-sum-exp, in order."""
    i, b, heads, _ = _where_am_i(hub_row, T, H, HG, 1, OWN_B, OWN_H)
    first, last = tl.load(hub_ptr + tl.program_id(0)), tl.load(hub_ptr + tl.program_id(0) + 1)
    dv = tl.arange(0, BDV)
    m = tl.full((BS,), float("-inf"), tl.float32)
    total = tl.zeros((BS,), tl.float32)
    acc = tl.zeros((BS, BDV), tl.float32)
    for x in range(first, last, BS):
        slot = x + tl.arange(0, BS)
        inside = slot < last
        place = (slot.to(tl.int64) * NB + tl.program_id(2)) * NH + tl.program_id(1)
        s = tl.load(part_lse + place, mask=inside, other=float("-inf"))
        mask = inside[:, None] & (dv < DV)[None, :]
        value = tl.load(part_out + place[:, None] * DV + dv[None, :], mask=mask, other=0.0)
        peak = tl.maximum(m, s)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        p, fade = tl.exp(s - base), tl.exp(m - base)
        m = peak
        total = total * fade + p
        acc = acc * fade[:, None] + p[:, None] * value
    peak = tl.max(m, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    share = tl.exp(m - base)
    mass = tl.sum(share * total, 0)
    result = tl.sum(share[:, None] * acc, 0) / mass
    log = tl.where(mass == 0.0, float("-inf"), tl.log(mass) + base)
    at = out + b * sob + heads[:, None] * soh + i * sot + dv[None, :]
    tl.store(at, result[None, :], mask=(dv < DV)[None, :])
    tl.store(lse + (b * H + heads) * T + i, log)


@triton.jit
def sum_parts(
    part, out, hub_row, hub_ptr, T, H, HG, NB, NH,
    D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, OWN_B: tl.constexpr, OWN_H: tl.constexpr,
):  # fmt: skip
    """Add the parts of a split node's gradient, in order, into out (B, H, T, D)."""
    i, b, heads, _ = _where_am_i(hub_row, T, H, HG, 1, OWN_B, OWN_H)
    first, last = tl.load(hub_ptr + tl.program_id(0)), tl.load(hub_ptr + tl.program_id(0) + 1)
    d = tl.arange(0, BD)
    acc = tl.zeros((BS, BD), tl.float32)
    for x in range(first, last, BS):
        slot = x + tl.arange(0, BS)
        mask = (slot < last)[:, None] & (d < D)[None, :]
        place = (slot.to(tl.int64) * NB + tl.program_id(2)) * NH + tl.program_id(1)
        acc += tl.load(part + place[:, None] * D + d[None, :], mask=mask, other=0.0)
    at = out + ((b * H + heads[:, None]) * T + i) * D + d[None, :]
    tl.store(at, tl.sum(acc, 0)[None, :], mask=(d < D)[None, :])


@triton.jit
def row_delta(
    out, dout, dlse, delta, sob, soh, sot, sdb, sdh, sdt, slb, slh, slt, H, T,
    DV: tl.constexpr, BDV: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """delta (B, H, T) = <dout, out> - dlse: what every edge's gradient has in common within a row."""
    i = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    b, h = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    dv = tl.arange(0, BDV)
    mask = (i < T)[:, None] & (dv < DV)[None, :]
    o = tl.load(out + b * sob + h * soh + i[:, None] * sot + dv[None, :], mask=mask, other=0.0).to(tl.float32)
    g = tl.load(dout + b * sdb + h * sdh + i[:, None] * sdt + dv[None, :], mask=mask, other=0.0).to(tl.float32)
    total = tl.sum(o * g, 1)
    if dlse is not None:
        total -= tl.load(dlse + b * slb + h * slh + i * slt, mask=i < T, other=0.0)
    tl.store(delta + (b * H + h) * T + i, total, mask=i < T)


@triton.jit
def rows_backward_targets(
    q, k, v, dout, lse, delta, dq, part_dq, dbias, dedge_key, dedge_value, dvector, dslope,
    item_row, item_begin, item_end, item_run, cols, run_start, run_stop, run_edge,
    bias, edge_key, edge_value, vector, position, seed,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sdb, sdh, sdt, sbb, sbh, ske, skeh, sve, sveh,
    T, H, HG, NB, NH, E, first_item, first_batch,
    scale, cap, slope, offset, reach, width, threshold, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BE: tl.constexpr, HB: tl.constexpr,
    GROUP: tl.constexpr, KIND: tl.constexpr, RUNS: tl.constexpr, WIDE: tl.constexpr, POS: tl.constexpr,
    CAP: tl.constexpr, DROP: tl.constexpr, SPLIT: tl.constexpr, OWN_B: tl.constexpr, OWN_H: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """dQ, and what belongs to an edge (bias, its key and value) or is summed over edges of a row."""
    i, b, heads, hmask = _where_am_i(item_row, T, H, HG, HB, OWN_B, OWN_H)
    z = tl.program_id(2).to(tl.int64) + first_batch
    if not OWN_B:
        b = z
    item = tl.program_id(0).to(tl.int64)
    local = tl.program_id(1).to(tl.int64) * HB + tl.arange(0, HB)  # heads among those that share the graph
    begin, end = tl.load(item_begin + item), tl.load(item_end + item)
    d, dv = tl.arange(0, BD), tl.arange(0, BDV)
    qmask = hmask[:, None] & (d < D)[None, :]
    query = tl.load(q + b * sqb + heads[:, None] * sqh + i * sqt + d[None, :], mask=qmask, other=0.0).to(tl.float32)
    query = query[None, :, :]
    gmask = hmask[:, None] & (dv < DV)[None, :]
    g = tl.load(dout + b * sdb + heads[:, None] * sdh + i * sdt + dv[None, :], mask=gmask, other=0.0).to(tl.float32)
    g = g[None, :, :]
    stat = (b * H + heads) * T + i
    log = tl.load(lse + stat, mask=hmask, other=0.0)[None, :]
    common = tl.load(delta + stat, mask=hmask, other=0.0)[None, :]
    vec = query
    if KIND == 1:
        vec = tl.load(vector + heads[:, None] * D + d[None, :], mask=qmask, other=0.0).to(tl.float32)[None, :, :]
    kbase = k + b * skb + (heads // GROUP)[None, :, None] * skh + d[None, None, :]
    vbase = v + b * svb + (heads // GROUP)[None, :, None] * svh + dv[None, None, :]
    if DROP:
        state = _mix(_mix(_seeded(seed, b), heads[None, :]), i)
    acc = tl.zeros((BE, HB, BD), tl.float32)
    if dvector is not None:
        acc_vector = tl.zeros((BE, HB, BD), tl.float32)
    if dslope is not None:
        acc_slope = tl.zeros((BE, HB), tl.float32)
    first_run, last_run = 0, 1
    if RUNS:
        first_run, last_run = tl.load(item_run + 2 * item), tl.load(item_run + 2 * item + 1)
    for r in range(first_run, last_run):
        low, high, shift = begin, end, begin * 0
        if RUNS:
            shift = tl.load(run_edge + r) - tl.load(run_start + r)
            low = tl.maximum(tl.load(run_start + r), begin - shift)
            high = tl.minimum(tl.load(run_stop + r), end - shift)
        for x in range(low, high, BE):
            at = x + tl.arange(0, BE)
            inside = at < high
            if RUNS:
                j, edge = at, (at + shift).to(tl.int64)
            else:
                j, edge = tl.load(cols + at, mask=inside, other=0), at.to(tl.int64)
            if WIDE:
                j = j.to(tl.int64)
            mask = inside[:, None] & hmask[None, :]
            wmask = mask[:, :, None]
            kmask = wmask & (d < D)[None, None, :]
            vmask = wmask & (dv < DV)[None, None, :]
            key = tl.load(kbase + j[:, None, None] * skt, mask=kmask, other=0.0).to(tl.float32)
            if edge_key is not None:
                extra = edge_key + edge[:, None, None] * ske + heads[None, :, None] * skeh + d[None, None, :]
                key += tl.load(extra, mask=kmask, other=0.0).to(tl.float32)
            s = _raw_score(query, key, vec, slope, KIND) * scale
            s, slack = _shaped(
                s, bias, b * sbb + heads[None, :] * sbh + edge[:, None], position, heads[None, :] * hmask,
                (j - i - offset)[:, None], cap, reach, width, mask, CAP, POS,
            )  # fmt: skip
            p = tl.where(mask, tl.exp(s - log), 0.0)
            value = tl.load(vbase + j[:, None, None] * svt, mask=vmask, other=0.0).to(tl.float32)
            if edge_value is not None:
                extra = edge_value + edge[:, None, None] * sve + heads[None, :, None] * sveh + dv[None, None, :]
                value += tl.load(extra, mask=vmask, other=0.0).to(tl.float32)
            dp = tl.sum(g * value, 2)
            if DROP:
                kept = tl.where(_kept(state, j[:, None], threshold), keep_scale, 0.0)
                dp = dp * kept
            ds = tl.where(mask, p * (dp - common), 0.0)
            if dbias is not None:
                place = dbias + ((b if not OWN_B else b * 0) * NH + local[None, :]) * E + edge[:, None]
                tl.store(place, ds, mask=mask)
            if dslope is not None:
                acc_slope -= ds * tl.abs(j - i - offset).to(tl.float32)[:, None]
            if dedge_value is not None:
                weight = p
                if DROP:
                    weight = p * kept
                place = dedge_value + (edge[:, None, None] * NH + local[None, :, None]) * DV + dv[None, None, :]
                extra = weight[:, :, None] * g
                if ADD:
                    extra += tl.load(place, mask=vmask, other=0.0)
                tl.store(place, extra, mask=vmask)
            if CAP:
                ds = ds * slack
            ds = (ds * scale)[:, :, None]
            if KIND == 0:
                pull = ds * query
                acc += ds * key
            else:
                pair = query + key
                pull = ds * vec * tl.where(pair > 0, 1.0, slope)
                acc += pull
                if dvector is not None:
                    acc_vector += ds * _leaky(pair, slope)
            if dedge_key is not None:
                place = dedge_key + (edge[:, None, None] * NH + local[None, :, None]) * D + d[None, None, :]
                if ADD:
                    pull += tl.load(place, mask=kmask, other=0.0)
                tl.store(place, pull, mask=kmask)
    result = tl.sum(acc, 0)
    if SPLIT:
        place = (item * NB + z) * NH + local
        tl.store(part_dq + place[:, None] * D + d[None, :], result, mask=qmask)
    else:
        tl.store(dq + stat[:, None] * D + d[None, :], result, mask=qmask)
    place = ((first_item + item) * NB + z) * NH + local
    if dvector is not None:
        tl.store(dvector + place[:, None] * D + d[None, :], tl.sum(acc_vector, 0), mask=qmask)
    if dslope is not None:
        tl.store(dslope + place, tl.sum(acc_slope, 0), mask=hmask)


@triton.jit
def rows_backward_sources(
    q, k, v, dout, lse, delta, dk, dv_out, part_dk, part_dv,
    item_row, item_begin, item_end, targets, edges,
    bias, edge_key, edge_value, vector, position, seed,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sdb, sdh, sdt, sbb, sbh, ske, skeh, sve, sveh,
    S, T, H, HN, HG, NB, NH, scale, cap, slope, offset, reach, width, threshold, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BE: tl.constexpr, HB: tl.constexpr,
    GROUP: tl.constexpr, LOOP: tl.constexpr, KIND: tl.constexpr, WIDE: tl.constexpr, POS: tl.constexpr,
    CAP: tl.constexpr, DROP: tl.constexpr, SPLIT: tl.constexpr, OWN_B: tl.constexpr, OWN_H: tl.constexpr,
):  # fmt: skip
    """dK and dV of a source, over the targets that read it; HN heads, each for LOOP query heads."""
    j, b, own, hmask = _where_am_i(item_row, S, HN, HG, HB, OWN_B, OWN_H)
    item = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(item_begin + item), tl.load(item_end + item)
    d, dv = tl.arange(0, BD), tl.arange(0, BDV)
    kv_head = own * LOOP // GROUP
    kmask = hmask[:, None] & (d < D)[None, :]
    vmask = hmask[:, None] & (dv < DV)[None, :]
    key = tl.load(k + b * skb + kv_head[:, None] * skh + j * skt + d[None, :], mask=kmask, other=0.0).to(tl.float32)
    value = tl.load(v + b * svb + kv_head[:, None] * svh + j * svt + dv[None, :], mask=vmask, other=0.0).to(tl.float32)
    acc_k = tl.zeros((BE, HB, BD), tl.float32)
    acc_v = tl.zeros((BE, HB, BDV), tl.float32)
    for member in range(LOOP):
        heads = own * LOOP + member
        vec = key[None, :, :]
        if KIND == 1:
            vec = tl.load(vector + heads[:, None] * D + d[None, :], mask=kmask, other=0.0).to(tl.float32)[None, :, :]
        if DROP:
            state = _mix(_seeded(seed, b), heads[None, :])
        for x in range(begin, end, BE):
            at = x + tl.arange(0, BE)
            inside = at < end
            i = tl.load(targets + at, mask=inside, other=0)
            edge = i
            if edges is not None:
                edge = tl.load(edges + at, mask=inside, other=0).to(tl.int64)
            if WIDE:
                i = i.to(tl.int64)
            mask = inside[:, None] & hmask[None, :]
            wmask = mask[:, :, None]
            qmask = wmask & (d < D)[None, None, :]
            gmask = wmask & (dv < DV)[None, None, :]
            head3 = heads[None, :, None]
            query = tl.load(
                q + b * sqb + head3 * sqh + i[:, None, None] * sqt + d[None, None, :], mask=qmask, other=0.0
            ).to(tl.float32)
            this_key = key[None, :, :]
            if edge_key is not None:
                extra = edge_key + edge[:, None, None] * ske + head3 * skeh + d[None, None, :]
                this_key = this_key + tl.load(extra, mask=qmask, other=0.0).to(tl.float32)
            s = _raw_score(query, this_key, vec, slope, KIND) * scale
            s, slack = _shaped(
                s, bias, b * sbb + heads[None, :] * sbh + edge[:, None], position, heads[None, :] * hmask,
                (j - i - offset)[:, None], cap, reach, width, mask, CAP, POS,
            )  # fmt: skip
            stat = (b * H + heads[None, :]) * T + i[:, None]
            p = tl.where(mask, tl.exp(s - tl.load(lse + stat, mask=mask, other=0.0)), 0.0)
            g = tl.load(
                dout + b * sdb + head3 * sdh + i[:, None, None] * sdt + dv[None, None, :], mask=gmask, other=0.0
            ).to(tl.float32)
            this_value = value[None, :, :]
            if edge_value is not None:
                extra = edge_value + edge[:, None, None] * sve + head3 * sveh + dv[None, None, :]
                this_value = this_value + tl.load(extra, mask=gmask, other=0.0).to(tl.float32)
            dp = tl.sum(g * this_value, 2)
            weight = p
            if DROP:
                kept = tl.where(_kept(_mix(state, i[:, None]), j, threshold), keep_scale, 0.0)
                dp = dp * kept
                weight = p * kept
            acc_v += weight[:, :, None] * g
            ds = tl.where(mask, p * (dp - tl.load(delta + stat, mask=mask, other=0.0)), 0.0)
            if CAP:
                ds = ds * slack
            ds = (ds * scale)[:, :, None]
            if KIND == 0:
                acc_k += ds * query
            else:
                acc_k += ds * vec * tl.where(query + this_key > 0, 1.0, slope)
    result_k, result_v = tl.sum(acc_k, 0), tl.sum(acc_v, 0)
    if SPLIT:
        place = (item * NB + tl.program_id(2)) * NH + tl.program_id(1) * HB + tl.arange(0, HB)
        tl.store(part_dk + place[:, None] * D + d[None, :], result_k, mask=kmask)
        tl.store(part_dv + place[:, None] * DV + dv[None, :], result_v, mask=vmask)
    else:
        place = (b * HN + own) * S + j
        tl.store(dk + place[:, None] * D + d[None, :], result_k, mask=kmask)
        tl.store(dv_out + place[:, None] * DV + dv[None, :], result_v, mask=vmask)


@triton.jit
def runs_backward_sources(
    q, k, v, dout, lse, delta, dk, dv_out,
    list_ptr, list_run, run_row, run_start, run_stop, run_edge,
    bias, edge_key, edge_value, vector, position, seed,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sdb, sdh, sdt, sbb, sbh, ske, skeh, sve, sveh,
    S, T, H, HN, HG, NK, scale, cap, slope, offset, reach, width, threshold, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
    GROUP: tl.constexpr, LOOP: tl.constexpr, KIND: tl.constexpr, POS: tl.constexpr,
    CAP: tl.constexpr, DROP: tl.constexpr, OWN_B: tl.constexpr, OWN_H: tl.constexpr,
):  # fmt: skip
    """dK and dV of a block of BS sources, over the runs that meet it, BT at a time: runs are never transposed."""
    block = tl.program_id(0).to(tl.int64)
    b, own = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    lead = block // NK
    base_row = lead * T
    if OWN_B:
        b = lead // HG
    if OWN_H:
        own = lead % HG
    j = (block - lead * NK) * BS + tl.arange(0, BS)
    d, dv = tl.arange(0, BD), tl.arange(0, BDV)
    kv_head = own * LOOP // GROUP
    kmask = (j < S)[:, None] & (d < D)[None, :]
    vmask = (j < S)[:, None] & (dv < DV)[None, :]
    key = tl.load(k + b * skb + kv_head * skh + j[:, None] * skt + d[None, :], mask=kmask, other=0.0).to(tl.float32)
    value = tl.load(v + b * svb + kv_head * svh + j[:, None] * svt + dv[None, :], mask=vmask, other=0.0).to(tl.float32)
    acc_k = tl.zeros((BT, BS, BD), tl.float32)
    acc_v = tl.zeros((BT, BS, BDV), tl.float32)
    first, last = tl.load(list_ptr + block), tl.load(list_ptr + block + 1)
    for member in range(LOOP):
        head = own * LOOP + member
        vec = key[None, :, :]
        if KIND == 1:
            vec = tl.load(vector + head * D + d, mask=d < D, other=0.0).to(tl.float32)[None, None, :]
        if DROP:
            state = _mix(_seeded(seed, b), head)
        for x in range(first, last, BT):
            at = x + tl.arange(0, BT)
            live = at < last
            run = tl.load(list_run + at, mask=live, other=0)
            i = tl.load(run_row + run, mask=live, other=0).to(tl.int64) - base_row
            low = tl.load(run_start + run, mask=live, other=0)
            high = tl.load(run_stop + run, mask=live, other=0)
            mask = (j[None, :] >= low[:, None]) & (j[None, :] < high[:, None]) & live[:, None]
            edge = tl.load(run_edge + run, mask=live, other=0)[:, None] + j[None, :] - low[:, None]
            qmask = live[:, None] & (d < D)[None, :]
            query = tl.load(q + b * sqb + head * sqh + i[:, None] * sqt + d[None, :], mask=qmask, other=0.0)
            query = query.to(tl.float32)[:, None, :]
            this_key = key[None, :, :]
            if edge_key is not None:
                extra = edge_key + edge[:, :, None] * ske + head * skeh + d[None, None, :]
                emask = mask[:, :, None] & (d < D)[None, None, :]
                this_key = this_key + tl.load(extra, mask=emask, other=0.0).to(tl.float32)
            s = _raw_score(query, this_key, vec, slope, KIND) * scale
            s, slack = _shaped(
                s, bias, b * sbb + head * sbh + edge, position, head, j[None, :] - i[:, None] - offset, cap, reach,
                width, mask, CAP, POS,
            )  # fmt: skip
            stat = (b * H + head) * T + i
            log = tl.load(lse + stat, mask=live, other=0.0)
            p = tl.where(mask, tl.exp(s - log[:, None]), 0.0)
            gmask = live[:, None] & (dv < DV)[None, :]
            g = tl.load(dout + b * sdb + head * sdh + i[:, None] * sdt + dv[None, :], mask=gmask, other=0.0)
            g = g.to(tl.float32)[:, None, :]
            this_value = value[None, :, :]
            if edge_value is not None:
                extra = edge_value + edge[:, :, None] * sve + head * sveh + dv[None, None, :]
                emask = mask[:, :, None] & (dv < DV)[None, None, :]
                this_value = this_value + tl.load(extra, mask=emask, other=0.0).to(tl.float32)
            dp = tl.sum(g * this_value, 2)
            weight = p
            if DROP:
                kept = tl.where(_kept(_mix(state, i[:, None]), j[None, :], threshold), keep_scale, 0.0)
                dp = dp * kept
                weight = p * kept
            # 0 times a NaN of a target that does not read this source would spread it
            acc_v += tl.where(mask[:, :, None], weight[:, :, None] * g, 0.0)
            ds = p * (dp - tl.load(delta + stat, mask=live, other=0.0)[:, None])
            if CAP:
                ds = ds * slack
            ds = (ds * scale)[:, :, None]
            pull = ds * query if KIND == 0 else ds * vec * tl.where(query + this_key > 0, 1.0, slope)
            acc_k += tl.where(mask[:, :, None], pull, 0.0)
    place = (b * HN + own) * S + j
    tl.store(dk + place[:, None] * D + d[None, :], tl.sum(acc_k, 0), mask=kmask)
    tl.store(dv_out + place[:, None] * DV + dv[None, :], tl.sum(acc_v, 0), mask=vmask)


# ---------------------------------------------------------------------- denser graphs: tiles on the matrix units


@triton.jit
def _read(
    some_id, start, stop, bits, i, j, row0, T, S, BM: tl.constexpr, BN: tl.constexpr, ENDS: tl.constexpr
):  # fmt: skip
    """Which pairs of broadcastable targets i and sources j of a tile are edges: by bounds, or by the tile's bits."""
    known = (i < T) & (j < S)
    if ENDS == 0:
        WORDS: tl.constexpr = (BN + 31) // 32
        word = bits + some_id.to(tl.int64) * (BM * WORDS) + i % BM * WORDS + j % BN // 32
        return known & (((tl.load(word) >> (j % (32 if BN >= 32 else BN))) & 1) == 1)
    inside = known & (i < 0)
    for r in tl.static_range(ENDS):
        low = tl.load(start + (row0 + i) * ENDS + r, mask=i < T, other=0)
        high = tl.load(stop + (row0 + i) * ENDS + r, mask=i < T, other=0)
        inside = inside | ((j >= low) & (j < high))
    return known & inside


@triton.jit
def tiles_forward(
    q, k, v, out, lse, all_ptr, all_start, all_stop, some_ptr, some_start, some_stop, some_edge,
    start, stop, bits, position, seed,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sob, soh, sot,
    T, S, H, HG, NQ, scale, cap, offset, reach, width, threshold, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    GROUP: tl.constexpr, ENDS: tl.constexpr, POS: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr,
    PAD: tl.constexpr, OWN_B: tl.constexpr, OWN_H: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # later targets of causal graphs read most: start them first
    block = NQ - 1 - tl.program_id(0)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    lead = b * 0
    if OWN_B:
        lead += b * HG
    if OWN_H:
        lead += h
    i = block * BM + tl.arange(0, BM)
    i64 = i.to(tl.int64)
    d, dv = tl.arange(0, BD), tl.arange(0, BDV)
    query = tl.load(
        q + b * sqb + h * sqh + i64[:, None] * sqt + d[None, :], mask=(i < T)[:, None] & (d < D)[None, :], other=0.0
    )
    kbase = k + b * skb + (h // GROUP) * skh
    vbase = v + b * svb + (h // GROUP) * svh
    if DROP:
        state = _mix(_mix(_seeded(seed, b), h), i[:, None])
    m = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BDV), tl.float32)
    row = lead * NQ + block
    for part in tl.static_range(2):
        if part == 0:
            first, last = tl.load(all_ptr + row), tl.load(all_ptr + row + 1)
        else:
            first, last = tl.load(some_ptr + row), tl.load(some_ptr + row + 1)
        for r in range(first, last):
            if part == 0:
                low, high = tl.load(all_start + r), tl.load(all_stop + r)
                shift = low
            else:
                low, high = tl.load(some_start + r), tl.load(some_stop + r)
                shift = tl.load(some_edge + r) - low
            for n in range(low, high):
                j = n * BN + tl.arange(0, BN)
                j64 = j.to(tl.int64)
                jmask = j < S
                key = tl.load(
                    kbase + j64[None, :] * skt + d[:, None],
                    mask=(jmask[None, :] if PAD else (j >= 0)[None, :]) & (d < D)[:, None],
                    other=0.0,
                )
                s = tl.dot(query, key, input_precision=PRECISION) * scale
                away, known = j[None, :] - i[:, None] - offset, (i < T)[:, None] & (j < S)[None, :]
                s, _ = _shaped(s, None, 0, position, h, away, cap, reach, width, known, CAP, POS)
                if part == 1:
                    seen = _read(n + shift, start, stop, bits, i[:, None], j[None, :], lead * T, T, S, BM, BN, ENDS)
                    s = tl.where(seen, s, float("-inf"))
                elif PAD:
                    s = tl.where(jmask[None, :], s, float("-inf"))
                peak = tl.maximum(m, tl.max(s, 1))
                base = tl.where(peak == float("-inf"), 0.0, peak)
                p = tl.exp2(s * LOG2E - (base * LOG2E)[:, None])
                fade = tl.exp2((m - base) * LOG2E)
                m = peak
                total = total * fade + tl.sum(p, 1)
                if DROP:
                    p = tl.where(_kept(state, j[None, :], threshold), p, 0.0)
                value = tl.load(
                    vbase + j64[:, None] * svt + dv[None, :],
                    mask=(jmask[:, None] if PAD else (j >= 0)[:, None]) & (dv < DV)[None, :],
                    other=0.0,
                )
                acc = acc * fade[:, None]
                acc = tl.dot(p.to(value.dtype), value, acc, input_precision=PRECISION)
    log = tl.where(total == 0.0, float("-inf"), tl.log(total) + tl.where(m == float("-inf"), 0.0, m))
    # a target that reads nothing: 0
    result = acc * (keep_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    omask = (i < T)[:, None] & (dv < DV)[None, :]
    tl.store(out + b * sob + h * soh + i64[:, None] * sot + dv[None, :], result, mask=omask)
    tl.store(lse + (b * H + h) * T + i, log, mask=i < T)


@triton.jit
def tiles_backward_targets(
    q, k, v, dout, lse, delta, dq, all_ptr, all_start, all_stop, some_ptr, some_start, some_stop, some_edge,
    start, stop, bits, position, seed,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sdb, sdh, sdt,
    T, S, H, HG, NQ, scale, cap, offset, reach, width, threshold, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    GROUP: tl.constexpr, ENDS: tl.constexpr, POS: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr,
    PAD: tl.constexpr, OWN_B: tl.constexpr, OWN_H: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block = NQ - 1 - tl.program_id(0)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    lead = b * 0
    if OWN_B:
        lead += b * HG
    if OWN_H:
        lead += h
    i = block * BM + tl.arange(0, BM)
    i64 = i.to(tl.int64)
    d, dv = tl.arange(0, BD), tl.arange(0, BDV)
    qmask = (i < T)[:, None] & (d < D)[None, :]
    query = tl.load(q + b * sqb + h * sqh + i64[:, None] * sqt + d[None, :], mask=qmask, other=0.0)
    gmask = (i < T)[:, None] & (dv < DV)[None, :]
    g = tl.load(dout + b * sdb + h * sdh + i64[:, None] * sdt + dv[None, :], mask=gmask, other=0.0)
    stat = (b * H + h) * T + i
    log = tl.load(lse + stat, mask=i < T, other=0.0)
    log = tl.where(log == float("-inf"), 0.0, log) * LOG2E
    common = tl.load(delta + stat, mask=i < T, other=0.0)
    kbase = k + b * skb + (h // GROUP) * skh
    vbase = v + b * svb + (h // GROUP) * svh
    if DROP:
        state = _mix(_mix(_seeded(seed, b), h), i[:, None])
    acc = tl.zeros((BM, BD), tl.float32)
    row = lead * NQ + block
    for part in tl.static_range(2):
        if part == 0:
            first, last = tl.load(all_ptr + row), tl.load(all_ptr + row + 1)
        else:
            first, last = tl.load(some_ptr + row), tl.load(some_ptr + row + 1)
        for r in range(first, last):
            if part == 0:
                low, high = tl.load(all_start + r), tl.load(all_stop + r)
                shift = low
            else:
                low, high = tl.load(some_start + r), tl.load(some_stop + r)
                shift = tl.load(some_edge + r) - low
            for n in range(low, high):
                j = n * BN + tl.arange(0, BN)
                j64 = j.to(tl.int64)
                jmask = j < S if PAD else j >= 0
                kmask = jmask[:, None] & (d < D)[None, :]
                key = tl.load(kbase + j64[:, None] * skt + d[None, :], mask=kmask, other=0.0)
                value = tl.load(
                    vbase + j64[None, :] * svt + dv[:, None], mask=jmask[None, :] & (dv < DV)[:, None], other=0.0
                )
                s = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
                away, known = j[None, :] - i[:, None] - offset, (i < T)[:, None] & (j < S)[None, :]
                s, slack = _shaped(s, None, 0, position, h, away, cap, reach, width, known, CAP, POS)
                p = tl.exp2(s * LOG2E - log[:, None])
                if part == 1:
                    seen = _read(n + shift, start, stop, bits, i[:, None], j[None, :], lead * T, T, S, BM, BN, ENDS)
                    p = tl.where(seen, p, 0.0)
                elif PAD:
                    p = tl.where(jmask[None, :], p, 0.0)
                dp = tl.dot(g, value, input_precision=PRECISION)
                if DROP:
                    dp = tl.where(_kept(state, j[None, :], threshold), dp * keep_scale, 0.0)
                ds = p * (dp - common[:, None])
                if CAP:
                    ds = ds * slack
                acc = tl.dot(ds.to(key.dtype), key, acc, input_precision=PRECISION)
    tl.store(dq + stat[:, None] * D + d[None, :], acc * scale, mask=qmask)


@triton.jit
def tiles_backward_sources(
    q, k, v, dout, lse, delta, dk, dv_out, all_ptr, all_start, all_stop, some_ptr, some_start, some_stop, some_edge,
    some_order, start, stop, bits, position, seed,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sdb, sdh, sdt,
    T, S, H, HN, HG, NK, scale, cap, offset, reach, width, threshold, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    GROUP: tl.constexpr, LOOP: tl.constexpr, ENDS: tl.constexpr, POS: tl.constexpr, CAP: tl.constexpr,
    DROP: tl.constexpr, PAD: tl.constexpr, OWN_B: tl.constexpr, OWN_H: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    own, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    lead = b * 0
    if OWN_B:
        lead += b * HG
    if OWN_H:
        lead += own
    kv_head = own * LOOP // GROUP
    j = block * BN + tl.arange(0, BN)
    j64 = j.to(tl.int64)
    d, dv = tl.arange(0, BD), tl.arange(0, BDV)
    kmask = (j < S)[:, None] & (d < D)[None, :]
    vmask = (j < S)[:, None] & (dv < DV)[None, :]
    key = tl.load(k + b * skb + kv_head * skh + j64[:, None] * skt + d[None, :], mask=kmask, other=0.0)
    value = tl.load(v + b * svb + kv_head * svh + j64[:, None] * svt + dv[None, :], mask=vmask, other=0.0)
    acc_k = tl.zeros((BN, BD), tl.float32)
    acc_v = tl.zeros((BN, BDV), tl.float32)
    row = lead * NK + block
    for member in range(LOOP):
        h = own * LOOP + member
        if DROP:
            state = _mix(_seeded(seed, b), h)
        for part in tl.static_range(2):
            if part == 0:
                first, last = tl.load(all_ptr + row), tl.load(all_ptr + row + 1)
            else:
                first, last = tl.load(some_ptr + row), tl.load(some_ptr + row + 1)
            for r in range(first, last):
                if part == 0:
                    low, high = tl.load(all_start + r), tl.load(all_stop + r)
                    shift = low
                else:
                    low, high = tl.load(some_start + r), tl.load(some_stop + r)
                    shift = tl.load(some_edge + r) - low
                for n in range(low, high):
                    i = n * BM + tl.arange(0, BM)
                    i64 = i.to(tl.int64)
                    imask = i < T if PAD else i >= 0
                    query = tl.load(
                        q + b * sqb + h * sqh + i64[None, :] * sqt + d[:, None],
                        mask=imask[None, :] & (d < D)[:, None],
                        other=0.0,
                    )
                    s = tl.dot(key, query, input_precision=PRECISION) * scale
                    away, known = j[:, None] - i[None, :] - offset, (i < T)[None, :] & (j < S)[:, None]
                    s, slack = _shaped(s, None, 0, position, h, away, cap, reach, width, known, CAP, POS)
                    stat = (b * H + h) * T + i
                    log = tl.load(lse + stat, mask=imask, other=0.0)
                    log = tl.where(log == float("-inf"), 0.0, log) * LOG2E
                    p = tl.exp2(s * LOG2E - log[None, :])
                    if part == 1:
                        which = n + shift
                        if ENDS == 0:
                            which = tl.load(some_order + n + shift)
                        seen = _read(which, start, stop, bits, i[None, :], j[:, None], lead * T, T, S, BM, BN, ENDS)
                        p = tl.where(seen, p, 0.0)
                    elif PAD:
                        p = tl.where(imask[None, :], p, 0.0)
                    g = tl.load(
                        dout + b * sdb + h * sdh + i64[:, None] * sdt + dv[None, :],
                        mask=imask[:, None] & (dv < DV)[None, :],
                        other=0.0,
                    )
                    dp = tl.dot(value, tl.trans(g), input_precision=PRECISION)
                    weight = p
                    if DROP:
                        kept = tl.where(_kept(_mix(state, i[None, :]), j[:, None], threshold), keep_scale, 0.0)
                        dp = dp * kept
                        weight = p * kept
                    acc_v = tl.dot(weight.to(g.dtype), g, acc_v, input_precision=PRECISION)
                    ds = p * (dp - tl.load(delta + stat, mask=imask, other=0.0)[None, :])
                    if CAP:
                        ds = ds * slack
                    acc_k = tl.dot(ds.to(query.dtype), tl.trans(query), acc_k, input_precision=PRECISION)
    place = (b * HN + own) * S + j
    tl.store(dk + place[:, None] * D + d[None, :], acc_k * scale, mask=kmask)
    tl.store(dv_out + place[:, None] * DV + dv[None, :], acc_v, mask=vmask)
