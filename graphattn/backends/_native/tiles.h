// Groups of 32 targets against shared columns: the route for long runs.
//
// Scores are held transposed, one row of 32 targets per column, so softmax and masks work lane by lane and one register
// kernel does all seven products: C[n][lanes] (+)= sum over k of A[n, k] * B[k][lanes], A read as scalars at any stride.
#pragma once
#include "rows.h"

namespace GA_NS {

constexpr int G = 32;

template <class T, int N, int M>
INLINE void block(const T *A, i64 sn, i64 sk, const T *B, i64 sb, i64 K, TV (&acc)[N][M]) {
  constexpr int W = Simd<T>::W;
  for (i64 k = 0; k < K; k++) {
    TV b[M];
    for (int m = 0; m < M; m++) b[m] = load(B + k * sb + m * W);
#pragma GCC unroll 16
    for (int n = 0; n < N; n++) {
      TV x = splat<T>(A[n * sn + k * sk]);
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) acc[n][m] += x * b[m];
    }
  }
}

enum { SET, ADD };

template <class T, int N, int M, int MODE>
static __attribute__((noinline)) void block_to(const T *A, i64 sn, i64 sk, const T *B, i64 sb, i64 K, T *C, i64 sc) {
  constexpr int W = Simd<T>::W;
  TV acc[N][M];
#pragma GCC unroll 16
  for (int n = 0; n < N; n++)
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) acc[n][m] = MODE == ADD ? load(C + n * sc + m * W) : TV{};
  block<T, N, M>(A, sn, sk, B, sb, K, acc);
#pragma GCC unroll 16
  for (int n = 0; n < N; n++)
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) store(C + n * sc + m * W, acc[n][m]);
}

template <class T, int M, int MODE>
static void block_tail(i64 n, const T *A, i64 sn, i64 sk, const T *B, i64 sb, i64 K, T *C, i64 sc) {
  switch (n) {
    case 1: block_to<T, 1, M, MODE>(A, sn, sk, B, sb, K, C, sc); break;
    case 2: block_to<T, 2, M, MODE>(A, sn, sk, B, sb, K, C, sc); break;
    case 3: block_to<T, 3, M, MODE>(A, sn, sk, B, sb, K, C, sc); break;
    case 4: block_to<T, 4, M, MODE>(A, sn, sk, B, sb, K, C, sc); break;
    case 5: block_to<T, 5, M, MODE>(A, sn, sk, B, sb, K, C, sc); break;
#if defined(__AVX512F__) || defined(__aarch64__)
    case 6: block_to<T, 6, M, MODE>(A, sn, sk, B, sb, K, C, sc); break;
    case 7: block_to<T, 7, M, MODE>(A, sn, sk, B, sb, K, C, sc); break;
#endif
  }
}

// C[0:n][0:lanes] (+)= A B for a multiple of W lanes
template <class T, int MODE>
static void product(i64 n, i64 lanes, const T *A, i64 sn, i64 sk, const T *B, i64 sb, i64 K, T *C, i64 sc) {
  constexpr int W = Simd<T>::W;
  for (i64 at = 0; at < lanes; at += 2 * W) {
    i64 z = 0;
    if (lanes - at >= 2 * W) {
      for (; z + NB <= n; z += NB) block_to<T, NB, 2, MODE>(A + z * sn, sn, sk, B + at, sb, K, C + z * sc + at, sc);
      block_tail<T, 2, MODE>(n - z, A + z * sn, sn, sk, B + at, sb, K, C + z * sc + at, sc);
    } else {
      for (; z + NB <= n; z += NB) block_to<T, NB, 1, MODE>(A + z * sn, sn, sk, B + at, sb, K, C + z * sc + at, sc);
      block_tail<T, 1, MODE>(n - z, A + z * sn, sn, sk, B + at, sb, K, C + z * sc + at, sc);
    }
  }
}

// Where the gradients of sources go: sources before `end` to a private copy that begins at `first`.
template <class T> struct Sink {
  T *own; i64 own_t;
  T *mine; i64 mine_t, first, end;
  INLINE T *row(i64 j) const { return j < end ? mine + (j - first) * mine_t : own + j * own_t; }
};

template <class T, int N, int M>
static __attribute__((noinline)) void block_sink(const T *A, i64 sn, const T *B, i64 sb, i64 K, const Sink<T> &to,
                                                 const int32_t *idx, i64 at, int valid) {
  constexpr int W = Simd<T>::W;
  TV acc[N][M];
#pragma GCC unroll 16
  for (int n = 0; n < N; n++)
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) acc[n][m] = TV{};
  block<T, N, M>(A, sn, 1, B, sb, K, acc);
  const bool whole = valid >= M * W;
#pragma GCC unroll 16
  for (int n = 0; n < N; n++) {
    T *c = to.row(idx[n]) + at;
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
      if (whole || (m + 1) * W <= valid) store(c + m * W, load(c + m * W) + acc[n][m]);
      else store_n(c + m * W, load_n(c + m * W, valid - m * W) + acc[n][m], valid - m * W);
    }
  }
}
template <class T, int N>
INLINE void sink_rows(const T *A, i64 sn, const T *B, i64 sb, i64 K, const Sink<T> &to, const int32_t *idx, i64 width) {
  constexpr int W = Simd<T>::W;
  for (i64 at = 0; at < width; at += 2 * W) {
    if (width - at > W) block_sink<T, N, 2>(A, sn, B + at, sb, K, to, idx, at, (int)(width - at));
    else block_sink<T, N, 1>(A, sn, B + at, sb, K, to, idx, at, (int)(width - at));
  }
}

template <class T> struct TileScratch {
  static constexpr i64 CB = 256;
  T *qt, *qr, *gt, *gr, *ot, *s, *ds, *kc, *vc, *th, *drop;
  // what an edge carries: the next edge of each lane, its target, its state of the dropout hash
  i64 e[G], e_back[G];
  int32_t target[G];
  uint32_t state[G], there;
  T m[G] __attribute__((aligned(64))), l[G] __attribute__((aligned(64))), f[G] __attribute__((aligned(64)));
  uint32_t mask[CB];
  int32_t idx[CB];
  i64 dp, dvp;
  bool ok;
  INLINE TileScratch(const Args &a, char *p, bool back) {
    dp = pad16(a.D);
    dvp = pad16(a.DV);
    qt = (T *)p;
    ot = qt + dp * G;
    s = ot + (dp > dvp ? dp : dvp) * G;
    kc = s + CB * G;
    vc = kc + CB * dp;
    ds = vc + CB * dvp;
    qr = ds + (back ? CB * G : 0);
    gt = qr + (back ? G * dp : 0);
    gr = gt + (back ? G * dvp : 0);
    th = gr + (back ? G * dvp : 0);
    drop = th + (a.softcap > 0 ? CB * G : 0);
  }
  static size_t bytes(const Args &a, bool back) {
    i64 dp = pad16(a.D), dvp = pad16(a.DV), big = dp > dvp ? dp : dvp;
    i64 n = dp * G + big * G + CB * G + CB * (dp + dvp);
    if (back) n += CB * G + G * dp + 2 * G * dvp;
    n += (a.softcap > 0 ? CB * G : 0) + (a.drop ? CB * G : 0);
    return n * sizeof(T) + 256;
  }
};

// y[c][lane] = x[row of lane][c] * scale, 0 where there is no row
template <class T, class S>
static void pack_lanes(const S *x, i64 step, const int32_t *rows, i64 width, T scale, T *y) {
  for (int z = 0; z < G; z += 8) {
    i64 c = 0;
    for (; c + 8 <= width; c += 8) {
      V8T r[8];
      for (int k = 0; k < 8; k++) r[k] = rows[z + k] < 0 ? V8T{} : load8(x + rows[z + k] * step + c) * scale;
      turn8<T>(r);
      for (int k = 0; k < 8; k++) store8(y + (c + k) * G + z, r[k]);
    }
    for (; c < width; c++)
      for (int k = 0; k < 8; k++) y[c * G + z + k] = rows[z + k] < 0 ? (T)0 : wide(x[rows[z + k] * step + c]) * scale;
  }
}
// x[row of lane][c] = y[c][lane] * scale[lane]
template <class T>
static void unpack_lanes(const T *y, const T *scale, const int32_t *rows, i64 width, T *x, i64 step) {
  for (int z = 0; z < G; z += 8) {
    const V8T s = load8(scale + z);
    i64 c = 0;
    for (; c + 8 <= width; c += 8) {
      V8T r[8];
      for (int k = 0; k < 8; k++) r[k] = load8(y + (c + k) * G + z) * s;
      turn8<T>(r);
      for (int k = 0; k < 8; k++)
        if (rows[z + k] >= 0) store8(x + rows[z + k] * step + c, r[k]);
    }
    for (; c < width; c++)
      for (int k = 0; k < 8; k++)
        if (rows[z + k] >= 0) x[rows[z + k] * step + c] = y[c * G + z + k] * s[k];
  }
}
template <class T, class S>
static void pack_rows(const S *x, i64 step, const int32_t *rows, i64 width, i64 padded, T scale, T *y) {
  for (int z = 0; z < G; z++) {
    T *o = y + z * padded;
    i64 c = 0;
    if (rows[z] >= 0) {
      const S *r = x + rows[z] * step;
      for (; c < width; c++) o[c] = wide(r[c]) * scale;
    }
    for (; c < padded; c++) o[c] = 0;
  }
}

// Reads the group's columns, up to CB at a time.
struct Columns {
  const i64 *seg, *end;
  const uint32_t *masks;
  i64 used;
  INLINE Columns(const i64 *plan, i64 group)
      : seg(plan_i64(plan, P_SEG) + 3 * plan_i64(plan, P_GROUP_SEG)[group]),
        end(plan_i64(plan, P_SEG) + 3 * plan_i64(plan, P_GROUP_SEG)[group + 1]),
        masks((const uint32_t *)(plan + plan[P_MASK])), used(0) {}
  // fills idx and mask; returns the number of columns; *first is the first source if they are consecutive, else -1
  INLINE i64 take(i64 room, int32_t *idx, uint32_t *mask, i64 *first) {
    i64 n = 0;
    *first = -1;
    bool straight = true;
    while (seg < end && n < room) {
      i64 j = seg[0] + used, m = seg[1] - used;
      if (m > room - n) m = room - n;
      if (n == 0) *first = j;
      else if (j != *first + n) straight = false;
      for (i64 z = 0; z < m; z++) idx[n + z] = (int32_t)(j + z);
      if (seg[2] < 0)
        for (i64 z = 0; z < m; z++) mask[n + z] = (uint32_t)~seg[2];
      else
        for (i64 z = 0; z < m; z++) mask[n + z] = masks[seg[2] + used + z];
      n += m;
      used += m;
      if (used == seg[1]) seg += 3, used = 0;
    }
    if (!straight) *first = -1;
    return n;
  }
};

// Which columns each half of the lanes has: a band of columns leaves a corner of every group empty.
struct Halves {
  i64 lo[2], hi[2];
  // columns [0, n) for both; trimmed to those their masks name where that spares a few
  INLINE Halves(const uint32_t *mask, i64 n, bool trim) : lo{0, 0}, hi{n, n} {
    if (!trim) return;
    constexpr i64 LEAST = 8;
    i64 x[2], y[2];
    for (int z = 0; z < 2; z++) {
      const uint32_t own = 0xffffu << (16 * z);
      for (x[z] = 0; x[z] < n && !(mask[x[z]] & own);) x[z]++;
      for (y[z] = n; y[z] > x[z] && !(mask[y[z] - 1] & own);) y[z]--;
    }
    if (y[0] <= x[0] || y[1] <= x[1]) return;  // a half without columns here: rare, so nothing is spared
    for (int z = 0; z < 2; z++) {
      if (x[z] >= x[1 - z] + LEAST) lo[z] = x[z];
      if (y[z] + LEAST <= y[1 - z]) hi[z] = y[z];
    }
  }
  // f(first column, end, first lane, lanes): stretches of columns with the same lanes
  template <class F> INLINE void each(F f) const {
    const i64 a = lo[0] > lo[1] ? lo[0] : lo[1], b = hi[0] < hi[1] ? hi[0] : hi[1];
    if (a >= b) {
      for (int z = 0; z < 2; z++) f(lo[z], hi[z], 16 * z, 16);
      return;
    }
    for (int z = 0; z < 2; z++)
      if (lo[z] < a) f(lo[z], a, 16 * z, 16);
    f(a, b, 0, G);
    for (int z = 0; z < 2; z++)
      if (hi[z] > b) f(b, hi[z], 16 * z, 16);
  }
};

template <class T> INLINE typename Simd<T>::I lane_bits(int at) {
  typename Simd<T>::I b;
  for (int z = 0; z < Simd<T>::W; z++) b[z] = (int32_t)(1u << ((at + z) & 31));
  return b;
}
// x where the lane's bit is set in mask, y elsewhere
template <class T> INLINE TV pick(uint32_t mask, typename Simd<T>::I bits, TV x, TV y) {
  typename Simd<T>::I mv = bits & (typename Simd<T>::I)(typename Simd<T>::I{} + (decltype(bits[0] + 0))(int32_t)mask);
  return mv != 0 ? x : y;
}

template <class T, class S>
static void gather_rows(const S *x, i64 step, const int32_t *idx, i64 n, i64 width, i64 padded, T *y) {
  constexpr int W = Simd<T>::W;
  for (i64 z = 0; z < n; z++) {
    const S *r = x + idx[z] * step;
    i64 c = 0;
    for (; c + W <= width; c += W) store(y + z * padded + c, load(r + c));
    for (; c < width; c++) y[z * padded + c] = wide(r[c]);
  }
}
// columns first .. of rows as they lie, where they need no conversion
template <class T> INLINE bool in_place(i64 first, const T *x, i64 step, const T **p, i64 *s) {
  if (first < 0) return false;
  *p = x + first * step, *s = step;
  return true;
}
template <class T> INLINE bool in_place(i64, const BF16 *, i64, const T **, i64 *) { return false; }

INLINE bool carries(const Args &a) { return a.softcap > 0 || a.bias || a.pos || a.drop; }

template <class T, class S> static void begin_extras(const Args &a, const Head<T, S> &hd, const int32_t *rows, TileScratch<T> &w) {
  w.there = 0;
  const uint32_t state = hash_head(a.seed, hd.b, hd.h);
  for (int z = 0; z < G; z++) {
    const i64 i = rows[z] < 0 ? 0 : rows[z];
    if (rows[z] >= 0) w.there |= 1u << z;
    w.target[z] = (int32_t)i;
    w.e[z] = w.e_back[z] = a.edge_ptr[hd.lead * a.TQ + i];
    w.state[z] = mix(state, (uint32_t)i);
  }
}
// from the scaled products to the scores, and which edges dropout keeps
template <class T, class S> static void extras(const Args &a, const Head<T, S> &hd, TileScratch<T> &w, i64 n) {
  constexpr int W = Simd<T>::W;
  if (a.softcap > 0) {
    const T cap = (T)a.softcap, inv = (T)(1 / a.softcap);
    for (i64 c = 0; c < n * G; c += W) {
      const TV t = vtanh(load(w.s + c) * inv);
      store(w.th + c, t);
      store(w.s + c, cap * t);
    }
  }
  if (hd.bias)
    for (i64 c = 0; c < n; c++)
      for (uint32_t left = w.mask[c] & w.there; left; left &= left - 1) {
        const int z = __builtin_ctz(left);
        w.s[c * G + z] += hd.bias[w.e[z]++ * a.bias_e];
      }
  if (a.pos == 1) {
    const T slope = hd.post[0];
    for (i64 c = 0; c < n; c++) {
      const int32_t j = w.idx[c] - (int32_t)a.poso;
      for (int z = 0; z < G; z++) {
        const int32_t away = w.target[z] - j;
        w.s[c * G + z] -= slope * (T)(away < 0 ? -away : away);
      }
    }
  } else if (a.pos == 2) {
    const int32_t r = (int32_t)a.posr;
    for (i64 c = 0; c < n; c++) {
      const int32_t j = w.idx[c] - (int32_t)a.poso;
      for (int z = 0; z < G; z++) {
        int32_t away = j - w.target[z];
        away = away < -r ? -r : away > r ? r : away;
        w.s[c * G + z] += hd.post[away + r];
      }
    }
  }
  if (a.drop) {
    const uint32_t limit = (uint32_t)a.threshold;
    const T keep = (T)a.keep;
    for (i64 c = 0; c < n; c++) {
      const uint32_t j = (uint32_t)w.idx[c];
      for (int z = 0; z < G; z++) w.drop[c * G + z] = hash_edge(w.state[z], j) < limit ? (T)0 : keep;
    }
  }
}
// gradients of what the edges carry, from that of the biased score in w.ds; then through the softcap
template <class T, class S> static void extras_back(const Args &a, const Head<T, S> &hd, TileScratch<T> &w, i64 n, T *dpos) {
  constexpr int W = Simd<T>::W;
  if (hd.dbias)
    for (i64 c = 0; c < n; c++)
      for (uint32_t left = w.mask[c] & w.there; left; left &= left - 1) {
        const int z = __builtin_ctz(left);
        hd.dbias[w.e_back[z]++] += w.ds[c * G + z];
      }
  if (dpos) {
    const int32_t r = (int32_t)a.posr;
    for (i64 c = 0; c < n; c++) {
      const int32_t j = w.idx[c] - (int32_t)a.poso;
      if (a.pos == 1) {
        T sum = 0;
        for (int z = 0; z < G; z++) {
          const int32_t away = w.target[z] - j;
          sum += w.ds[c * G + z] * (T)(away < 0 ? -away : away);
        }
        dpos[0] -= sum;
      } else {
        for (int z = 0; z < G; z++) {
          int32_t away = j - w.target[z];
          away = away < -r ? -r : away > r ? r : away;
          dpos[away + r] += w.ds[c * G + z];
        }
      }
    }
  }
  if (a.softcap > 0)
    for (i64 c = 0; c < n * G; c += W) {
      const TV t = load(w.th + c);
      // where masked out ds is 0, but tanh of what is there may not be finite
      const TV d = load(w.ds + c);
      store(w.ds + c, d == TV{} ? d : d * (1 - t * t));
    }
}

template <class T, class S>
static void forward_group(const Args &a, const Head<T, S> &hd, TileScratch<T> &w, Scratch<T> &rw, i64 group) {
  constexpr int W = Simd<T>::W;
  const int32_t *rows = plan_i32(a.plan, P_GROUP_ROW) + group * G;
  pack_lanes<T>(hd.q, a.qt, rows, a.D, hd.scale, w.qt);
  for (i64 c = 0; c < a.DV * G; c++) w.ot[c] = 0;
  for (int z = 0; z < G; z++) w.m[z] = -__builtin_inf(), w.l[z] = 0;
  Columns cols(a.plan, group);
  bool begun = false;
  const bool more = carries(a);
  if (more) begin_extras(a, hd, rows, w);
  for (;;) {
    i64 first, n = cols.take(TileScratch<T>::CB, w.idx, w.mask, &first);
    if (!n) break;
    const T *kp, *vp;
    i64 ks, vs;
    if (!in_place<T>(first, hd.k, a.kt, &kp, &ks) || !in_place<T>(first, hd.v, a.vt, &vp, &vs)) {
      gather_rows<T>(hd.k, a.kt, w.idx, n, a.D, w.dp, w.kc);
      gather_rows<T>(hd.v, a.vt, w.idx, n, a.DV, w.dvp, w.vc);
      kp = w.kc, ks = w.dp, vp = w.vc, vs = w.dvp;
    }
    uint32_t all = 0xffffffffu;
    for (i64 c = 0; c < n; c++) all &= w.mask[c];
    const Halves halves(w.mask, n, all != 0xffffffffu && !more);
    halves.each([&](i64 c, i64 end, i64 z, i64 lanes) {
      product<T, SET>(end - c, lanes, kp + c * ks, ks, 1, w.qt + z, G, a.D, w.s + c * G + z, G);
    });
    if (more) extras(a, hd, w, n);
    const TV none = splat<T>(-__builtin_inf());
    for (int z = 0; z < G; z += W) {
      const i64 c0 = halves.lo[z / 16], c1 = halves.hi[z / 16];
      TV top = load(w.m + z), old = top, sum{};
      if (all != 0xffffffffu) {
        const typename Simd<T>::I bits = lane_bits<T>(z);
        for (i64 c = c0; c < c1; c++) {
          TV x = load(w.s + c * G + z);
          if (w.mask[c] != 0xffffffffu) {
            x = pick<T>(w.mask[c], bits, x, none);
            store(w.s + c * G + z, x);
          }
          top = maxv<T>(top, x);
        }
      } else {
        for (i64 c = c0; c < c1; c++) top = maxv<T>(top, load(w.s + c * G + z));
      }
      const TV base = top - top == TV{} ? top : TV{};
      const TV fade = begun ? vexp(old - base) : TV{};
      for (i64 c = c0; c < c1; c++) {
        TV x = vexp(load(w.s + c * G + z) - base);
        store(w.s + c * G + z, x);
        sum += x;
      }
      store(w.l + z, load(w.l + z) * fade + sum);
      store(w.m + z, top);
      if (begun)
        for (i64 c = 0; c < a.DV; c++) store(w.ot + c * G + z, load(w.ot + c * G + z) * fade);
    }
    if (a.drop)
      for (i64 c = 0; c < n * G; c += W) store(w.s + c, load(w.s + c) * load(w.drop + c));
    begun = true;
    halves.each([&](i64 c, i64 end, i64 z, i64 lanes) {
      product<T, ADD>(a.DV, lanes, vp + c * vs, 1, vs, w.s + c * G + z, G, end - c, w.ot + z, G);
    });
  }
  // anything that is not finite may have come from a column that only others read: 0 * nan
  TV odd{};
  for (i64 c = 0; c < a.DV * G; c += W) odd += load(w.ot + c) * (T)0;
  for (int z = 0; z < G; z += W) odd += load(w.l + z) * (T)0 + load(w.m + z) * (T)0;
  if (hsum<T>(odd) != 0) {
    for (int z = 0; z < G; z++)
      if (rows[z] >= 0) forward_row<T>(a, hd, rw, rows[z], nullptr);
    return;
  }
  for (int z = 0; z < G; z++) {
    if (rows[z] >= 0) hd.lse[rows[z]] = w.m[z] + slog(w.l[z]);
    w.f[z] = 1 / w.l[z];
  }
  unpack_lanes<T>(w.ot, w.f, rows, a.DV, hd.out, a.ot);
}

// The backward of a group, lane by lane and edge by edge: for values that are not finite.
template <class T, class S>
static void backward_group_rows(const Args &a, const Head<T, S> &hd, Scratch<T> &w, const int32_t *rows, const Sink<T> *dk,
                                const Sink<T> *dv, T *dpos) {
  for (int z = 0; z < G; z++) {
    if (rows[z] < 0) continue;
    const i64 i = rows[z], row = hd.lead * a.TQ + i, n = a.edge_ptr[row + 1] - a.edge_ptr[row];
    const T delta = delta_of(a, hd, i);
    backward_part<T>(a, hd, w, row, i, 0, n, nullptr, delta, nullptr, nullptr, nullptr, dpos);
    finish_dq<T>(a, hd, i, w.acc);
    if (!dk) continue;
    Walk walk(a, row, 0);
    for (i64 pos = 0; pos < n; pos += BLOCK) {
      i64 m = n - pos < BLOCK ? n - pos : BLOCK;
      walk.take(m, w.idx);
      for (int y = 0; y < AHEAD + 4; y++) w.idx[m + y] = w.idx[m - 1];
      edge_grads<T>(a, hd, w, i, delta, w.idx, m, a.edge_ptr[row] + pos, false);
      for (i64 e = 0; e < m; e++) {
        axpy<T>(w.ds[e], w.x, a.D, dk->row(w.idx[e]));
        axpy<T>(w.p[e], w.g, a.DV, dv->row(w.idx[e]));
      }
    }
  }
}

template <class T, class S>
static void backward_group(const Args &a, const Head<T, S> &hd, TileScratch<T> &w, Scratch<T> &rw, i64 group,
                           const Sink<T> &dk, const Sink<T> &dv, T *dpos) {
  constexpr int W = Simd<T>::W;
  constexpr i64 CB = TileScratch<T>::CB / 2;
  const int32_t *rows = plan_i32(a.plan, P_GROUP_ROW) + group * G;
  pack_lanes<T>(hd.q, a.qt, rows, a.D, hd.scale, w.qt);
  pack_rows<T>(hd.q, a.qt, rows, a.D, w.dp, hd.scale, w.qr);
  pack_lanes<T>(hd.go, a.gt, rows, a.DV, (T)1, w.gt);
  pack_rows<T>(hd.go, a.gt, rows, a.DV, w.dvp, (T)1, w.gr);
  for (int z = 0; z < G; z++) {
    w.l[z] = rows[z] < 0 ? (T)__builtin_inf() : hd.lse[rows[z]];  // a lane without a target: p = exp(-inf) = 0
    w.m[z] = rows[z] < 0 ? 0 : delta_of(a, hd, rows[z]);
  }
  TV odd{};
  for (i64 c = 0; c < a.D * G; c += W) odd += load(w.qt + c) * (T)0;
  for (i64 c = 0; c < a.DV * G; c += W) odd += load(w.gt + c) * (T)0;
  for (int z = 0; z < G; z++)
    if (rows[z] >= 0) odd += (w.l[z] + w.m[z]) * (T)0;
  if (hsum<T>(odd) != 0) {
    backward_group_rows<T>(a, hd, rw, rows, &dk, &dv, dpos);
    return;
  }
  for (i64 c = 0; c < a.D * G; c++) w.ot[c] = 0;
  const bool more = carries(a);
  if (more) begin_extras(a, hd, rows, w);
  Columns cols(a.plan, group);
  for (;;) {
    i64 first, n = cols.take(CB, w.idx, w.mask, &first);
    if (!n) break;
    const T *kp, *vp;
    i64 ks, vs;
    if (!in_place<T>(first, hd.k, a.kt, &kp, &ks) || !in_place<T>(first, hd.v, a.vt, &vp, &vs)) {
      gather_rows<T>(hd.k, a.kt, w.idx, n, a.D, w.dp, w.kc);
      gather_rows<T>(hd.v, a.vt, w.idx, n, a.DV, w.dvp, w.vc);
      kp = w.kc, ks = w.dp, vp = w.vc, vs = w.dvp;
    }
    const Halves halves(w.mask, n, !more);
    halves.each([&](i64 c, i64 end, i64 z, i64 lanes) {
      product<T, SET>(end - c, lanes, kp + c * ks, ks, 1, w.qt + z, G, a.D, w.s + c * G + z, G);
      product<T, SET>(end - c, lanes, vp + c * vs, vs, 1, w.gt + z, G, a.DV, w.ds + c * G + z, G);
    });
    if (more) extras(a, hd, w, n);
    for (int z = 0; z < G; z += W) {
      const typename Simd<T>::I bits = lane_bits<T>(z);
      const TV lse = load(w.l + z), delta = load(w.m + z);
      for (i64 c = halves.lo[z / 16]; c < halves.hi[z / 16]; c++) {
        TV p = vexp(load(w.s + c * G + z) - lse);
        TV d = load(w.ds + c * G + z), kept = p;
        if (a.drop) {
          const TV m = load(w.drop + c * G + z);
          d *= m;
          kept *= m;
        }
        d = p * (d - delta);
        p = kept;
        if (w.mask[c] != 0xffffffffu) {
          p = pick<T>(w.mask[c], bits, p, TV{});
          d = pick<T>(w.mask[c], bits, d, TV{});
        }
        store(w.s + c * G + z, p);
        store(w.ds + c * G + z, d);
      }
    }
    if (more) extras_back(a, hd, w, n, dpos);
    halves.each([&](i64 c, i64 end, i64 z, i64 lanes) {
      product<T, ADD>(a.D, lanes, kp + c * ks, 1, ks, w.ds + c * G + z, G, end - c, w.ot + z, G);
      const T *g = w.gr + z * w.dvp, *x = w.qr + z * w.dp;
      for (; c + NB <= end; c += NB) {
        sink_rows<T, NB>(w.s + c * G + z, G, g, w.dvp, lanes, dv, w.idx + c, a.DV);
        sink_rows<T, NB>(w.ds + c * G + z, G, x, w.dp, lanes, dk, w.idx + c, a.D);
      }
      for (; c < end; c++) {
        sink_rows<T, 1>(w.s + c * G + z, G, g, w.dvp, lanes, dv, w.idx + c, a.DV);
        sink_rows<T, 1>(w.ds + c * G + z, G, x, w.dp, lanes, dk, w.idx + c, a.D);
      }
    });
  }
  for (i64 c = 0; c < a.D * G; c += W) odd += load(w.ot + c) * (T)0;
  if (hsum<T>(odd) != 0) {
    Head<T, S> again = hd;  // only dq: the rest is already added
    again.dbias = nullptr;
    backward_group_rows<T>(a, again, rw, rows, nullptr, nullptr, nullptr);
    return;
  }
  for (int z = 0; z < G; z++) w.f[z] = hd.scale;
  unpack_lanes<T>(w.ot, w.f, rows, a.D, hd.dq, a.dqt);
}

}  // namespace GA_NS
