// Eight heads of width eight, the shape of GAT and of narrow transformers: nothing is packed, a head's numbers are the
// lanes of one vector, and what belongs to an edge (score, weight, gradient) is one vector of eight heads.
#pragma once
#include "heads.h"

namespace GA_NS {

// log of a normal number, as the sum of a softmax is (Cephes, Moshier); what is not finite stays as it is
INLINE Eight<float>::V log8(Eight<float>::V x) {
  typedef Eight<float>::V V;
  typedef Eight<float>::I I;
  I bits = (I)x, e = ((bits >> 23) & 255) - 126;
  V m = (V)((bits & 0x007fffff) | 0x3f000000);  // in [1/2, 1)
  const I low = m < 0.70710678f;
  e += low;  // -1 where low
  m = (low ? m + m : m) - 1.f;
  V z = m * m, p = V{} + 7.0376836292e-2f;
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  V n;
  for (int y = 0; y < 8; y++) n[y] = (float)e[y];
  V y = p * m * z + n * -2.12194440e-4f - 0.5f * z;
  return x - x == V{} ? n * 0.693359375f + (m + y) : x;
}
INLINE Eight<double>::V log8(Eight<double>::V x) {
  for (int y = 0; y < 8; y++) x[y] = __builtin_log(x[y]);
  return x;
}

static bool eight(const Args &a, bool back) {
  if (a.H % 8 || a.DV != 8 || !(a.score == 1 ? a.D == 1 : a.D == 8)) return false;
  return narrow(a, back) && (!back || !a.need_kv || a.splan[S_SINGLE]);
}

template <class T> struct EightJob {
  const Args &a;
  i64 slots;
  T *stash;  // 16 numbers for every edge of each set of heads
  int failed;
};

// of eight heads: their rows and what they share
template <class T, class S> struct EightHeads {
  i64 b, h0, lead;
  const S *q, *k, *v, *go;
  const T *out;
  V8T vec[8];
  T scale, slope;
  INLINE EightHeads(const Args &a, i64 set) {
    const i64 sets = a.H / 8;
    b = set / sets, h0 = set % sets * 8;
    lead = a.BG > 1 ? b : 0;
    q = (const S *)a.q + b * a.qb + h0 * a.qh;
    k = (const S *)a.k + b * a.kb + h0 * a.kh;
    v = (const S *)a.v + b * a.vb + h0 * a.vh;
    out = (const T *)a.out + b * a.ob + h0 * a.oh;
    go = a.go ? (const S *)a.go + b * a.gb + h0 * a.gh : nullptr;
    scale = (T)a.scale, slope = (T)a.slope;
    for (int y = 0; y < 8; y++) vec[y] = a.score == 2 ? load8((const T *)a.vec + (h0 + y) * 8) : V8T{};
  }
  // one number per head, `step` apart
  template <class P> static INLINE V8T numbers(const P *p, i64 step) {
    if (step == 1) return load8(p);
    V8T x;
    for (int y = 0; y < 8; y++) x[y] = wide(p[y * step]);
    return x;
  }
};

template <class T> INLINE V8T each8(V8T p, int y) { return V8T{} + p[y]; }
template <class T> INLINE V8T leaky8(V8T u, T slope) { return u > V8T{} ? u : u * slope; }

// the query of eight heads: one number each (Additive) or eight
template <class T, class S, int SCORE> struct EightQuery {
  V8T x[SCORE == 1 ? 1 : 8];
  INLINE EightQuery(const EightHeads<T, S> &hd, const Args &a, i64 i) {
    if (SCORE == 1) x[0] = hd.numbers(hd.q + i * a.qt, a.qh);
    else
      for (int y = 0; y < 8; y++) x[SCORE == 1 ? 0 : y] = load8(hd.q + i * a.qt + y * a.qh);
  }
  INLINE V8T score(const EightHeads<T, S> &hd, const Args &a, i64 j) const {
    const S *k = hd.k + j * a.kt;
    if (SCORE == 1) return leaky8<T>(x[0] + hd.numbers(k, a.kh), hd.slope) * hd.scale;
    V8T r[8];
    for (int y = 0; y < 8; y++) {
      const V8T own = load8(k + y * a.kh);
      r[y] = SCORE == 0 ? x[SCORE == 1 ? 0 : y] * own : hd.vec[y] * leaky8<T>(x[SCORE == 1 ? 0 : y] + own, hd.slope);
    }
    return sums8<T>(r) * hd.scale;
  }
};

template <class S> INLINE void prefetch8(const S *p, i64 head_step) {
  const i64 line = 64 / sizeof(S);
  if (head_step == 8)
    for (i64 c = 0; c < 64; c += line) prefetch(p + c);
  else
    for (int y = 0; y < 8; y++) prefetch(p + y * head_step);
}

// f(target, its row, sources, how many, first edge in the row list's own numbering), a block of edges at a time;
// begin(target, row) and end(target) around them
template <class A, class F, class Z>
INLINE void eight_rows(const Args &a, i64 lead, const i64 *unit, int32_t *idx, A begin, F f, Z end_row) {
  const int32_t *rows = plan_i32(a.plan, P_ROW);
  for (i64 t = unit[0]; t < unit[1];) {
    const int32_t *own;
    i64 end = fill_rows(a, lead, rows, t, unit[1], idx, &own);
    const bool alone = end == t;
    if (alone) end = t + 1;
    for (; t < end; t++) {
      const i64 i = rows[t], row = lead * a.TQ + i, n = a.edge_ptr[row + 1] - a.edge_ptr[row];
      begin(i);
      Walk walk(a, row, 0);
      for (i64 pos = 0; pos < n; pos += BLOCK) {
        const i64 len = n - pos < BLOCK ? n - pos : BLOCK;
        if (alone) {
          walk.take(len, idx);
          for (int z = 0; z < AHEAD; z++) idx[len + z] = idx[len - 1];
        }
        f(i, alone ? idx : own + pos, len, t, pos);
      }
      end_row(i);
      if (!alone) own += n;
    }
  }
}

template <class T, class S, int SCORE> static void eight_task(void *ctx, i64 task) {
  EightJob<T> &job = *(EightJob<T> *)ctx;
  const Args &a = job.a;
  char *room = (char *)ga_scratch((BLOCK * 2 + 64) * 4 + BLOCK * 8 * sizeof(T));
  if (!room) { job.failed = 1; return; }
  int32_t *idx = (int32_t *)room;
  T *s = (T *)(room + (BLOCK * 2 + 64) * 4);
  const EightHeads<T, S> hd(a, task / job.slots);
  const i64 *ul = plan_i64(a.plan, P_UNIT_LEAD), n = ul[hd.lead + 1] - ul[hd.lead], slot = task % job.slots;
  uint32_t state[8];
  V8T m, l, acc[8];
  T *out = (T *)a.out + hd.b * a.ob + hd.h0 * a.oh, *lse = (T *)a.lse + (hd.b * a.H + hd.h0) * a.TQ;
  const V8T none = V8T{} - (T)__builtin_inf();
  for (i64 u = ul[hd.lead] + slot * n / job.slots; u < ul[hd.lead] + (slot + 1) * n / job.slots; u++)
    eight_rows(
        a, hd.lead, plan_i64(a.plan, P_UNIT) + 5 * u, idx,
        [&](i64 i) {
          m = none, l = V8T{};
          for (int y = 0; y < 8; y++) acc[y] = V8T{};
          if (a.drop)
            for (int y = 0; y < 8; y++) state[y] = mix(hash_head(a.seed, hd.b, hd.h0 + y), (uint32_t)i);
        },
        [&](i64 i, const int32_t *own, i64 len, i64, i64 pos) {
          const EightQuery<T, S, SCORE> q(hd, a, i);
          V8T top = m;
          for (i64 e = 0; e < len; e++) {
            prefetch8(hd.v + own[e + AHEAD] * a.vt, a.vh);
            if (SCORE == 0) prefetch8(hd.k + own[e + AHEAD] * a.kt, a.kh);
            const V8T x = q.score(hd, a, own[e]);
            store8(s + e * 8, x);
            top = x > top ? x : top;
          }
          const V8T base = top - top == V8T{} ? top : V8T{};
          if (pos) {
            const V8T fade = exp8((m - m == V8T{} ? m : none) - base);
            l *= fade;
            for (int y = 0; y < 8; y++) acc[y] *= each8<T>(fade, y);
          }
          m = top;
          V8T b[8];
          for (int y = 0; y < 8; y++) b[y] = acc[y];
          for (i64 e = 0; e < len; e++) {
            V8T p = exp8(load8(s + e * 8) - base);
            l += p;
            if (a.drop) p *= dropout8<T>(a, state, own[e]);
            store8(s + e * 8, p);
          }
          for (i64 e = 0; e < len; e++) {
            const S *v = hd.v + own[e] * a.vt;
            const T *p = s + e * 8;
            for (int y = 0; y < 8; y++) b[y] += (V8T{} + p[y]) * load8(v + y * a.vh);
          }
          for (int y = 0; y < 8; y++) acc[y] = b[y];
        },
        [&](i64 i) {
          const V8T inv = l == V8T{} ? V8T{} + (T)__builtin_nan("") : (T)1 / l;
          for (int y = 0; y < 8; y++) store8(out + i * a.ot + y * a.oh, acc[y] * each8<T>(inv, y));
          const V8T x = l == V8T{} ? none : (m - m == V8T{} ? m : V8T{}) + log8(l);
          for (int y = 0; y < 8; y++) lse[y * a.TQ + i] = x[y];
        });
}

template <class T, class S, int SCORE> static void eight_back_task(void *ctx, i64 task) {
  EightJob<T> &job = *(EightJob<T> *)ctx;
  const Args &a = job.a;
  int32_t *idx = (int32_t *)ga_scratch((BLOCK * 2 + 64) * 4);
  if (!idx) { job.failed = 1; return; }
  const i64 set = task / job.slots, slot = task % job.slots;
  const EightHeads<T, S> hd(a, set);
  const i64 *ul = plan_i64(a.plan, P_UNIT_LEAD), n = ul[hd.lead + 1] - ul[hd.lead];
  const i64 *row_edge = plan_i64(a.plan, P_ROW_EDGE), e_lead = row_edge[plan_i64(a.plan, P_ROW_LEAD)[hd.lead]];
  T *dq = (T *)a.dq + hd.b * a.dqb + hd.h0 * a.dqh;
  constexpr int WIDE = SCORE == 1 ? 1 : 8;
  uint32_t state[8];
  V8T g[8], acc[WIDE], vec_sum[WIDE], lse, delta;
  for (int y = 0; y < WIDE; y++) vec_sum[y] = V8T{};
  for (i64 u = ul[hd.lead] + slot * n / job.slots; u < ul[hd.lead] + (slot + 1) * n / job.slots; u++)
    eight_rows(
        a, hd.lead, plan_i64(a.plan, P_UNIT) + 5 * u, idx,
        [&](i64 i) {
          V8T r[8];
          for (int y = 0; y < 8; y++) {
            g[y] = load8(hd.go + i * a.gt + y * a.gh);
            r[y] = g[y] * load8(hd.out + i * a.ot + y * a.oh);
          }
          const i64 first = (hd.b * a.H + hd.h0) * a.TQ + i;
          delta = sums8<T>(r);
          lse = hd.numbers((const T *)a.lse + first, a.TQ);
          if (a.glse) delta -= hd.numbers((const T *)a.glse + first, a.TQ);
          for (int y = 0; y < WIDE; y++) acc[y] = V8T{};
          if (a.drop)
            for (int y = 0; y < 8; y++) state[y] = mix(hash_head(a.seed, hd.b, hd.h0 + y), (uint32_t)i);
        },
        [&](i64 i, const int32_t *own, i64 len, i64 t, i64 pos) {
          const EightQuery<T, S, SCORE> q(hd, a, i);
          T *stash = job.stash ? job.stash + (set * a.plan[P_EMAX] + row_edge[t] - e_lead + pos) * 16 : nullptr;
          for (i64 e = 0; e < len; e++) {
            const i64 j = own[e];
            prefetch8(hd.v + own[e + AHEAD] * a.vt, a.vh);
            if (SCORE == 0) prefetch8(hd.k + own[e + AHEAD] * a.kt, a.kh);
            V8T r[8];
            for (int y = 0; y < 8; y++) r[y] = g[y] * load8(hd.v + j * a.vt + y * a.vh);
            V8T d = sums8<T>(r), p = exp8(q.score(hd, a, j) - lse), kept = p;
            if (a.drop) {
              const V8T drop = dropout8<T>(a, state, own[e]);
              d *= drop;
              kept *= drop;
            }
            d = p * (d - delta) * hd.scale;
            const S *k = hd.k + j * a.kt;
            if (SCORE == 1) {
              d = q.x[0] + hd.numbers(k, a.kh) > V8T{} ? d : d * hd.slope;  // what flows to q and k alike
              acc[0] += d;
            } else {
              for (int y = 0; y < WIDE; y++) {
                const V8T own_k = load8(k + y * a.kh);
                if (SCORE == 0) {
                  acc[y] += each8<T>(d, y) * own_k;
                } else {
                  const V8T s = q.x[y] + own_k, dy = each8<T>(d, y), on = s > V8T{} ? dy : dy * hd.slope;
                  acc[y] += on * hd.vec[y];
                  vec_sum[y] += on * s;
                }
              }
            }
            if (stash) {
              store8(stash + e * 16, kept);
              store8(stash + e * 16 + 8, d);
            }
          }
        },
        [&](i64 i) {
          if (SCORE == 1)
            for (int y = 0; y < 8; y++) dq[i * a.dqt + y * a.dqh] = acc[0][y];
          else
            for (int y = 0; y < WIDE; y++) store8(dq + i * a.dqt + y * a.dqh, acc[y]);
        });
  if (SCORE == 2 && a.dvec)
    for (int y = 0; y < WIDE; y++) {
      T *to = (T *)a.dvec + (slot * a.B * a.H + hd.b * a.H + hd.h0 + y) * 8;
      store8(to, load8(to) + vec_sum[y]);
    }
}

template <class T, class S, int SCORE> static void eight_source_task(void *ctx, i64 task) {
  EightJob<T> &job = *(EightJob<T> *)ctx;
  const Args &a = job.a;
  const i64 *plan = a.plan, *sp = a.splan, *ul = plan_i64(sp, S_UNIT_LEAD);
  const i64 set = task / job.slots, slot = task % job.slots;
  const EightHeads<T, S> hd(a, set);
  const i64 units = ul[hd.lead + 1] - ul[hd.lead];
  const int32_t *rows = plan_i32(plan, P_ROW), *er = plan_i32(sp, S_ENTRY_ROW), *ej = plan_i32(sp, S_ENTRY_J);
  const i64 *ee = plan_i64(sp, S_ENTRY_E);
  const T *stash = job.stash + (set * plan[P_EMAX] - plan_i64(plan, P_ROW_EDGE)[plan_i64(plan, P_ROW_LEAD)[hd.lead]]) * 16;
  T *dk = (T *)a.dk + hd.b * a.dkb + hd.h0 * a.dkh, *dv = (T *)a.dv + hd.b * a.dvb + hd.h0 * a.dvh;
  constexpr int WIDE = SCORE == 1 ? 1 : 8;
  for (i64 u = ul[hd.lead] + slot * units / job.slots; u < ul[hd.lead] + (slot + 1) * units / job.slots; u++) {
    const i64 *unit = plan_i64(sp, S_UNIT) + 5 * u;
    const i64 end = unit[1] << sp[S_SHIFT] < a.TK ? unit[1] << sp[S_SHIFT] : a.TK;
    for (i64 t = unit[2], j = unit[0] << sp[S_SHIFT]; j < end; j++) {
      V8T k_sum[WIDE], v_sum[8];
      for (int y = 0; y < WIDE; y++) k_sum[y] = V8T{};
      for (int y = 0; y < 8; y++) v_sum[y] = V8T{};
      for (; t < unit[3] && ej[t] == j; t++) {  // none: zeros
        const i64 i = rows[er[t]];
        if (t + AHEAD < unit[3]) {
          const i64 soon = rows[er[t + AHEAD]];
          prefetch8(hd.go + soon * a.gt, a.gh);
          if (SCORE != 1) prefetch8(hd.q + soon * a.qt, a.qh);
          for (i64 c = 0; c < 16; c += 64 / (i64)sizeof(T)) prefetch(stash + ee[t + AHEAD] * 16 + c);
        }
        const T *p = stash + ee[t] * 16, *d = p + 8;
        const S *g = hd.go + i * a.gt, *x = hd.q + i * a.qt;
        for (int y = 0; y < 8; y++) v_sum[y] += (V8T{} + p[y]) * load8(g + y * a.gh);
        if (SCORE == 1) {
          k_sum[0] += load8(d);
        } else {
          for (int y = 0; y < WIDE; y++) {
            const V8T own = load8(x + y * a.qh), dy = V8T{} + d[y];
            if (SCORE == 0) {
              k_sum[y] += dy * own;
            } else {
              const V8T s = own + load8(hd.k + j * a.kt + y * a.kh);
              k_sum[y] += (s > V8T{} ? dy : dy * hd.slope) * hd.vec[y];
            }
          }
        }
      }
      for (int y = 0; y < 8; y++) store8(dv + j * a.dvt + y * a.dvh, v_sum[y]);
      if (SCORE == 1)
        for (int y = 0; y < 8; y++) dk[j * a.dkt + y * a.dkh] = k_sum[0][y];
      else
        for (int y = 0; y < WIDE; y++) store8(dk + j * a.dkt + y * a.dkh, k_sum[y]);
    }
  }
}

template <class T, class S, int SCORE> static int eight_score(const Args &a, bool back, EightJob<T> &job) {
  const i64 sets = a.B * a.H / 8, units = most(plan_i64(a.plan, P_UNIT_LEAD), a.BG);
  job.slots = a.slots && a.slots < units ? a.slots : units;
  ga_parallel(a.threads, sets * job.slots, back ? eight_back_task<T, S, SCORE> : eight_task<T, S, SCORE>, &job);
  if (back && a.need_kv && job.stash && !job.failed) {
    job.slots = most(plan_i64(a.splan, S_UNIT_LEAD), a.BG);
    ga_parallel(a.threads, sets * job.slots, eight_source_task<T, S, SCORE>, &job);
  }
  return job.failed;
}

// -1: not this path after all
template <class T, class S> static int eight_run(const Args &a, bool back) {
  const i64 stash = back && a.need_kv ? a.B * (a.H / 8) * a.plan[P_EMAX] * 16 : 0;
  if (stash * (i64)sizeof(T) > a.stash_limit) return -1;
  EightJob<T> job{a, 0, nullptr, 0};
  if (stash && !(job.stash = (T *)ga_alloc(stash * sizeof(T)))) return -1;
  const int r = a.score == 0 ? eight_score<T, S, 0>(a, back, job)
              : a.score == 1 ? eight_score<T, S, 1>(a, back, job)
                             : eight_score<T, S, 2>(a, back, job);
  if (job.stash) ga_free(job.stash);
  return r;
}

}  // namespace GA_NS
