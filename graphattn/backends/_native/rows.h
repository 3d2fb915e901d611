// One target at a time: any graph, any score, everything an edge can carry.  The route for short runs.
#pragma once
#include "simd.h"

namespace GA_NS {

constexpr i64 BLOCK = 512;  // edges whose scores are held at once
constexpr int AHEAD = 16;   // edges between a prefetch and its use

INLINE const i64 *plan_i64(const i64 *plan, int field) { return plan + plan[field]; }
INLINE const int32_t *plan_i32(const i64 *plan, int field) { return (const int32_t *)(plan + plan[field]); }

static i64 most(const i64 *lead_ptr, i64 leads) {
  i64 n = 0;
  for (i64 z = 0; z < leads; z++) n = lead_ptr[z + 1] - lead_ptr[z] > n ? lead_ptr[z + 1] - lead_ptr[z] : n;
  return n;
}

// the (b, h) an index stands for, and the base of everything that belongs to it
template <class T, class S> struct Head {
  i64 b, h, lead;
  const S *q, *k, *v, *go;  // as they are stored
  const T *vec, *bias, *post, *glse;
  T *out, *lse, *dq, *dk, *dv, *dbias, *delta;
  const T *ek, *ev;
  T *dek, *dev;
  T scale;
  bool far;  // keys and values lie beyond the second level
  // Tables that are larger together than the last level of cache, but less so one by one, are gathered one by one, in
  // phases over all rows: 0 does everything, 1 reads keys alone, 2 values alone, 3 keys again (dq).
  int phase = 0;
  T *held = nullptr;        // the scores, between the phases of the forward and for the backward
  i64 each = 2, ds_at = 1;  // stash: p of edge e at e * each, ds at e * each + ds_at
  INLINE Head(const Args &a, i64 b_, i64 h_) : b(b_), h(h_) {
    i64 hk = h / (a.H / a.HK);
    lead = (a.BG > 1 ? b : 0) * a.HG + (a.HG > 1 ? h : 0);
    q = (const S *)a.q + b * a.qb + h * a.qh;
    k = (const S *)a.k + b * a.kb + hk * a.kh;
    v = (const S *)a.v + b * a.vb + hk * a.vh;
    out = (T *)a.out + b * a.ob + h * a.oh;
    lse = (T *)a.lse + (b * a.H + h) * a.TQ;
    go = a.go ? (const S *)a.go + b * a.gb + h * a.gh : nullptr;
    glse = a.glse ? (const T *)a.glse + (b * a.H + h) * a.TQ : nullptr;
    delta = a.delta ? (T *)a.delta + (b * a.H + h) * a.TQ : nullptr;
    dq = (T *)a.dq + b * a.dqb + h * a.dqh;
    dk = (T *)a.dk + b * a.dkb + hk * a.dkh;
    dv = (T *)a.dv + b * a.dvb + hk * a.dvh;
    vec = a.vec ? (const T *)a.vec + h * a.D : nullptr;
    bias = a.bias ? (const T *)a.bias + b * a.bias_b + h * a.bias_h : nullptr;
    dbias = a.dbias ? (T *)a.dbias + b * a.dbias_b + h * a.dbias_h : nullptr;
    post = a.pos == 1 ? (const T *)a.post + h : a.pos == 2 ? (const T *)a.post + h * (2 * a.posr + 1) : nullptr;
    ek = a.ek ? (const T *)a.ek + h * a.ek_h : nullptr;
    ev = a.ev ? (const T *)a.ev + h * a.ev_h : nullptr;
    dek = a.dek ? (T *)a.dek + h * a.dek_h * a.D : nullptr;
    dev = a.dev ? (T *)a.dev + h * a.dev_h * a.DV : nullptr;
    scale = (T)a.scale;
    far = a.TK * (a.kt + a.vt) * (i64)sizeof(S) > ((i64)3 << 19);
  }
};

// y[e] = <x, row idx[e]>; x is padded with zeros to whole vectors
template <class T, class S>
static void dots(const T *x, const S *rows, i64 step, const int32_t *idx, i64 n, i64 width, T *y, const S *soon,
                 i64 soon_step, i64 soon_width) {
  constexpr int W = Simd<T>::W;
  const i64 full = width / W * W;
  const int tail = (int)(width - full);
  const i64 line = 64 / sizeof(S);
  for (i64 e = 0; e < n; e += 4) {
    const S *r0 = rows + idx[e] * step;
    const S *r1 = e + 1 < n ? rows + idx[e + 1] * step : r0;
    const S *r2 = e + 2 < n ? rows + idx[e + 2] * step : r0;
    const S *r3 = e + 3 < n ? rows + idx[e + 3] * step : r0;
    if (soon)
      for (int z = 0; z < 4; z++) {
        const S *pk = rows + idx[e + z + AHEAD] * step, *pv = soon + idx[e + z + AHEAD] * soon_step;
        for (i64 c = 0; c < width; c += line) prefetch(pk + c);
        for (i64 c = 0; c < soon_width; c += line) prefetch(pv + c);
      }
    TV a0{}, a1{}, a2{}, a3{};
    for (i64 c = 0; c < full; c += W) {
      TV xv = load(x + c);
      a0 += xv * load(r0 + c);
      a1 += xv * load(r1 + c);
      a2 += xv * load(r2 + c);
      a3 += xv * load(r3 + c);
    }
    if (tail) {
      TV xv = load(x + full);
      a0 += xv * load_n(r0 + full, tail);
      a1 += xv * load_n(r1 + full, tail);
      a2 += xv * load_n(r2 + full, tail);
      a3 += xv * load_n(r3 + full, tail);
    }
    typename Simd<T>::V4 s = sum4<T>(a0, a1, a2, a3);
    *(typename Simd<T>::U4 *)(y + e) = s;  // y has room for three more
  }
}

// acc += sum over e of w[e] * row idx[e]
template <class T, int M, bool TAIL, class S>
INLINE void weighted_part(const T *w, const S *rows, i64 step, const int32_t *idx, i64 n, int tail, T *acc, bool ahead) {
  constexpr int W = Simd<T>::W;
  TV a[M];
  for (int m = 0; m < M; m++) a[m] = load(acc + m * W);
  for (i64 e = 0; e < n; e++) {
    const S *r = rows + (idx ? idx[e] : e) * step;
    if (ahead) {
      const S *soon = rows + idx[e + AHEAD] * step;
      for (int c = 0; c < M * W; c += 64 / (int)sizeof(S)) prefetch(soon + c);
    }
    TV x = splat<T>(w[e]);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) a[m] += x * (TAIL && m == M - 1 ? load_n(r + m * W, tail) : load(r + m * W));
  }
  for (int m = 0; m < M; m++) store(acc + m * W, a[m]);
}
template <class T, class S>
static void weighted(const T *w, const S *rows, i64 step, const int32_t *idx, i64 n, i64 width, T *acc, bool ahead = false) {
  constexpr int W = Simd<T>::W;
  const int tail = (int)(width % W);
  i64 c = 0;
  for (; c + 8 * W <= width; c += 8 * W) weighted_part<T, 8, false>(w, rows + c, step, idx, n, 0, acc + c, ahead);
  for (; c + 4 * W <= width; c += 4 * W) weighted_part<T, 4, false>(w, rows + c, step, idx, n, 0, acc + c, ahead);
  i64 left = (width - c + W - 1) / W;
#define PART(M)                                                                                  \
  if (left == M) {                                                                               \
    if (tail) weighted_part<T, M, true>(w, rows + c, step, idx, n, tail, acc + c, ahead);        \
    else weighted_part<T, M, false>(w, rows + c, step, idx, n, 0, acc + c, ahead);               \
  }
  PART(1) PART(2) PART(3) PART(4)
#undef PART
}

template <class T> INLINE T dot(const T *x, const T *y, i64 width) {
  constexpr int W = Simd<T>::W;
  TV sum{};
  i64 c = 0;
  for (; c + W <= width; c += W) sum += load(x + c) * load(y + c);
  if (c < width) sum += load_n(x + c, (int)(width - c)) * load_n(y + c, (int)(width - c));
  return hsum<T>(sum);
}

// y += w * x over `width` elements of memory that may end there
template <class T, class S> INLINE void axpy(T w, const S *x, i64 width, T *y) {
  constexpr int W = Simd<T>::W;
  TV s = splat<T>(w);
  i64 c = 0;
  for (; c + W <= width; c += W) store(y + c, load(y + c) + s * load(x + c));
  if (c < width) {
    int n = (int)(width - c);
    store_n(y + c, load_n(y + c, n) + s * load_n(x + c, n), n);
  }
}

// MurmurHash3_x86_32; see numerics.py
INLINE uint32_t mix(uint32_t h, uint32_t k) {
  k *= 0xCC9E2D51u;
  k = k << 15 | k >> 17;
  k *= 0x1B873593u;
  h ^= k;
  h = h << 13 | h >> 19;
  return h * 5 + 0xE6546B64u;
}
INLINE uint32_t hash_head(i64 seed, i64 b, i64 h) {
  return mix(mix(mix((uint32_t)seed, (uint32_t)((uint64_t)seed >> 32)), (uint32_t)b), (uint32_t)h);
}
INLINE uint32_t hash_edge(uint32_t row_state, uint32_t j) {
  uint32_t h = mix(row_state, j);
  h ^= 20;
  h ^= h >> 16;
  h *= 0x85EBCA6Bu;
  h ^= h >> 13;
  h *= 0xC2B2AE35u;
  return h ^ h >> 16;
}

// m[e] = keep or 0
template <class T, class S>
static void dropout(const Args &a, const Head<T, S> &hd, i64 i, const int32_t *idx, i64 n, T *m) {
  const uint32_t state = mix(hash_head(a.seed, hd.b, hd.h), (uint32_t)i), limit = (uint32_t)a.threshold;
  const T keep = (T)a.keep;
  for (i64 e = 0; e < n; e++) m[e] = hash_edge(state, (uint32_t)idx[e]) < limit ? (T)0 : keep;
}

// Scores of n edges of target i, the first of them edge e0.  x is the target's query padded with zeros: for Dot times
// the scale.  th (may be null) receives tanh of the softcap.
template <class T, class S>
static void scores(const Args &a, const Head<T, S> &hd, const T *x, i64 i, const int32_t *idx, i64 n, i64 e0, T *s, T *th,
                   bool ahead) {
  constexpr int W = Simd<T>::W;
  if (a.score == 0) {
    dots<T>(x, hd.k, a.kt, idx, n, a.D, s, ahead ? hd.v : (const S *)nullptr, a.vt, hd.phase ? 0 : a.DV);
    if (hd.ek)
      for (i64 e = 0; e < n; e++) s[e] += dot<T>(x, hd.ek + (e0 + e) * a.ek_e, a.D);
  } else if (a.score == 1) {
    const T slope = (T)a.slope, scale = hd.scale, q = x[0];
    if (ahead) {
      const i64 line = 64 / sizeof(S);
      for (i64 e = 0; e < n; e++)
        for (i64 c = 0; c < a.DV; c += line) prefetch(hd.v + idx[e + AHEAD] * a.vt + c);
    }
    for (i64 e = 0; e < n; e++) {
      T u = q + wide(hd.k[idx[e] * a.kt]);
      if (hd.ek) u += hd.ek[(e0 + e) * a.ek_e];
      s[e] = scale * (u > 0 ? u : u * slope);
    }
  } else {
    const T slope = (T)a.slope;
    for (i64 e = 0; e < n; e++) {
      const S *r = hd.k + idx[e] * a.kt;
      const T *w = hd.ek ? hd.ek + (e0 + e) * a.ek_e : nullptr;
      TV sum{};
      i64 c = 0;
      for (; c + W <= a.D; c += W) {
        TV u = load(x + c) + load(r + c);
        if (w) u += load(w + c);
        sum += load(hd.vec + c) * (u > TV{} ? u : u * slope);
      }
      if (c < a.D) {
        int m = (int)(a.D - c);
        TV u = load(x + c) + load_n(r + c, m);
        if (w) u += load_n(w + c, m);
        sum += load_n(hd.vec + c, m) * (u > TV{} ? u : u * slope);
      }
      s[e] = hd.scale * hsum<T>(sum);
    }
  }
  if (a.softcap > 0) {
    const T cap = (T)a.softcap, inv = (T)(1 / a.softcap);
    for (i64 e = 0; e < n; e += W) {  // the buffers have room beyond n
      const TV t = vtanh(load(s + e) * inv);
      if (th) store(th + e, t);
      store(s + e, cap * t);
    }
  }
  if (hd.bias) {
    const T *b = hd.bias + e0 * a.bias_e;
    for (i64 e = 0; e < n; e++) s[e] += b[e * a.bias_e];
  }
  if (a.pos == 1) {
    const T slope = hd.post[0];
    for (i64 e = 0; e < n; e++) {
      i64 away = i + a.poso - idx[e];
      s[e] -= slope * (T)(away < 0 ? -away : away);
    }
  } else if (a.pos == 2) {
    for (i64 e = 0; e < n; e++) {
      i64 away = idx[e] - (i + a.poso);
      away = away < -a.posr ? -a.posr : away > a.posr ? a.posr : away;
      s[e] += hd.post[away + a.posr];
    }
  }
}

// the largest, NaN aside: a NaN shows in the sum of exponentials
template <class T> INLINE T max_of(const T *s, i64 n) {
  constexpr int W = Simd<T>::W;
  const TV none = splat<T>(-__builtin_inf());
  TV x = none;
  i64 e = 0;
  for (; e + W <= n; e += W) x = maxv<T>(load(s + e), x);
  if (e < n) x = maxv<T>(lanes_below<T>((int)(n - e)) ? load(s + e) : none, x);  // the buffer has room beyond n
  return hmax(x);
}
// s = exp(s - m); the sum
template <class T> INLINE T exp_sum(T *s, i64 n, T m) {
  constexpr int W = Simd<T>::W;
  TV sum{}, mv = splat<T>(m);
  i64 e = 0;
  for (; e + W <= n; e += W) {
    TV x = vexp(load(s + e) - mv);
    store(s + e, x);
    sum += x;
  }
  if (e < n) {
    TV x = vexp(load(s + e) - mv);
    store(s + e, x);
    sum += lanes_below<T>((int)(n - e)) ? x : TV{};
  }
  return hsum<T>(sum);
}
template <class T> INLINE T finite_or_zero(T m) { return m - m == 0 ? m : (T)0; }

template <class T> INLINE void copy_scaled(const T *x, i64 n, T scale, T *y) {
  constexpr int W = Simd<T>::W;
  const TV s = splat<T>(scale);
  i64 c = 0;
  for (; c + W <= n; c += W) store(y + c, load(x + c) * s);
  if (c < n) store_n(y + c, load_n(x + c, (int)(n - c)) * s, (int)(n - c));
}
template <class T> INLINE void clear(T *y, i64 n) {  // whole vectors
  for (i64 c = 0; c < n; c += Simd<T>::W) store(y + c, TV{});
}
// the rows of a target some targets on: they are read once each, in order or nearly so
template <class T, class S> INLINE void prefetch_target(const Args &a, const Head<T, S> &hd, i64 i, bool back) {
  if (i >= a.TQ) return;
  const i64 line = 64 / sizeof(S);
  for (i64 c = 0; c < a.D; c += line) prefetch(hd.q + i * a.qt + c);
  if (!back) return;
  for (i64 c = 0; c < a.DV; c += line) prefetch(hd.go + i * a.gt + c), prefetch(hd.out + i * a.ot + c);
}
INLINE i64 pad16(i64 n) { return (n + 15) & ~(i64)15; }

// Walks a row's sources from a given edge on.
struct Walk {
  const i64 *start, *stop;
  i64 run, at = 0;
  INLINE Walk(const Args &a, i64 row, i64 pos) : start(a.start), stop(a.stop) {
    run = a.indptr[row];
    if (pos) {
      i64 edge = a.edge_ptr[row] + pos, lo = run, hi = a.indptr[row + 1];
      while (hi - lo > 1) {
        i64 mid = (lo + hi) >> 1;
        if (a.run_edge[mid] <= edge) lo = mid;
        else hi = mid;
      }
      run = lo;
      at = start[run] + edge - a.run_edge[run];
    } else if (run < a.indptr[row + 1]) {
      at = start[run];
    }
  }
  INLINE void take(i64 n, int32_t *idx) {
    while (n > 0) {
      if (stop[run] - at == 1) {  // most runs of a sparse graph
        *idx++ = (int32_t)at++;
        if (--n) at = start[++run];
        continue;
      }
      if (at == stop[run]) {
        at = start[++run];
        continue;
      }
      i64 m = stop[run] - at;
      if (m > n) m = n;
      for (i64 z = 0; z < m; z++) idx[z] = (int32_t)(at + z);
      idx += m;
      at += m;
      n -= m;
    }
  }
};

template <class T> struct Scratch {
  int32_t *idx;
  T *s, *p, *th, *ds, *m, *x, *g, *acc;
  bool ok;
  static i64 idx_room() { return 2 * BLOCK + 64; }
  INLINE Scratch(const Args &a) {
    i64 w = pad16(a.D > a.DV ? a.D : a.DV) + 16, n = 2 * BLOCK + 64;
    char *p0 = (char *)ga_scratch(idx_room() * 4 + (5 * n + 4 * w) * sizeof(T) + 256);
    ok = p0 != nullptr;
    idx = (int32_t *)p0;
    s = (T *)(p0 + idx_room() * 4);
    p = s + n;
    th = p + n;
    ds = th + n;
    m = ds + n;
    x = m + n;
    g = x + w;
    acc = g + w;
  }
  template <class U, class S> INLINE void pad(U *y, const S *x0, i64 n, U scale) {
    constexpr int W = Simd<U>::W;
    const typename Simd<U>::V s = splat<U>(scale);
    i64 c = 0;
    for (; c + W <= n; c += W) store(y + c, load(x0 + c) * s);
    if (c < n) store(y + c, load_n(x0 + c, (int)(n - c)) * s), c += W;
    for (; c < pad16(n); c += W) store(y + c, typename Simd<U>::V{});
  }
};

// ------------------------------------------------------------------ forward

// Part of a row: edges [pos0, pos1).  Leaves the unnormalised sum in acc, returns maximum and sum.
template <class T, class S>
static void forward_part(const Args &a, const Head<T, S> &hd, Scratch<T> &w, i64 row, i64 i, i64 pos0, i64 pos1,
                         const int32_t *ready, T *held, T *m_out, T *l_out) {
  if (hd.phase != 2) w.pad(w.x, hd.q + i * a.qt, a.D, a.score == 0 ? hd.scale : (T)1);
  const i64 wide = pad16(a.DV);
  clear<T>(w.acc, wide);
  T m = -__builtin_inf(), l = 0;
  const i64 e_row = a.edge_ptr[row];
  Walk walk(a, row, ready ? 0 : pos0);
  for (i64 pos = pos0; pos < pos1; pos += BLOCK) {
    i64 n = pos1 - pos < BLOCK ? pos1 - pos : BLOCK;
    const int32_t *idx = ready ? ready + (pos - pos0) : w.idx;
    if (!ready) {
      walk.take(n, w.idx);
      for (int z = 0; z < AHEAD + 4; z++) w.idx[n + z] = w.idx[n - 1];
    }
    if (hd.phase == 2) {
      __builtin_memcpy(w.s, held + pos, n * sizeof(T));
    } else {
      scores<T>(a, hd, w.x, i, idx, n, e_row + pos, w.s, nullptr, hd.far);
      if (hd.phase == 1) {
        __builtin_memcpy(held + pos, w.s, n * sizeof(T));
        continue;
      }
    }
    T top = max_of(w.s, n);
    T m_new = top > m ? top : m, base = finite_or_zero(m_new);
    if (pos > pos0) {
      T fade = sexp(finite_or_zero(m) - base);
      if (m == -__builtin_inf()) fade = 0;
      l *= fade;
      for (i64 c = 0; c < wide; c++) w.acc[c] *= fade;
    }
    m = m_new;
    l += exp_sum(w.s, n, base);
    if (a.drop) {
      dropout<T>(a, hd, i, idx, n, w.m);
      for (i64 e = 0; e < n; e++) w.s[e] *= w.m[e];
    }
    weighted<T>(w.s, hd.v, a.vt, idx, n, a.DV, w.acc, hd.phase == 2);
    if (hd.ev) weighted<T>(w.s, hd.ev + (e_row + pos) * a.ev_e, a.ev_e, nullptr, n, a.DV, w.acc);
  }
  *m_out = m;
  *l_out = l;
}
// where the scores of the r-th row of the list are held between phases
template <class T, class S> INLINE T *held_of(const Args &a, const Head<T, S> &hd, i64 r) {
  const i64 *row_edge = plan_i64(a.plan, P_ROW_EDGE);
  return hd.held ? hd.held + row_edge[r] - row_edge[plan_i64(a.plan, P_ROW_LEAD)[hd.lead]] : nullptr;
}

template <class T, class S> INLINE void finish_row(const Args &a, const Head<T, S> &hd, i64 i, const T *acc, T m, T l) {
  T *o = hd.out + i * a.ot, inv = 1 / l;
  if (l == 0) inv = __builtin_nan("");  // every score -inf: the softmax is 0 / 0, as in torch
  copy_scaled<T>(acc, a.DV, inv, o);
  hd.lse[i] = l == 0 ? -__builtin_inf() : finite_or_zero(m) + slog(l);
}

template <class T, class S> static void forward_row(const Args &a, const Head<T, S> &hd, Scratch<T> &w, i64 i, T *held) {
  const i64 row = hd.lead * a.TQ + i, n = a.edge_ptr[row + 1] - a.edge_ptr[row];
  T m, l;
  forward_part<T>(a, hd, w, row, i, 0, n, nullptr, held, &m, &l);
  if (hd.phase != 1) finish_row<T>(a, hd, i, w.acc, m, l);
}

// The sources of as many whole rows as fit in one block, or of all where the plan lists them; returns the end of the rows
// in the row list.  *own: theirs, one after the other, with some to prefetch behind.  None fits: the end is r.
INLINE i64 fill_rows(const Args &a, i64 lead, const int32_t *rows, i64 r, i64 r1, int32_t *idx, const int32_t **own) {
  if (a.plan[P_COL]) {
    *own = plan_i32(a.plan, P_COL) + plan_i64(a.plan, P_ROW_EDGE)[r];
    return r1;
  }
  i64 n = 0;
  for (; r < r1; r++) {
    const i64 row = lead * a.TQ + rows[r], d = a.edge_ptr[row + 1] - a.edge_ptr[row];
    if (n + d > BLOCK) break;
    Walk walk(a, row, 0);
    walk.take(d, idx + n);
    n += d;
  }
  if (n)
    for (int z = 0; z < AHEAD + 4; z++) idx[n + z] = idx[n - 1];
  *own = idx;
  return r;
}
// those of a piece of a row, if the plan lists them
INLINE const int32_t *listed(const Args &a, const i64 *unit) {
  return a.plan[P_COL] ? plan_i32(a.plan, P_COL) + plan_i64(a.plan, P_ROW_EDGE)[unit[0]] + unit[2] : nullptr;
}

template <class T, class S>
static void forward_unit(const Args &a, const Head<T, S> &hd, Scratch<T> &w, const i64 *unit, T *pieces) {
  const i64 *plan = a.plan;
  const int32_t *rows = plan_i32(plan, P_ROW);
  if (unit[4] >= 0) {  // a piece of a hub
    const i64 i = rows[unit[0]], row = hd.lead * a.TQ + i;
    T *part = pieces + (unit[4] - plan_i64(plan, P_PIECE_LEAD)[hd.lead]) * (a.DV + 2);
    forward_part<T>(a, hd, w, row, i, unit[2], unit[3], listed(a, unit), held_of(a, hd, unit[0]), part, part + 1);
    for (i64 c = 0; c < a.DV; c++) part[2 + c] = w.acc[c];
    return;
  }
  i64 r = unit[0];
  while (r < unit[1]) {
    const int32_t *idx;
    i64 end = fill_rows(a, hd.lead, rows, r, unit[1], w.idx, &idx);
    if (end == r) {
      forward_row<T>(a, hd, w, rows[r], held_of(a, hd, r));
      r++;
      continue;
    }
    for (; r < end; r++) {
      const i64 i = rows[r], row = hd.lead * a.TQ + i, n = a.edge_ptr[row + 1] - a.edge_ptr[row];
      T m, l;
      if (hd.phase != 2) prefetch_target(a, hd, i + 3, false);
      forward_part<T>(a, hd, w, row, i, 0, n, idx, held_of(a, hd, r), &m, &l);
      if (hd.phase != 1) finish_row<T>(a, hd, i, w.acc, m, l);
      idx += n;
    }
  }
}

template <class T, class S> static void merge_hub(const Args &a, const Head<T, S> &hd, const i64 *hub, const T *pieces, T *acc) {
  const i64 i = plan_i32(a.plan, P_ROW)[hub[0]], first = plan_i64(a.plan, P_PIECE_LEAD)[hd.lead];
  T m = -__builtin_inf(), l = 0;
  for (i64 p = hub[1]; p < hub[2]; p++) {
    T x = pieces[(p - first) * (a.DV + 2)];
    m = x > m || x != x ? x : m;
  }
  for (i64 c = 0; c < a.DV; c++) acc[c] = 0;
  for (i64 p = hub[1]; p < hub[2]; p++) {
    const T *part = pieces + (p - first) * (a.DV + 2);
    T fade = part[0] == -__builtin_inf() ? (T)0 : sexp(finite_or_zero(part[0]) - finite_or_zero(m));
    l += part[1] * fade;
    for (i64 c = 0; c < a.DV; c++) acc[c] += part[2 + c] * fade;
  }
  finish_row<T>(a, hd, i, acc, m, l);
}

// ------------------------------------------------------------------ backward

template <class T, class S> INLINE T delta_of(const Args &a, const Head<T, S> &hd, i64 i) {
  const S *g = hd.go + i * a.gt;
  const T *o = hd.out + i * a.ot;
  constexpr int W = Simd<T>::W;
  TV x{};
  i64 c = 0;
  for (; c + W <= a.DV; c += W) x += load(g + c) * load(o + c);
  if (c < a.DV) x += load_n(g + c, (int)(a.DV - c)) * load_n(o + c, (int)(a.DV - c));
  T s = hsum<T>(x);
  return hd.glse ? s - hd.glse[i] : s;
}

// For n edges of target i: p with dropout into w.p, the gradient of the raw score (before softcap) into w.ds, that of the
// biased score into w.s.  w.x is the query (for Dot times scale), w.g the output's gradient, both padded.
template <class T, class S>
static void edge_grads(const Args &a, const Head<T, S> &hd, Scratch<T> &w, i64 i, T delta, const int32_t *idx, i64 n, i64 e0,
                       bool ahead) {
  constexpr int W = Simd<T>::W;
  if (hd.phase != 2) scores<T>(a, hd, w.x, i, idx, n, e0, w.s, w.th, ahead);
  if (hd.phase != 1) dots<T>(w.g, hd.v, a.vt, idx, n, a.DV, w.ds, hd.phase ? hd.v : (const S *)nullptr, a.vt, 0);
  if (hd.ev)
    for (i64 e = 0; e < n; e++) w.ds[e] += dot<T>(w.g, hd.ev + (e0 + e) * a.ev_e, a.DV);
  const T lse = hd.lse[i];
  if (hd.phase != 2)
    for (i64 e = 0; e < n; e += W) store(w.p + e, vexp(load(w.s + e) - lse));  // the buffers have room beyond n
  if (hd.phase == 1) return;
  if (a.drop) {
    dropout<T>(a, hd, i, idx, n, w.m);
    for (i64 e = 0; e < n; e++) {
      w.s[e] = w.p[e] * (w.ds[e] * w.m[e] - delta);
      w.p[e] *= w.m[e];
    }
  } else {
    for (i64 e = 0; e < n; e++) w.s[e] = w.p[e] * (w.ds[e] - delta);
  }
  if (a.softcap > 0)
    for (i64 e = 0; e < n; e++) w.ds[e] = w.s[e] * (1 - w.th[e] * w.th[e]);
  else
    for (i64 e = 0; e < n; e++) w.ds[e] = w.s[e];
}

// Adds the gradient of the sum q + k + ek of one edge (Additive, GATv2), given that of the raw score, to `to` and, if it
// is not null, `too`; and that of GATv2's vector to dvec.
template <class T, class S>
static void sum_grad(const Args &a, const Head<T, S> &hd, const Scratch<T> &w, i64 j, i64 e, T ds, T *dvec, T *to, T *too) {
  constexpr int W = Simd<T>::W;
  const S *r = hd.k + j * a.kt;
  const T *ek = hd.ek ? hd.ek + e * a.ek_e : nullptr;
  const T slope = (T)a.slope, g = ds * hd.scale;
  if (a.score == 1) {  // width 1
    T u = w.x[0] + wide(r[0]);
    if (ek) u += ek[0];
    const T d = u > 0 ? g : g * slope;
    to[0] += d;
    if (too) too[0] += d;
    return;
  }
  for (i64 c = 0; c < a.D; c += W) {
    const bool whole = c + W <= a.D;
    const int n = whole ? W : (int)(a.D - c);
    TV u = load(w.x + c) + (whole ? load(r + c) : load_n(r + c, n));
    if (ek) u += whole ? load(ek + c) : load_n(ek + c, n);
    const TV on = u > TV{} ? splat<T>(g) : splat<T>(g * slope);
    const TV d = on * (whole ? load(hd.vec + c) : load_n(hd.vec + c, n));
    if (whole) {
      if (dvec) store(dvec + c, load(dvec + c) + on * u);
      store(to + c, load(to + c) + d);
      if (too) store(too + c, load(too + c) + d);
    } else {
      if (dvec) store_n(dvec + c, load_n(dvec + c, n) + on * u, n);
      store_n(to + c, load_n(to + c, n) + d, n);
      if (too) store_n(too + c, load_n(too + c, n) + d, n);
    }
  }
}

// Pass over targets: edges [pos0, pos1) of one row.  Leaves dq in w.acc (for Dot still to be scaled).
template <class T, class S>
static void backward_part(const Args &a, const Head<T, S> &hd, Scratch<T> &w, i64 row, i64 i, i64 pos0, i64 pos1,
                          const int32_t *ready, T delta, T *stash, const T *held, T *dvec, T *dpos) {
  if (hd.phase < 2) w.pad(w.x, hd.q + i * a.qt, a.D, a.score == 0 ? hd.scale : (T)1);
  if (hd.phase % 2 == 0) w.pad(w.g, hd.go + i * a.gt, a.DV, (T)1);
  const i64 wide = pad16(a.D), e_row = a.edge_ptr[row];
  clear<T>(w.acc, wide);
  Walk walk(a, row, ready ? 0 : pos0);
  for (i64 pos = pos0; pos < pos1; pos += BLOCK) {
    i64 n = pos1 - pos < BLOCK ? pos1 - pos : BLOCK;
    const int32_t *idx = ready ? ready + (pos - pos0) : w.idx;
    if (!ready) {
      walk.take(n, w.idx);
      for (int z = 0; z < AHEAD + 4; z++) w.idx[n + z] = w.idx[n - 1];
    }
    const i64 e0 = e_row + pos;
    T *own = stash ? stash + (pos - pos0) * hd.each : nullptr;
    if (hd.phase == 3) {
      __builtin_memcpy(w.ds, own + hd.ds_at, n * sizeof(T));
      weighted<T>(w.ds, hd.k, a.kt, idx, n, a.D, w.acc, true);
      continue;
    }
    if (hd.phase == 2 && held) {
      __builtin_memcpy(w.s, held + pos - pos0, n * sizeof(T));
      for (i64 e = 0; e < n; e += Simd<T>::W) store(w.p + e, vexp(load(w.s + e) - hd.lse[i]));
    } else if (hd.phase == 2) {
      __builtin_memcpy(w.p, own, n * sizeof(T));
    }
    edge_grads<T>(a, hd, w, i, delta, idx, n, e0, true);
    if (hd.phase) {
      __builtin_memcpy(own, w.p, n * sizeof(T));
      if (hd.phase == 1) continue;
      __builtin_memcpy(own + hd.ds_at, w.ds, n * sizeof(T));
    } else if (stash) {
      for (i64 e = 0; e < n; e++) own[2 * e] = w.p[e], own[2 * e + 1] = w.ds[e];
    }
    if (hd.dbias)
      for (i64 e = 0; e < n; e++) hd.dbias[e0 + e] += w.s[e];
    if (dpos) {
      if (a.pos == 1)
        for (i64 e = 0; e < n; e++) {
          i64 away = i + a.poso - idx[e];
          dpos[0] -= w.s[e] * (T)(away < 0 ? -away : away);
        }
      else
        for (i64 e = 0; e < n; e++) {
          i64 away = idx[e] - (i + a.poso);
          away = away < -a.posr ? -a.posr : away > a.posr ? a.posr : away;
          dpos[away + a.posr] += w.s[e];
        }
    }
    if (hd.dev)
      for (i64 e = 0; e < n; e++) axpy<T>(w.p[e], w.g, a.DV, hd.dev + (e0 + e) * (a.dev_h ? a.H : 1) * a.DV);
    if (hd.phase) continue;
    if (a.score == 0) {
      weighted<T>(w.ds, hd.k, a.kt, idx, n, a.D, w.acc);
      if (hd.ek) weighted<T>(w.ds, hd.ek + e0 * a.ek_e, a.ek_e, nullptr, n, a.D, w.acc);
      if (hd.dek)
        for (i64 e = 0; e < n; e++) axpy<T>(w.ds[e], w.x, a.D, hd.dek + (e0 + e) * (a.dek_h ? a.H : 1) * a.D);
    } else {
      for (i64 e = 0; e < n; e++)
        sum_grad<T>(a, hd, w, idx[e], e0 + e, w.ds[e], dvec, w.acc,
                    hd.dek ? hd.dek + (e0 + e) * (a.dek_h ? a.H : 1) * a.D : nullptr);
    }
  }
}

template <class T, class S> INLINE void finish_dq(const Args &a, const Head<T, S> &hd, i64 i, const T *acc) {
  copy_scaled<T>(acc, a.D, a.score == 0 ? hd.scale : (T)1, hd.dq + i * a.dqt);
}

// stash: two numbers for every edge of the lead's row list, or null
template <class T, class S>
static void backward_unit(const Args &a, const Head<T, S> &hd, Scratch<T> &w, const i64 *unit, T *pieces, T *stash, T *dvec,
                          T *dpos) {
  const i64 *plan = a.plan;
  const int32_t *rows = plan_i32(plan, P_ROW);
  const i64 *row_edge = plan_i64(plan, P_ROW_EDGE), e_lead = row_edge[plan_i64(plan, P_ROW_LEAD)[hd.lead]];
  if (unit[4] >= 0) {
    const i64 i = rows[unit[0]], row = hd.lead * a.TQ + i;
    T *part = pieces + (unit[4] - plan_i64(plan, P_PIECE_LEAD)[hd.lead]) * (a.D > a.DV ? a.D + 2 : a.DV + 2);
    const bool own_delta = hd.phase % 2 == 0;
    T delta = own_delta ? delta_of(a, hd, i) : (T)0;
    if (unit[2] == 0 && own_delta) hd.delta[i] = delta;
    backward_part<T>(a, hd, w, row, i, unit[2], unit[3], listed(a, unit), delta,
                     stash ? stash + hd.each * (row_edge[unit[0]] - e_lead + unit[2]) : nullptr,
                     hd.held ? held_of(a, hd, unit[0]) + unit[2] : nullptr, dvec, dpos);
    for (i64 c = 0; c < a.D; c++) part[c] = w.acc[c];
    return;
  }
  i64 r = unit[0];
  while (r < unit[1]) {
    const int32_t *idx;
    i64 end = fill_rows(a, hd.lead, rows, r, unit[1], w.idx, &idx);
    const bool alone = end == r;
    if (alone) end = r + 1;
    for (; r < end; r++) {
      const i64 i = rows[r], row = hd.lead * a.TQ + i, n = a.edge_ptr[row + 1] - a.edge_ptr[row];
      T delta = 0;
      if (hd.phase < 3) prefetch_target(a, hd, i + 3, hd.phase != 1);
      if (hd.phase % 2 == 0) delta = hd.delta[i] = delta_of(a, hd, i);
      backward_part<T>(a, hd, w, row, i, 0, n, alone ? nullptr : idx, delta,
                       stash ? stash + hd.each * (row_edge[r] - e_lead) : nullptr, held_of(a, hd, r), dvec, dpos);
      if (hd.phase % 3 == 0) finish_dq<T>(a, hd, i, w.acc);
      idx += n;
    }
  }
}

// Pass over sources: entries [n0, n1) of blocks of sources, adding to dk and dv rows.
template <class T, class S>
static void source_unit(const Args &a, const Head<T, S> &hd, Scratch<T> &w, i64 n0, i64 n1, const T *stash, T *dk, i64 dk_t,
                        T *dv, i64 dv_t, i64 j_base) {
  const i64 *plan = a.plan, *sp = a.splan;
  const int32_t *rows = plan_i32(plan, P_ROW), *er = plan_i32(sp, S_ENTRY_ROW), *ej = plan_i32(sp, S_ENTRY_J),
                *en = plan_i32(sp, S_ENTRY_N);
  const i64 *ee = plan_i64(sp, S_ENTRY_E);
  const i64 *row_edge = plan_i64(plan, P_ROW_EDGE), e_lead = row_edge[plan_i64(plan, P_ROW_LEAD)[hd.lead]];
  const i64 line = 64 / sizeof(S);
  const bool direct = stash && a.score == 0;
  if (direct && sp[S_SINGLE]) {
        constexpr i64 FAR = 32;
    const i64 wide_k = pad16(a.D), wide_v = pad16(a.DV);
    const bool keys = hd.phase != 2, values = hd.phase != 1;
    for (i64 t = n0, m; t < n1; t += m) {
      m = n1 - t < BLOCK ? n1 - t : BLOCK;
      for (i64 e = 0; e < m + AHEAD; e++) w.idx[e] = rows[er[t + e < n1 ? t + e : n1 - 1]];
      for (i64 e = 0; e < m; e++) {
        if (t + e + FAR < n1) prefetch(stash + hd.each * (ee[t + e + FAR] - e_lead) + (keys ? hd.ds_at : 0));
        const T *pd = stash + hd.each * (ee[t + e] - e_lead);
        if (values) w.p[e] = pd[0];
        if (keys) w.ds[e] = pd[hd.ds_at] * hd.scale;
      }
      for (i64 e = 0, n; e < m; e += n) {
        const i64 j = ej[t + e];
        for (n = 1; e + n < m && ej[t + e + n] == j;) n++;
        if (keys) {
          clear<T>(w.acc, wide_k);
          weighted<T>(w.ds + e, hd.q, a.qt, w.idx + e, n, a.D, w.acc, true);
          axpy<T>((T)1, w.acc, a.D, dk + (j - j_base) * dk_t);
        }
        if (values) {
          clear<T>(w.acc, wide_v);
          weighted<T>(w.p + e, hd.go, a.gt, w.idx + e, n, a.DV, w.acc, true);
          axpy<T>((T)1, w.acc, a.DV, dv + (j - j_base) * dv_t);
        }
      }
    }
    return;
  }
  for (i64 t = n0; t < n1; t++) {
    const i64 i = rows[er[t]], j = ej[t], n = en[t], row = hd.lead * a.TQ + i;
    const i64 e_own = ee[t];                                                // number within the row list
    const i64 e = e_own - row_edge[er[t]] + a.edge_ptr[row];                // number within the graph
    if (t + 8 < n1) {
      const i64 i2 = rows[er[t + 8]];
      for (i64 c = 0; c < a.D; c += line) prefetch(hd.q + i2 * a.qt + c);
      for (i64 c = 0; c < a.DV; c += line) prefetch(hd.go + i2 * a.gt + c);
      if (stash) prefetch(stash + hd.each * (ee[t + 8] - e_lead));
    }
    const S *g = hd.go + i * a.gt, *x = hd.q + i * a.qt;
    if (direct) {
      const T *pd = stash + hd.each * (e_own - e_lead);
      for (i64 z = 0; z < n; z++) {
        axpy<T>(pd[hd.each * z + hd.ds_at] * hd.scale, x, a.D, dk + (j + z - j_base) * dk_t);
        axpy<T>(pd[hd.each * z], g, a.DV, dv + (j + z - j_base) * dv_t);
      }
      continue;
    }
    w.pad(w.x, x, a.D, a.score == 0 ? hd.scale : (T)1);
    w.pad(w.g, g, a.DV, (T)1);
    for (i64 z0 = 0; z0 < n; z0 += BLOCK) {
      const i64 m = n - z0 < BLOCK ? n - z0 : BLOCK;
      for (i64 z = 0; z < m + AHEAD + 4; z++) w.idx[z] = (int32_t)(j + z0 + (z < m ? z : m - 1));
      if (stash) {
        const T *pd = stash + hd.each * (e_own - e_lead + z0);
        for (i64 z = 0; z < m; z++) w.p[z] = pd[hd.each * z], w.ds[z] = pd[hd.each * z + hd.ds_at];
      } else {
        edge_grads<T>(a, hd, w, i, hd.delta[i], w.idx, m, e + z0, false);
      }
      for (i64 z = 0; z < m; z++) {
        T *dkj = dk + (j + z0 + z - j_base) * dk_t;
        if (a.score == 0) axpy<T>(w.ds[z], w.x, a.D, dkj);
        else sum_grad<T>(a, hd, w, j + z0 + z, e + z0 + z, w.ds[z], nullptr, dkj, nullptr);
        axpy<T>(w.p[z], w.g, a.DV, dv + (j + z0 + z - j_base) * dv_t);
      }
    }
  }
}

}  // namespace GA_NS
