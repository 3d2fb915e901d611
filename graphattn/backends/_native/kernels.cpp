// Fused exact attention over runs; compiled once for each instruction set, with GA_NS naming it.
#include "eight.h"
#include "terms.h"
#include "tiles.h"

namespace GA_NS {

struct Buffer {
  void *p;
  INLINE Buffer(size_t n) : p(n ? ga_alloc(n) : nullptr) {}
  INLINE ~Buffer() { if (p) ga_free(p); }
};

template <class T> struct Job {
  const Args &a;
  i64 bh;
  i64 *first;          // bh + 1: tasks before each (b, h)
  T *pieces;           // hub pieces, `room` numbers for each (b, h)
  i64 room;
  i64 chunks;          // of tile groups for each (b, h)
  int failed;
  int phase;           // see Head
  T *held;
  i64 bh_first, pair_first;
  // backward
  T *stash; i64 stash_step, bh0, bh1;
  i64 slots;
  // source pass
  i64 round, unit_stride, pair0;
  T *parts; i64 parts_step;
  // fused tiles
  T *mine; i64 *zones; // chunks x bhk x {first, end, offset in mine}
};

template <class T, class S> INLINE Head<T, S> head_of(const Args &a, i64 bh) { return Head<T, S>(a, bh / a.H, bh % a.H); }
template <class T, class S> INLINE Head<T, S> head_of(const Job<T> &job, i64 bh) {
  Head<T, S> hd = head_of<T, S>(job.a, bh);
  hd.phase = job.phase;
  hd.held = job.held;
  if (job.phase) hd.each = 1, hd.ds_at = job.stash_step / 2;
  return hd;
}

// groups [g0, g1) of chunk c of n, equal numbers of columns
INLINE void cut(const i64 *plan, i64 lead, i64 c, i64 n, i64 *g0, i64 *g1) {
  const i64 *gl = plan_i64(plan, P_GROUP_LEAD), *col = plan_i64(plan, P_GROUP_COL);
  const i64 lo = gl[lead], hi = gl[lead + 1], total = col[hi] - col[lo];
  i64 out[2];
  for (int z = 0; z < 2; z++) {
    i64 want = col[lo] + (i64)((double)total * (double)(c + z) / (double)n), x = lo, y = hi;
    if (c + z == n) { out[z] = hi; continue; }
    while (x < y) {
      i64 mid = (x + y) >> 1;
      if (col[mid] < want) x = mid + 1;
      else y = mid;
    }
    out[z] = x;
  }
  *g0 = out[0];
  *g1 = out[1];
}


template <class T, class S> static void empty_rows(const Args &a, const Head<T, S> &hd, bool back) {
  const i64 *el = plan_i64(a.plan, P_EMPTY_LEAD);
  const int32_t *rows = plan_i32(a.plan, P_EMPTY_ROW);
  for (i64 r = el[hd.lead]; r < el[hd.lead + 1]; r++) {
    const i64 i = rows[r];
    if (back) {
      T *d = hd.dq + i * a.dqt;
      for (i64 c = 0; c < a.D; c++) d[c] = 0;
    } else {
      T *o = hd.out + i * a.ot;
      for (i64 c = 0; c < a.DV; c++) o[c] = 0;
      hd.lse[i] = -__builtin_inf();
    }
  }
}

template <class T, class S> static void forward_task(void *ctx, i64 task) {
  Job<T> &job = *(Job<T> *)ctx;
  const Args &a = job.a;
  task += job.first[job.bh_first];
  i64 lo = 0, hi = job.bh;
  while (hi - lo > 1) {
    i64 mid = (lo + hi) >> 1;
    if (job.first[mid] <= task) lo = mid;
    else hi = mid;
  }
  Head<T, S> hd = head_of<T, S>(job, lo);
  i64 t = task - job.first[lo];
  if (t == 0) {
    if (hd.phase != 2) empty_rows(a, hd, false);
    return;
  }
  t--;
  if (t < job.chunks) {
    if (hd.phase == 2) return;
    hd.phase = 0;
    i64 g0, g1;
    cut(a.plan, hd.lead, t, job.chunks, &g0, &g1);
    if (g0 == g1) return;
    Buffer tile(TileScratch<T>::bytes(a, false));
    Scratch<T> w(a);
    if (!tile.p || !w.ok) { job.failed = 1; return; }
    TileScratch<T> tw(a, (char *)(((uintptr_t)tile.p + 63) & ~(uintptr_t)63), false);
    for (i64 g = g0; g < g1; g++) forward_group<T>(a, hd, tw, w, g);
    return;
  }
  t -= job.chunks;
  Scratch<T> w(a);
  if (!w.ok) { job.failed = 1; return; }
  const i64 *unit = plan_i64(a.plan, P_UNIT) + 5 * (plan_i64(a.plan, P_UNIT_LEAD)[hd.lead] + t);
  forward_unit<T>(a, hd, w, unit, job.pieces ? job.pieces + lo * job.room : nullptr);
}

template <class T, class S> static void hub_task(void *ctx, i64 bh) {
  Job<T> &job = *(Job<T> *)ctx;
  const Args &a = job.a;
  Head<T, S> hd = head_of<T, S>(a, bh);
  const i64 *hl = plan_i64(a.plan, P_HUB_LEAD);
  Scratch<T> w(a);
  if (!w.ok) { job.failed = 1; return; }
  for (i64 u = hl[hd.lead]; u < hl[hd.lead + 1]; u++)
    merge_hub<T>(a, hd, plan_i64(a.plan, P_HUB) + 3 * u, job.pieces + bh * job.room, w.acc);
}

template <class T, class S> static void empty_forward_task(void *ctx, i64 bh) {
  Job<T> &job = *(Job<T> *)ctx;
  empty_rows(job.a, head_of<T, S>(job.a, bh), false);
}

// Two tables that every edge gathers a row of, side by side and head after head.  Where a projection left the heads of a
// node beside each other, one head's rows are spread over the memory of all; each is gathered several times, so a copy
// that is as small as it can be pays.  (For rows that already lie one after the other it was measured not to.)
template <class S> struct Pair {
  Buffer room{0};
  const S *x, *y;
  i64 xb, xh, xt, yb, yh, yt, rows, heads, batch, xw, yw, wide;
  static constexpr i64 PART = 512;

  // true: x and y, with their strides in b, h and t, now point into the copy
  bool make(i64 threads, i64 edges, const void **px, i64 *sx, i64 width_x, const void **py, i64 *sy, i64 width_y, i64 b, i64 h,
            i64 t) {
    xw = width_x, yw = width_y, wide = pad16(xw) + pad16(yw), batch = b, heads = h, rows = t;
    const i64 bytes = b * h * t * wide * (i64)sizeof(S), spread = t * (sx[2] + sy[2]) * (i64)sizeof(S);
    if (edges < 6 * t || spread < ((i64)1 << 22) || bytes > ((i64)1 << 28) || sx[2] + sy[2] < 2 * wide) return false;
    room.p = ga_alloc(bytes);
    if (!room.p) return false;
    x = (const S *)*px, y = (const S *)*py;
    xb = sx[0], xh = sx[1], xt = sx[2], yb = sy[0], yh = sy[1], yt = sy[2];
    ga_parallel(threads, b * h * ((t + PART - 1) / PART), copy, this);
    *px = room.p, *py = (const S *)room.p + pad16(xw);
    sx[0] = sy[0] = h * t * wide, sx[1] = sy[1] = t * wide, sx[2] = sy[2] = wide;
    return true;
  }
  static void copy(void *ctx, i64 task) {
    const Pair &p = *(const Pair *)ctx;
    const i64 per = (p.rows + PART - 1) / PART, bh = task / per, b = bh / p.heads, h = bh % p.heads;
    S *to = (S *)p.room.p + bh * p.rows * p.wide;
    for (i64 t = task % per * PART; t < (task % per + 1) * PART && t < p.rows; t++) {
      __builtin_memcpy(to + t * p.wide, p.x + b * p.xb + h * p.xh + t * p.xt, p.xw * sizeof(S));
      __builtin_memcpy(to + t * p.wide + pad16(p.xw), p.y + b * p.yb + h * p.yh + t * p.yt, p.yw * sizeof(S));
    }
  }
};
// edges of the row path for each head, on average
INLINE i64 row_edges(const Args &a) { return plan_i64(a.plan, P_ROW_EDGE)[a.plan[P_ROWS]] / (a.BG * a.HG); }
template <class S> INLINE bool beside(Args &a, Pair<S> &keys_values) {
  return keys_values.make(a.threads, row_edges(a) * (a.H / a.HK), &a.k, &a.kb, a.D, &a.v, &a.vb, a.DV, a.B, a.HK, a.TK);
}

// Keys and values of a head that do not fit into the last level of cache together.  Each row must be gathered several
// times, or there is nothing to keep.
template <class S> INLINE bool apart(const Args &a) {
  return a.score == 0 && !a.ek && !a.ev && row_edges(a) >= 6 * a.TK &&
         a.TK * (a.D + a.DV) * (i64)sizeof(S) > ga_last_level() / 8 * 7;
}

// Operation 2: how many scores for each head the forward may leave for the backward, which then need not read the keys for
// them again.  The route of narrow heads leaves none.
template <class T, class S> static i64 held(const Args &a) {
  const i64 n = a.plan[P_EMAX];
  return apart<S>(a) && !narrow(a, false) && !(a.softcap > 0) && 2 * n * (i64)sizeof(T) * a.B * a.H <= a.stash_limit ? n : 0;
}

template <class T, class S> static int forward(const Args &given) {
  Args a = given;
  const i64 bh = a.B * a.H, leads = a.BG * a.HG;
  if (!bh || !a.TQ) return 0;
  if (narrow(a, false)) {
    Job<T> job{a};
    if (a.plan[P_EMPTY]) ga_parallel(a.threads, bh, empty_forward_task<T, S>, &job);
    int r = eight(a, false) ? eight_run<T, S>(a, false) : -1;
    if (r < 0) r = narrow_run<T, S>(a, false);
    if (r >= 0) return r;
  }
  Pair<S> keys_values;
  beside<S>(a, keys_values);
  Buffer first((bh + 1) * 8);
  const i64 pieces = most(plan_i64(a.plan, P_PIECE_LEAD), leads), room = pieces * (a.DV + 2);
  Buffer part(bh * room * sizeof(T));
  if (!first.p || (room && !part.p)) return 1;
  Job<T> job{a};
  job.bh = bh;
  job.first = (i64 *)first.p;
  job.pieces = (T *)part.p;
  job.room = room;
  job.failed = 0;
  const i64 groups = most(plan_i64(a.plan, P_GROUP_LEAD), leads);
  job.chunks = groups ? (16 * a.threads + bh - 1) / bh : 0;
  if (job.chunks > groups) job.chunks = groups;
  const i64 *ul = plan_i64(a.plan, P_UNIT_LEAD);
  i64 n = 0;
  for (i64 z = 0; z < bh; z++) {
    job.first[z] = n;
    i64 lead = (a.BG > 1 ? z / a.H : 0) * a.HG + (a.HG > 1 ? z % a.H : 0);
    n += 1 + job.chunks + ul[lead + 1] - ul[lead];
  }
  job.first[bh] = n;
  Buffer held(apart<S>(a) && !a.held ? a.plan[P_EMAX] * sizeof(T) : 0);
  job.held = a.held ? (T *)a.held : (T *)held.p;
  if (!job.held) ga_parallel(a.threads, n, forward_task<T, S>, &job);
  for (; job.held && job.bh_first < bh; job.bh_first++, job.held += a.held ? a.plan[P_EMAX] : 0)
    for (job.phase = 1; job.phase <= 2; job.phase++)
      ga_parallel(a.threads, job.first[job.bh_first + 1] - job.first[job.bh_first], forward_task<T, S>, &job);
  if (pieces && !job.failed) ga_parallel(a.threads, bh, hub_task<T, S>, &job);
  return job.failed;
}

// ------------------------------------------------------------------ backward

template <class T, class S> static void slot_units(Job<T> &job, Scratch<T> &w, i64 bh, i64 slot) {
  const Args &a = job.a;
  Head<T, S> hd = head_of<T, S>(job, bh);
  const i64 *ul = plan_i64(a.plan, P_UNIT_LEAD);
  const i64 u0 = ul[hd.lead], n = ul[hd.lead + 1] - u0, table = a.pos == 2 ? 2 * a.posr + 1 : 1;
  T *dvec = a.dvec ? (T *)a.dvec + (slot * job.bh + bh) * a.D : nullptr;
  T *dpos = a.dpos ? (T *)a.dpos + (slot * job.bh + bh) * table : nullptr;
  T *stash = job.stash ? job.stash + (bh - job.bh0) * job.stash_step : nullptr;
  for (i64 u = u0 + slot * n / job.slots; u < u0 + (slot + 1) * n / job.slots; u++)
    backward_unit<T>(a, hd, w, plan_i64(a.plan, P_UNIT) + 5 * u, job.pieces ? job.pieces + bh * job.room : nullptr, stash,
                     dvec, dpos);
}

template <class T, class S> static void target_task(void *ctx, i64 task) {
  Job<T> &job = *(Job<T> *)ctx;
  const Args &a = job.a;
  Scratch<T> w(a);
  if (!w.ok) { job.failed = 1; return; }
  if (!a.shared) {
    slot_units<T, S>(job, w, job.bh0 + job.bh_first + task / job.slots, task % job.slots);
    return;
  }
  const i64 lead = task / job.slots, slot = task % job.slots;
  for (i64 bh = 0; bh < job.bh; bh++)
    if ((a.BG > 1 ? bh / a.H : 0) * a.HG + (a.HG > 1 ? bh % a.H : 0) == lead) slot_units<T, S>(job, w, bh, slot);
}

template <class T, class S> static void hub_back_task(void *ctx, i64 task) {
  Job<T> &job = *(Job<T> *)ctx;
  const Args &a = job.a;
  const i64 bh = job.bh0 + task, step = (a.D > a.DV ? a.D : a.DV) + 2;
  Head<T, S> hd = head_of<T, S>(a, bh);
  const i64 *hl = plan_i64(a.plan, P_HUB_LEAD), first = plan_i64(a.plan, P_PIECE_LEAD)[hd.lead];
  Scratch<T> w(a);
  if (!w.ok) { job.failed = 1; return; }
  for (i64 u = hl[hd.lead]; u < hl[hd.lead + 1]; u++) {
    const i64 *hub = plan_i64(a.plan, P_HUB) + 3 * u;
    for (i64 c = 0; c < a.D; c++) w.acc[c] = 0;
    for (i64 p = hub[1]; p < hub[2]; p++)
      for (i64 c = 0; c < a.D; c++) w.acc[c] += job.pieces[bh * job.room + (p - first) * step + c];
    finish_dq<T>(a, hd, plan_i32(a.plan, P_ROW)[hub[0]], w.acc);
  }
}

template <class T, class S> static void source_task(void *ctx, i64 task) {
  Job<T> &job = *(Job<T> *)ctx;
  const Args &a = job.a;
  task += job.pair_first * job.unit_stride;
  const i64 group = a.H / a.HK, pair = job.pair0 + task / job.unit_stride, t = task % job.unit_stride;
  const i64 b = pair / a.HK, h = pair % a.HK * group + job.round;
  Head<T, S> hd = head_of<T, S>(job, b * a.H + h);
  const i64 *ul = plan_i64(a.splan, S_UNIT_LEAD);
  if (t >= ul[hd.lead + 1] - ul[hd.lead]) return;
  const i64 *unit = plan_i64(a.splan, S_UNIT) + 5 * (ul[hd.lead] + t), shift = a.splan[S_SHIFT];
  Scratch<T> w(a);
  if (!w.ok) { job.failed = 1; return; }
  const T *stash = job.stash ? job.stash + (b * a.H + h - job.bh0) * job.stash_step : nullptr;
  if (unit[4] < 0) {
    source_unit<T>(a, hd, w, unit[2], unit[3], stash, hd.dk, a.dkt, hd.dv, a.dvt, 0);
  } else {
    const i64 size = (i64)1 << shift;
    T *p = job.parts + (task / job.unit_stride) * job.parts_step +
           (unit[4] - plan_i64(a.splan, S_PIECE_LEAD)[hd.lead]) * size * (a.D + a.DV);
    if (hd.phase != 2)
      for (i64 c = 0; c < size * (a.D + a.DV); c++) p[c] = 0;
    source_unit<T>(a, hd, w, unit[2], unit[3], stash, p, a.D, p + size * a.D, a.DV, unit[0] << shift);
  }
}

template <class T, class S> static void source_hub_task(void *ctx, i64 task) {
  Job<T> &job = *(Job<T> *)ctx;
  const Args &a = job.a;
  const i64 group = a.H / a.HK, pair = job.pair0 + task, b = pair / a.HK, h = pair % a.HK * group + job.round;
  Head<T, S> hd(a, b, h);
  const i64 *hl = plan_i64(a.splan, S_HUB_LEAD), shift = a.splan[S_SHIFT], size = (i64)1 << shift;
  for (i64 u = hl[hd.lead]; u < hl[hd.lead + 1]; u++) {
    const i64 *hub = plan_i64(a.splan, S_HUB) + 3 * u;
    const i64 j0 = hub[0] << shift, j1 = j0 + size < a.TK ? j0 + size : a.TK;
    for (i64 p = hub[1]; p < hub[2]; p++) {
      const T *x = job.parts + task * job.parts_step +
                   (p - plan_i64(a.splan, S_PIECE_LEAD)[hd.lead]) * size * (a.D + a.DV), *y = x + size * a.D;
      for (i64 j = j0; j < j1; j++) {
        axpy<T>((T)1, x + (j - j0) * a.D, a.D, hd.dk + j * a.dkt);
        axpy<T>((T)1, y + (j - j0) * a.DV, a.DV, hd.dv + j * a.dvt);
      }
    }
  }
}

// (b, kv head) x chunk: the only writer of its sources' gradients, or of a private copy where an earlier chunk is
template <class T, class S> static void tile_back_task(void *ctx, i64 task) {
  Job<T> &job = *(Job<T> *)ctx;
  const Args &a = job.a;
  const i64 group = a.H / a.HK, pair = task / job.chunks, c = task % job.chunks;
  Buffer tile(TileScratch<T>::bytes(a, true));
  Scratch<T> w(a);
  if (!tile.p || !w.ok) { job.failed = 1; return; }
  TileScratch<T> tw(a, (char *)(((uintptr_t)tile.p + 63) & ~(uintptr_t)63), true);
  const i64 *zone = job.zones + 3 * (pair * job.chunks + c), n = zone[1] - zone[0];
  T *mine = job.mine + zone[2];
  if (n > 0)
    for (i64 z = 0; z < n * (a.D + a.DV); z++) mine[z] = 0;
  for (i64 z = 0; z < group; z++) {
    Head<T, S> hd(a, pair / a.HK, pair % a.HK * group + z);
    i64 g0, g1;
    cut(a.plan, hd.lead, c, job.chunks, &g0, &g1);
    Sink<T> dk{hd.dk, a.dkt, mine, a.D, zone[0], zone[1]}, dv{hd.dv, a.dvt, mine + n * a.D, a.DV, zone[0], zone[1]};
    T *dpos = a.dpos ? (T *)a.dpos + (c * a.B * a.H + hd.b * a.H + hd.h) * (a.pos == 2 ? 2 * a.posr + 1 : 1) : nullptr;
    for (i64 g = g0; g < g1; g++) backward_group<T>(a, hd, tw, w, g, dk, dv, dpos);
  }
}
template <class T, class S> static void tile_merge_task(void *ctx, i64 task) {
  Job<T> &job = *(Job<T> *)ctx;
  const Args &a = job.a;
  const i64 split = 16, pair = task / split, s = task % split, group = a.H / a.HK;
  Head<T, S> hd(a, pair / a.HK, pair % a.HK * group);
  for (i64 c = 1; c < job.chunks; c++) {
    const i64 *zone = job.zones + 3 * (pair * job.chunks + c), n = zone[1] - zone[0];
    // by source, so that each is added to by one task, in the order of the chunks
    i64 j0 = a.TK * s / split, j1 = a.TK * (s + 1) / split;
    j0 = j0 > zone[0] ? j0 : zone[0];
    j1 = j1 < zone[1] ? j1 : zone[1];
    const T *x = job.mine + zone[2], *y = x + n * a.D;
    for (i64 j = j0; j < j1; j++) {
      axpy<T>((T)1, x + (j - zone[0]) * a.D, a.D, hd.dk + j * a.dkt);
      axpy<T>((T)1, y + (j - zone[0]) * a.DV, a.DV, hd.dv + j * a.dvt);
    }
  }
}

template <class T> static i64 zones_of(const Args &a, i64 chunks, i64 *zones) {
  const i64 group = a.H / a.HK;
  i64 total = 0;
  const i64 *lo = plan_i64(a.plan, P_GLO), *hi = plan_i64(a.plan, P_GHI);
  for (i64 pair = 0; pair < a.B * a.HK; pair++) {
    i64 reach = 0;
    for (i64 c = 0; c < chunks; c++) {
      i64 x = a.TK, y = 0;
      for (i64 z = 0; z < group; z++) {
        i64 g0, g1, b = pair / a.HK, h = pair % a.HK * group + z;
        cut(a.plan, (a.BG > 1 ? b : 0) * a.HG + (a.HG > 1 ? h : 0), c, chunks, &g0, &g1);
        for (i64 g = g0; g < g1; g++) {
          x = lo[g] < x ? lo[g] : x;
          y = hi[g] > y ? hi[g] : y;
        }
        if (a.HG == 1) break;
      }
      i64 *zone = zones + 3 * (pair * chunks + c), e = y < reach ? y : reach;
      zone[0] = x;
      zone[1] = c && e > x ? e : x;
      zone[2] = total;
      total += (zone[1] - zone[0]) * (a.D + a.DV);
      reach = y > reach ? y : reach;
    }
  }
  return total;
}

template <class T, class S> static void empty_back_task(void *ctx, i64 bh) {
  Job<T> &job = *(Job<T> *)ctx;
  empty_rows(job.a, head_of<T, S>(job.a, bh), true);
}

template <class T, class S> static void zero_task(void *ctx, i64 task) {
  Job<T> &job = *(Job<T> *)ctx;
  const Args &a = job.a;
  const i64 split = 16, pair = task / split, s = task % split;
  Head<T, S> hd(a, pair / a.HK, pair % a.HK * (a.H / a.HK));
  for (i64 j = a.TK * s / split; j < a.TK * (s + 1) / split; j++) {
    T *dk = hd.dk + j * a.dkt, *dv = hd.dv + j * a.dvt;
    for (i64 c = 0; c < a.D; c++) dk[c] = 0;
    for (i64 c = 0; c < a.DV; c++) dv[c] = 0;
  }
}

template <class T, class S> static int backward(const Args &given) {
  Args a = given;
  const i64 bh = a.B * a.H, leads = a.BG * a.HG, pairs = a.B * a.HK;
  if (!bh) return 0;
  Job<T> job{a};
  job.bh = bh;
  job.failed = 0;
  if (a.plan[P_EMPTY]) ga_parallel(a.threads, bh, empty_back_task<T, S>, &job);
  if (narrow(a, true)) {
    int r = eight(a, true) ? eight_run<T, S>(a, true) : -1;
    if (r < 0) r = narrow_run<T, S>(a, true);
    if (r >= 0) return r;
  }
  if (a.need_kv) ga_parallel(a.threads, pairs * 16, zero_task<T, S>, &job);
  Pair<S> keys_values, targets;
  beside<S>(a, keys_values);
  if (a.need_kv) targets.make(a.threads, row_edges(a), &a.q, &a.qb, a.D, &a.go, &a.gb, a.DV, a.B, a.H, a.TQ);
  const i64 groups = most(plan_i64(a.plan, P_GROUP_LEAD), leads);
  if (groups) {
    i64 chunks = 1;
    while (pairs * chunks < 4 * a.threads && pairs * chunks % a.threads && chunks < groups && chunks < a.slots) chunks++;
    Buffer zones(3 * 8 * pairs * chunks);
    if (!zones.p) return 1;
    i64 total = zones_of<T>(a, chunks, (i64 *)zones.p);
    while (chunks > 1 && total * (i64)sizeof(T) > ((i64)1 << 29) + 2 * a.TK * (a.D + a.DV) * (i64)sizeof(T)) {
      chunks = (chunks + 1) / 2;
      total = zones_of<T>(a, chunks, (i64 *)zones.p);
    }
    Buffer mine(total * sizeof(T));
    if (total && !mine.p) return 1;
    job.chunks = chunks;
    job.zones = (i64 *)zones.p;
    job.mine = (T *)mine.p;
    ga_parallel(a.threads, pairs * chunks, tile_back_task<T, S>, &job);
    if (total && !job.failed) ga_parallel(a.threads, pairs * 16, tile_merge_task<T, S>, &job);
    if (job.failed) return 1;
  }
  if (!a.plan[P_UNITS]) return 0;

  const i64 group = a.H / a.HK, pieces = most(plan_i64(a.plan, P_PIECE_LEAD), leads);
  job.room = pieces * ((a.D > a.DV ? a.D : a.DV) + 2);
  Buffer part(bh * job.room * sizeof(T));
  if (job.room && !part.p) return 1;
  job.pieces = (T *)part.p;
  job.stash_step = 2 * a.plan[P_EMAX];
  const i64 stash_bytes = job.stash_step * (i64)sizeof(T);
  i64 batch = bh;
  bool keep = a.need_kv;
  if (keep && stash_bytes * bh > a.stash_limit) {
    batch = a.stash_limit / stash_bytes / group * group;
    if (a.shared || !batch) keep = false, batch = bh;
  }
  Buffer stash(keep ? stash_bytes * batch : 0);
  if (keep && !stash.p) keep = false, batch = bh;
  job.stash = keep ? (T *)stash.p : nullptr;
  const i64 units = most(plan_i64(a.plan, P_UNIT_LEAD), leads);
  job.slots = a.slots < units ? a.slots : units;
  i64 source_units = 0, source_pieces = 0, size = 0;
  if (a.need_kv) {
    source_units = most(plan_i64(a.splan, S_UNIT_LEAD), leads);
    source_pieces = most(plan_i64(a.splan, S_PIECE_LEAD), leads);
    size = (i64)1 << a.splan[S_SHIFT];
  }
  job.parts_step = source_pieces * size * (a.D + a.DV);
  const i64 parts_bytes = job.parts_step * (i64)sizeof(T);
  for (i64 at = 0; at < bh; at += batch) {
    job.bh0 = at;
    job.bh1 = at + batch < bh ? at + batch : bh;
    const i64 n = job.bh1 - job.bh0;
    const bool phased = job.stash && !a.shared && !(a.softcap > 0) && apart<S>(a);
    if (!phased) ga_parallel(a.threads, (a.shared ? leads : n) * job.slots, target_task<T, S>, &job);
    for (job.bh_first = 0; phased && job.bh_first < n; job.bh_first++) {
      job.held = a.held ? (T *)a.held + (at + job.bh_first) * a.plan[P_EMAX] : nullptr;
      for (job.phase = a.held ? 2 : 1; job.phase <= 3; job.phase++)
        ga_parallel(a.threads, job.slots, target_task<T, S>, &job);
    }
    job.bh_first = job.phase = 0;
    job.held = nullptr;
    if (job.failed) return 1;
    if (pieces) ga_parallel(a.threads, n, hub_back_task<T, S>, &job);
    if (!a.need_kv) continue;
    i64 step = n / group;
    if (parts_bytes && parts_bytes * step > ((i64)1 << 28)) {
      step = ((i64)1 << 28) / parts_bytes;
      if (step < 1) step = 1;
    }
    Buffer parts(parts_bytes * step);
    if (parts_bytes && !parts.p) return 1;
    job.parts = (T *)parts.p;
    job.unit_stride = source_units;
    for (job.round = 0; job.round < group; job.round++)
      for (i64 pair = at / group; pair < job.bh1 / group; pair += step) {
        job.pair0 = pair;
        i64 m = pair + step < job.bh1 / group ? step : job.bh1 / group - pair;
        if (!phased) ga_parallel(a.threads, m * source_units, source_task<T, S>, &job);
        for (job.pair_first = 0; phased && job.pair_first < m; job.pair_first++)
          for (job.phase = 1; job.phase <= (a.splan[S_SINGLE] ? 2 : 1); job.phase++)
            ga_parallel(a.threads, source_units, source_task<T, S>, &job);
        job.pair_first = job.phase = 0;
        if (source_pieces) ga_parallel(a.threads, m, source_hub_task<T, S>, &job);
        if (job.failed) return 1;
      }
  }
  return job.failed;
}

}  // namespace GA_NS

#define NAME2(ns) ga_run_##ns
#define NAME(ns) NAME2(ns)
extern "C" __attribute__((visibility("hidden"))) int NAME(GA_NS)(int op, const Args *a) {
  using namespace GA_NS;
  if (op == 2)
    return (int)(a->wide == 1 ? held<double, double>(*a) : a->wide == 2 ? held<float, BF16>(*a) : held<float, float>(*a));
  if (a->wide == 1) return op ? backward<double, double>(*a) : forward<double, double>(*a);
  if (a->wide == 2) return op ? backward<float, BF16>(*a) : forward<float, BF16>(*a);
  return op ? backward<float, float>(*a) : forward<float, float>(*a);
}

#define TERMS2(ns) ga_terms_##ns
#define TERMS(ns) TERMS2(ns)
extern "C" __attribute__((visibility("hidden"))) void TERMS(GA_NS)(int back, Terms *a) {
  using namespace GA_NS;
  TaskFn fn = a->wide ? (back ? terms_back_task<double> : terms_task<double>) : (back ? terms_back_task<float> : terms_task<float>);
  ga_parallel(a->threads, a->slots, fn, a);
}
