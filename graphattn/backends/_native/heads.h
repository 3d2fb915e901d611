// Eight heads side by side in the lanes of a vector: the route for narrow heads, such as GAT's eight of width eight.
//
// Keys and values are laid out as (source, width, 8 heads), so every score, softmax and sum is lane by lane.
#pragma once
#include "rows.h"

namespace GA_NS {

INLINE Eight<float>::V exp8(Eight<float>::V x) { return exp_poly<Eight<float>::V, Eight<float>::I>(x); }
INLINE Eight<double>::V exp8(Eight<double>::V x) { return exp_poly_double<Eight<double>::V, Eight<double>::I>(x); }

constexpr i64 NARROW = 16;  // the widest head this path takes

// y[c][head] = x[head][c]; heads beyond n are 0
template <class T, class S> INLINE void heads_in(const S *x, i64 head_step, i64 n, i64 width, T *y) {
  i64 c = 0;
  if (n == 8)
    for (; c + 8 <= width; c += 8) {
      V8T r[8];
      for (int z = 0; z < 8; z++) r[z] = load8(x + z * head_step + c);
      turn8<T>(r);
      for (int z = 0; z < 8; z++) store8(y + (c + z) * 8, r[z]);
    }
  for (; c < width; c++)
    for (i64 z = 0; z < 8; z++) y[c * 8 + z] = z < n ? wide(x[z * head_step + c]) : (T)0;
}
template <class T> INLINE void heads_out(const T *y, i64 head_step, i64 n, i64 width, T *x) {
  i64 c = 0;
  if (n == 8)
    for (; c + 8 <= width; c += 8) {
      V8T r[8];
      for (int z = 0; z < 8; z++) r[z] = load8(y + (c + z) * 8);
      turn8<T>(r);
      for (int z = 0; z < 8; z++) store8(x + z * head_step + c, r[z]);
    }
  for (; c < width; c++)
    for (i64 z = 0; z < n; z++) x[z * head_step + c] = y[c * 8 + z];
}

template <class T> struct Narrow {
  const Args &a;
  i64 blocks;            // of eight heads
  T *k, *v, *q, *g;      // (B, blocks, T, width, 8)
  T *dk, *dv, *stash;
  i64 slots;
  int failed;
  struct At { i64 b, h0, n, block; };
  INLINE At at(i64 z) const {
    i64 b = z / blocks, h0 = z % blocks * 8;
    return At{b, h0, a.H - h0 < 8 ? a.H - h0 : 8, z};
  }
};

static bool narrow(const Args &a, bool back) {
  if (a.HG > 1 || a.H != a.HK || a.H < 4 || a.D > NARROW || a.DV > NARROW || a.D < 1 || a.DV < 1) return false;
  if (a.ek || a.ev || a.bias || a.pos || a.softcap > 0) return false;
  if (a.plan[P_GROUPS] || a.plan[P_PIECES] || !a.plan[P_UNITS]) return false;
  return !back || (!a.need_kv || !a.splan[S_PIECES]);
}

constexpr i64 PACK = 256;  // rows a packing task takes

template <class T, class S> INLINE void pack_part(const Narrow<T> &w, const void *x, i64 xb, i64 xh, i64 xt, i64 rows, i64 width, i64 z,
                                         i64 t0, T *y) {
  auto s = w.at(z);
  const S *p = (const S *)x + s.b * xb + s.h0 * xh;
  for (i64 t = t0; t < t0 + PACK && t < rows; t++)
    heads_in<T>(p + t * xt, xh, s.n, width, y + (z * rows + t) * width * 8);
}
template <class T, class S> static void pack_task(void *ctx, i64 task) {
  Narrow<T> &w = *(Narrow<T> *)ctx;
  const Args &a = w.a;
  const i64 longest = a.TK > a.TQ ? a.TK : a.TQ, per = (longest + PACK - 1) / PACK, z = task / per, t0 = task % per * PACK;
  pack_part<T, S>(w, a.k, a.kb, a.kh, a.kt, a.TK, a.D, z, t0, w.k);
  pack_part<T, S>(w, a.v, a.vb, a.vh, a.vt, a.TK, a.DV, z, t0, w.v);
  if (!w.q) return;
  pack_part<T, S>(w, a.q, a.qb, a.qh, a.qt, a.TQ, a.D, z, t0, w.q);
  pack_part<T, S>(w, a.go, a.gb, a.gh, a.gt, a.TQ, a.DV, z, t0, w.g);
}

template <class T> struct NarrowRow {
  V8T x[NARROW], vec[NARROW];
  T scale, slope;
  // score of one edge; u_positive is not kept: the backward looks again
  INLINE V8T score(const Args &a, const T *k) const {
    V8T s{};
    if (a.score == 0) {
      for (i64 c = 0; c < a.D; c++) s += x[c] * load8(k + c * 8);
      return s * scale;
    }
    for (i64 c = 0; c < a.D; c++) {
      V8T u = x[c] + load8(k + c * 8);
      u = u > V8T{} ? u : u * slope;
      s += a.score == 1 ? u : vec[c] * u;
    }
    return s * scale;
  }
};

template <class T> INLINE void load_vec(const Args &a, i64 h0, i64 n, NarrowRow<T> &r) {
  r.scale = (T)a.scale;
  r.slope = (T)a.slope;
  if (a.score == 2) {
    T tmp[NARROW * 8];
    heads_in<T>((const T *)a.vec + h0 * a.D, a.D, n, a.D, tmp);
    for (i64 c = 0; c < a.D; c++) r.vec[c] = load8(tmp + c * 8);
  }
}

// keep or 0 for eight heads of one edge
template <class T> INLINE V8T dropout8(const Args &a, const uint32_t *state, int32_t j) {
  V8T m;
  for (int z = 0; z < 8; z++) m[z] = hash_edge(state[z], (uint32_t)j) < (uint32_t)a.threshold ? (T)0 : (T)a.keep;
  return m;
}

template <class T, class S> static void narrow_unit(Narrow<T> &w, i64 z, const i64 *unit, int32_t *idx, T *s) {
  const Args &a = w.a;
  auto at = w.at(z);
  const i64 lead = a.BG > 1 ? at.b : 0;
  const int32_t *rows = plan_i32(a.plan, P_ROW);
  const T *kp = w.k + z * a.TK * a.D * 8, *vp = w.v + z * a.TK * a.DV * 8;
  NarrowRow<T> r;
  load_vec(a, at.h0, at.n, r);
  T tmp[NARROW * 8];
  i64 t = unit[0];
  while (t < unit[1]) {
    const int32_t *own;
    i64 end = fill_rows(a, lead, rows, t, unit[1], idx, &own);
    const bool alone = end == t;
    if (alone) end = t + 1;
    for (; t < end; t++) {
      const i64 i = rows[t], row = lead * a.TQ + i, n = a.edge_ptr[row + 1] - a.edge_ptr[row];
      heads_in<T>((const S *)a.q + at.b * a.qb + at.h0 * a.qh + i * a.qt, a.qh, at.n, a.D, tmp);
      for (i64 c = 0; c < a.D; c++) r.x[c] = load8(tmp + c * 8);
      uint32_t state[8];
      if (a.drop)
        for (int y = 0; y < 8; y++) state[y] = mix(hash_head(a.seed, at.b, at.h0 + y), (uint32_t)i);
      V8T m = V8T{} - (T)__builtin_inf(), l{}, acc[NARROW];
      for (i64 c = 0; c < a.DV; c++) acc[c] = V8T{};
      Walk walk(a, row, 0);
      for (i64 pos = 0; pos < n; pos += BLOCK) {
        const i64 len = n - pos < BLOCK ? n - pos : BLOCK;
        if (alone) walk.take(len, idx), own = idx - pos;
        const int32_t *src = own + pos;
        V8T top = m;
        for (i64 e = 0; e < len; e++) {
          V8T x = r.score(a, kp + src[e] * a.D * 8);
          store8(s + e * 8, x);
          top = x > top ? x : top;
        }
        const V8T base = top - top == V8T{} ? top : V8T{};
        if (pos) {
          V8T fade = exp8((m - m == V8T{} ? m : V8T{} - (T)__builtin_inf()) - base);
          l *= fade;
          for (i64 c = 0; c < a.DV; c++) acc[c] *= fade;
        }
        m = top;
        for (i64 e = 0; e < len; e++) {
          V8T p = exp8(load8(s + e * 8) - base);
          l += p;
          store8(s + e * 8, a.drop ? p * dropout8<T>(a, state, src[e]) : p);
        }
        i64 c = 0;
        for (; c + 8 <= a.DV; c += 8) {
          V8T b[8];
          for (int y = 0; y < 8; y++) b[y] = acc[c + y];
          for (i64 e = 0; e < len; e++) {
            const T *v = vp + (src[e] * a.DV + c) * 8;
            const V8T p = load8(s + e * 8);
            for (int y = 0; y < 8; y++) b[y] += p * load8(v + y * 8);
          }
          for (int y = 0; y < 8; y++) acc[c + y] = b[y];
        }
        for (; c < a.DV; c++)
          for (i64 e = 0; e < len; e++) acc[c] += load8(s + e * 8) * load8(vp + (src[e] * a.DV + c) * 8);
      }
      V8T inv = (T)1 / l;
      inv = l == V8T{} ? V8T{} + (T)__builtin_nan("") : inv;
      for (i64 c = 0; c < a.DV; c++) store8(tmp + c * 8, acc[c] * inv);
      heads_out<T>(tmp, a.oh, at.n, a.DV, (T *)a.out + at.b * a.ob + at.h0 * a.oh + i * a.ot);
      T *lse = (T *)a.lse + (at.b * a.H + at.h0) * a.TQ + i;
      for (i64 y = 0; y < at.n; y++)
        lse[y * a.TQ] = l[y] == 0 ? (T)-__builtin_inf() : finite_or_zero<T>(m[y]) + slog(l[y]);
      if (!alone) own += n;
    }
  }
}

template <class T, class S> static void narrow_task(void *ctx, i64 task) {
  Narrow<T> &w = *(Narrow<T> *)ctx;
  const Args &a = w.a;
  char *room = (char *)ga_scratch((BLOCK * 2 + 64) * 4 + BLOCK * 8 * sizeof(T));
  if (!room) { w.failed = 1; return; }
  const i64 z = task / w.slots, slot = task % w.slots, lead = a.BG > 1 ? z / w.blocks : 0;
  const i64 *ul = plan_i64(a.plan, P_UNIT_LEAD), n = ul[lead + 1] - ul[lead];
  for (i64 u = ul[lead] + slot * n / w.slots; u < ul[lead] + (slot + 1) * n / w.slots; u++)
    narrow_unit<T, S>(w, z, plan_i64(a.plan, P_UNIT) + 5 * u, (int32_t *)room, (T *)(room + (BLOCK * 2 + 64) * 4));
}

// ------------------------------------------------------------------ backward

template <class T, class S> static void narrow_back_unit(Narrow<T> &w, i64 z, const i64 *unit, int32_t *idx, T *dvec) {
  const Args &a = w.a;
  auto at = w.at(z);
  const i64 lead = a.BG > 1 ? at.b : 0;
  const int32_t *rows = plan_i32(a.plan, P_ROW);
  const i64 *row_edge = plan_i64(a.plan, P_ROW_EDGE), e_lead = row_edge[plan_i64(a.plan, P_ROW_LEAD)[lead]];
  const T *kp = w.k + z * a.TK * a.D * 8, *vp = w.v + z * a.TK * a.DV * 8;
  NarrowRow<T> r;
  load_vec(a, at.h0, at.n, r);
  V8T sum[NARROW];
  for (i64 c = 0; c < a.D; c++) sum[c] = V8T{};
  T tmp[NARROW * 8];
  i64 t = unit[0];
  while (t < unit[1]) {
    const int32_t *own;
    i64 end = fill_rows(a, lead, rows, t, unit[1], idx, &own);
    const bool alone = end == t;
    if (alone) end = t + 1;
    for (; t < end; t++) {
      const i64 i = rows[t], row = lead * a.TQ + i, n = a.edge_ptr[row + 1] - a.edge_ptr[row];
      const T *xp = w.q + (z * a.TQ + i) * a.D * 8, *gp = w.g + (z * a.TQ + i) * a.DV * 8;
      V8T g[NARROW], acc[NARROW], delta{}, lse{};
      for (i64 c = 0; c < a.D; c++) r.x[c] = load8(xp + c * 8), acc[c] = V8T{};
      for (i64 c = 0; c < a.DV; c++) g[c] = load8(gp + c * 8);
      heads_in<T>((const T *)a.out + at.b * a.ob + at.h0 * a.oh + i * a.ot, a.oh, at.n, a.DV, tmp);
      for (i64 c = 0; c < a.DV; c++) delta += g[c] * load8(tmp + c * 8);
      const i64 first = (at.b * a.H + at.h0) * a.TQ + i;
      for (i64 y = 0; y < at.n; y++) {
        lse[y] = ((const T *)a.lse)[first + y * a.TQ];
        if (a.glse) delta[y] -= ((const T *)a.glse)[first + y * a.TQ];
      }
      uint32_t state[8];
      if (a.drop)
        for (int y = 0; y < 8; y++) state[y] = mix(hash_head(a.seed, at.b, at.h0 + y), (uint32_t)i);
      T *stash = w.stash ? w.stash + (z * a.plan[P_EMAX] + row_edge[t] - e_lead) * 16 : nullptr;
      Walk walk(a, row, 0);
      for (i64 pos = 0; pos < n; pos += BLOCK) {
        const i64 len = n - pos < BLOCK ? n - pos : BLOCK;
        if (alone) walk.take(len, idx), own = idx - pos;
        const int32_t *src = own + pos;
        for (i64 e = 0; e < len; e++) {
          const T *k = kp + src[e] * a.D * 8, *v = vp + src[e] * a.DV * 8;
          V8T p = exp8(r.score(a, k) - lse), d{};
          for (i64 c = 0; c < a.DV; c++) d += g[c] * load8(v + c * 8);
          V8T kept = p;
          if (a.drop) {
            V8T m = dropout8<T>(a, state, src[e]);
            d *= m;
            kept *= m;
          }
          d = p * (d - delta) * r.scale;
          if (a.score == 0) {
            for (i64 c = 0; c < a.D; c++) acc[c] += d * load8(k + c * 8);
          } else if (a.score == 1) {
            for (i64 c = 0; c < a.D; c++) {
              V8T u = r.x[c] + load8(k + c * 8);
              d = u > V8T{} ? d : d * r.slope;  // D is 1: what flows to q and k alike
              acc[c] += d;
            }
          } else {
            for (i64 c = 0; c < a.D; c++) {
              V8T u = r.x[c] + load8(k + c * 8), on = u > V8T{} ? d : d * r.slope;
              acc[c] += on * r.vec[c];
              sum[c] += on * u;
            }
          }
          if (stash) {
            store8(stash, kept);
            store8(stash + 8, d);
            stash += 16;
          }
        }
      }
      for (i64 c = 0; c < a.D; c++) store8(tmp + c * 8, acc[c]);
      heads_out<T>(tmp, a.dqh, at.n, a.D, (T *)a.dq + at.b * a.dqb + at.h0 * a.dqh + i * a.dqt);
      if (!alone) own += n;
    }
  }
  if (dvec)
    for (i64 c = 0; c < a.D; c++)
      for (i64 y = 0; y < at.n; y++) dvec[y * a.D + c] += sum[c][y];
}

template <class T, class S> static void narrow_back_task(void *ctx, i64 task) {
  Narrow<T> &w = *(Narrow<T> *)ctx;
  const Args &a = w.a;
  int32_t *idx = (int32_t *)ga_scratch((BLOCK * 2 + 64) * 4);
  if (!idx) { w.failed = 1; return; }
  const i64 z = task / w.slots, slot = task % w.slots, lead = a.BG > 1 ? z / w.blocks : 0;
  auto at = w.at(z);
  T *dvec = a.dvec ? (T *)a.dvec + (slot * a.B * a.H + at.b * a.H + at.h0) * a.D : nullptr;
  const i64 *ul = plan_i64(a.plan, P_UNIT_LEAD), n = ul[lead + 1] - ul[lead];
  for (i64 u = ul[lead] + slot * n / w.slots; u < ul[lead] + (slot + 1) * n / w.slots; u++)
    narrow_back_unit<T, S>(w, z, plan_i64(a.plan, P_UNIT) + 5 * u, idx, dvec);
}

template <class T, class S> static void narrow_source_task(void *ctx, i64 task) {
  Narrow<T> &w = *(Narrow<T> *)ctx;
  const Args &a = w.a;
  const i64 *plan = a.plan, *sp = a.splan, *ul = plan_i64(sp, S_UNIT_LEAD);
  const i64 z = task / w.slots, slot = task % w.slots, lead = a.BG > 1 ? z / w.blocks : 0, shift = sp[S_SHIFT];
  auto at = w.at(z);
  const i64 units = ul[lead + 1] - ul[lead];
  const int32_t *rows = plan_i32(plan, P_ROW), *er = plan_i32(sp, S_ENTRY_ROW), *ej = plan_i32(sp, S_ENTRY_J),
                *en = plan_i32(sp, S_ENTRY_N);
  const i64 *ee = plan_i64(sp, S_ENTRY_E);
  const i64 e_lead = plan_i64(plan, P_ROW_EDGE)[plan_i64(plan, P_ROW_LEAD)[lead]];
  T *dk = w.dk + z * a.TK * a.D * 8, *dv = w.dv + z * a.TK * a.DV * 8;
  const T *kp = w.k + z * a.TK * a.D * 8;
  NarrowRow<T> r;
  load_vec(a, at.h0, at.n, r);
  for (i64 u = ul[lead] + slot * units / w.slots; u < ul[lead] + (slot + 1) * units / w.slots; u++) {
    const i64 *unit = plan_i64(sp, S_UNIT) + 5 * u;
    const i64 j0 = unit[0] << shift, j1 = unit[1] << shift < a.TK ? unit[1] << shift : a.TK;
    for (i64 x = j0 * a.D * 8; x < j1 * a.D * 8; x++) dk[x] = 0;
    for (i64 x = j0 * a.DV * 8; x < j1 * a.DV * 8; x++) dv[x] = 0;
    for (i64 t = unit[2]; t < unit[3]; t++) {
      const i64 i = rows[er[t]];
      const T *x = w.q + (z * a.TQ + i) * a.D * 8, *g = w.g + (z * a.TQ + i) * a.DV * 8;
      const T *stash = w.stash + (z * plan[P_EMAX] + ee[t] - e_lead) * 16;
      for (i64 j = ej[t]; j < ej[t] + en[t]; j++, stash += 16) {
        const V8T p = load8(stash), d = load8(stash + 8);
        T *dkj = dk + j * a.D * 8, *dvj = dv + j * a.DV * 8;
        if (a.score == 0)
          for (i64 c = 0; c < a.D; c++) store8(dkj + c * 8, load8(dkj + c * 8) + d * load8(x + c * 8));
        else if (a.score == 1)
          store8(dkj, load8(dkj) + d);
        else
          for (i64 c = 0; c < a.D; c++) {
            V8T s = load8(x + c * 8) + load8(kp + (j * a.D + c) * 8), on = s > V8T{} ? d : d * r.slope;
            store8(dkj + c * 8, load8(dkj + c * 8) + on * r.vec[c]);
          }
        for (i64 c = 0; c < a.DV; c++) store8(dvj + c * 8, load8(dvj + c * 8) + p * load8(g + c * 8));
      }
    }
    T *ok = (T *)a.dk + at.b * a.dkb + at.h0 * a.dkh, *ov = (T *)a.dv + at.b * a.dvb + at.h0 * a.dvh;
    for (i64 j = j0; j < j1; j++) {
      heads_out<T>(dk + j * a.D * 8, a.dkh, at.n, a.D, ok + j * a.dkt);
      heads_out<T>(dv + j * a.DV * 8, a.dvh, at.n, a.DV, ov + j * a.dvt);
    }
  }
}

// -1: not this path after all
template <class T, class S> static int narrow_run(const Args &a, bool back) {
  Narrow<T> w{a};
  w.blocks = (a.H + 7) / 8;
  w.failed = 0;
  const i64 sets = a.B * w.blocks, wide = 8 * (a.D + a.DV), leads = a.BG;
  const i64 stash = back && a.need_kv ? sets * a.plan[P_EMAX] * 16 : 0;
  if (stash * (i64)sizeof(T) > a.stash_limit) return -1;
  i64 room = sets * a.TK * wide + (back ? sets * a.TQ * wide + (a.need_kv ? sets * a.TK * wide : 0) : 0) + stash + 64;
  T *p = (T *)ga_alloc(room * sizeof(T));
  if (!p) return -1;
  w.k = p;
  w.v = w.k + sets * a.TK * a.D * 8;
  T *next = w.v + sets * a.TK * a.DV * 8;
  w.q = w.g = w.dk = w.dv = w.stash = nullptr;
  if (back) {
    w.q = next;
    w.g = w.q + sets * a.TQ * a.D * 8;
    w.stash = w.g + sets * a.TQ * a.DV * 8;
    w.dk = w.stash + stash;
    w.dv = w.dk + sets * a.TK * a.D * 8;
    if (!stash) w.stash = nullptr;
  }
  const i64 longest = a.TK > a.TQ ? a.TK : a.TQ;
  ga_parallel(a.threads, sets * ((longest + PACK - 1) / PACK), pack_task<T, S>, &w);
  const i64 units = most(plan_i64(a.plan, P_UNIT_LEAD), leads);
  w.slots = a.slots && a.slots < units ? a.slots : units;
  ga_parallel(a.threads, sets * w.slots, back ? narrow_back_task<T, S> : narrow_task<T, S>, &w);
  if (back && a.need_kv && stash && !w.failed) {
    w.slots = most(plan_i64(a.splan, S_UNIT_LEAD), leads);
    ga_parallel(a.threads, sets * w.slots, narrow_source_task<T, S>, &w);
  }
  ga_free(p);
  return w.failed;
}

}  // namespace GA_NS
