// GAT's two numbers for every node and head, <t_h, v_nh> and <s_h, v_nh>, and their backward: one pass over the values.
#pragma once
#include "simd.h"

namespace GA_NS {

template <class T> INLINE void dot_both(const T *v, const T *t, const T *s, i64 width, T *q, T *k) {
  constexpr int W = Simd<T>::W;
  TV x{}, y{};
  i64 c = 0;
  for (; c + W <= width; c += W) {
    const TV own = load(v + c);
    x += own * load(t + c), y += own * load(s + c);
  }
  if (c < width) {
    const int n = (int)(width - c);
    const TV own = load_n(v + c, n);
    x += own * load_n(t + c, n), y += own * load_n(s + c, n);
  }
  *q = hsum<T>(x), *k = hsum<T>(y);
}

template <class T> static void terms_task(void *ctx, i64 task) {
  const Terms &a = *(const Terms *)ctx;
  const T *v = (const T *)a.v, *t = (const T *)a.target, *s = (const T *)a.source;
  T *q = (T *)a.q, *k = (T *)a.k;
  const i64 wide = a.heads * a.width, r1 = a.rows * (task + 1) / a.slots;
  for (i64 r = a.rows * task / a.slots; r < r1; r++) {
    const T *row = v + r * wide;
    i64 h = 0;
    if (a.width == 8)
      for (; h + 8 <= a.heads; h += 8) {
        V8T x[8], y[8];
        for (int z = 0; z < 8; z++) {
          const V8T own = load8(row + (h + z) * 8);
          x[z] = own * load8(t + (h + z) * 8), y[z] = own * load8(s + (h + z) * 8);
        }
        store8(q + r * a.heads + h, sums8<T>(x));
        store8(k + r * a.heads + h, sums8<T>(y));
      }
    for (; h < a.heads; h++)
      dot_both<T>(row + h * a.width, t + h * a.width, s + h * a.width, a.width, q + r * a.heads + h, k + r * a.heads + h);
  }
}

// d_target, d_source: (slots, heads * width), a partial sum for each task, in the order of the nodes
template <class T> static void terms_back_task(void *ctx, i64 task) {
  constexpr int W = Simd<T>::W;
  const Terms &a = *(const Terms *)ctx;
  const T *v = (const T *)a.v, *t = (const T *)a.target, *s = (const T *)a.source, *q = (const T *)a.q, *k = (const T *)a.k;
  const i64 wide = a.heads * a.width, r1 = a.rows * (task + 1) / a.slots;
  T *dv = (T *)a.dv, *dt = (T *)a.d_target + task * wide, *ds = (T *)a.d_source + task * wide;
  for (i64 r = a.rows * task / a.slots; r < r1; r++)
    for (i64 h = 0; h < a.heads; h++) {
      const T dq = q[r * a.heads + h], dk = k[r * a.heads + h];
      const i64 at = h * a.width;
      if (a.width == 8) {  // whole vectors for GAT's usual width, whatever the machine's are
        const V8T own = load8(v + r * wide + at);
        store8(dv + r * wide + at, dq * load8(t + at) + dk * load8(s + at));
        store8(dt + at, load8(dt + at) + dq * own);
        store8(ds + at, load8(ds + at) + dk * own);
        continue;
      }
      for (i64 c = at; c < at + a.width; c += W) {
        const int n = at + a.width - c < W ? (int)(at + a.width - c) : W;
        const TV own = n == W ? load(v + r * wide + c) : load_n(v + r * wide + c, n);
        store_n(dv + r * wide + c, dq * load_n(t + c, n) + dk * load_n(s + c, n), n);
        store_n(dt + c, load_n(dt + c, n) + dq * own, n);
        store_n(ds + c, load_n(ds + c, n) + dk * own, n);
      }
    }
}

}  // namespace GA_NS
