// Vectors through the compiler's vector extensions: one source, one namespace for each instruction set.
// No standard library in here: an inline function of it compiled for AVX-512 must never be the copy the linker keeps.
#pragma once
#include "abi.h"
#if defined(__AVX__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace GA_NS {

#if defined(__AVX512F__)
constexpr int VB = 64;
constexpr int NB = 8;   // rows of a register block; x 2 vectors
#elif defined(__AVX__)
constexpr int VB = 32;
constexpr int NB = 6;
#else
constexpr int VB = 16;
#if defined(__aarch64__)
constexpr int NB = 8;
#else
constexpr int NB = 6;
#endif
#endif

template <class T> struct Simd;
template <> struct Simd<float> {
  static constexpr int W = VB / 4;
  typedef float V __attribute__((vector_size(VB)));
  typedef float U __attribute__((vector_size(VB), aligned(4), may_alias));
  typedef int32_t I __attribute__((vector_size(VB)));
  typedef float V4 __attribute__((vector_size(16)));
  typedef float U4 __attribute__((vector_size(16), aligned(4), may_alias));
};
template <> struct Simd<double> {
  static constexpr int DB = VB < 32 ? 32 : VB;  // at least four lanes: the compiler splits what the machine lacks
  static constexpr int W = DB / 8;
  typedef double V __attribute__((vector_size(DB)));
  typedef double U __attribute__((vector_size(DB), aligned(8), may_alias));
  typedef int64_t I __attribute__((vector_size(DB)));
  typedef double V4 __attribute__((vector_size(32)));
  typedef double U4 __attribute__((vector_size(32), aligned(8), may_alias));
};
typedef Simd<float>::V VF;
typedef Simd<double>::V VD;
#define TV typename Simd<T>::V

// bfloat16, as it is stored: the upper half of a float.  Arithmetic is in float.
struct BF16 { uint16_t bits; };
INLINE float wide(BF16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float y;
  __builtin_memcpy(&y, &bits, 4);
  return y;
}
INLINE float wide(float x) { return x; }
INLINE double wide(double x) { return x; }
template <int N> struct Halves16 {
  typedef uint16_t U __attribute__((vector_size(2 * N), aligned(2), may_alias));
  typedef uint32_t W __attribute__((vector_size(4 * N)));
};

INLINE VF load(const BF16 *p) {
  typedef Halves16<Simd<float>::W> H;
  return (VF)(__builtin_convertvector(*(const H::U *)p, H::W) << 16);
}
INLINE VF load_n(const BF16 *p, int n) {
  BF16 own[Simd<float>::W] = {};
  for (int i = 0; i < n; i++) own[i] = p[i];
  return load(own);
}
template <class T> INLINE TV load(const T *p) { return *(const typename Simd<T>::U *)p; }
template <class T> INLINE void store(T *p, TV x) { *(typename Simd<T>::U *)p = x; }
template <class T> INLINE TV splat(T x) { return x - TV{}; }
INLINE VF zerof() { return VF{}; }

// n < W elements, the rest 0; memory beyond them is never touched
INLINE VF load_n(const float *p, int n) {
#if defined(__AVX512F__)
  return (VF)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#elif defined(__AVX__)
  alignas(32) static const int32_t M[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
  return (VF)_mm256_maskload_ps(p, _mm256_loadu_si256((const __m256i *)(M + 8 - n)));
#else
  float a[Simd<float>::W] = {};
  for (int i = 0; i < n; i++) a[i] = p[i];
  return load<float>(a);
#endif
}
INLINE void store_n(float *p, VF x, int n) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)x);
#elif defined(__AVX__)
  alignas(32) static const int32_t M[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
  _mm256_maskstore_ps(p, _mm256_loadu_si256((const __m256i *)(M + 8 - n)), (__m256)x);
#else
  for (int i = 0; i < n; i++) p[i] = x[i];
#endif
}
INLINE VD load_n(const double *p, int n) {
#if defined(__AVX512F__)
  return (VD)_mm512_maskz_loadu_pd((__mmask8)((1u << n) - 1), p);
#elif defined(__AVX__)
  alignas(32) static const int64_t M[8] = {-1, -1, -1, -1, 0, 0, 0, 0};
  return (VD)_mm256_maskload_pd(p, _mm256_loadu_si256((const __m256i *)(M + 4 - n)));
#else
  double a[Simd<double>::W] = {};
  for (int i = 0; i < n; i++) a[i] = p[i];
  return load<double>(a);
#endif
}
INLINE void store_n(double *p, VD x, int n) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_pd(p, (__mmask8)((1u << n) - 1), (__m512d)x);
#elif defined(__AVX__)
  alignas(32) static const int64_t M[8] = {-1, -1, -1, -1, 0, 0, 0, 0};
  _mm256_maskstore_pd(p, _mm256_loadu_si256((const __m256i *)(M + 4 - n)), (__m256d)x);
#else
  for (int i = 0; i < n; i++) p[i] = x[i];
#endif
}

// all ones in the first n lanes
template <class T> INLINE typename Simd<T>::I lanes_below(int n) {
  typename Simd<T>::I at;
  for (int i = 0; i < Simd<T>::W; i++) at[i] = i;
  return at < (typename Simd<T>::I{} + n);
}

template <class T> INLINE TV maxv(TV a, TV b) { return a > b ? a : b; }

// exp to about 1 ulp: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]; 0 below the normal range; NaN stays NaN.
// V is any vector of floats, I the integers beside it.
template <class V> INLINE V exp_core(V y, V &n, V &t) {
  const V magic = V{} + 12582912.f;
  t = y * 1.44269504088896341f + magic;
  n = t - magic;
  V r = y - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  V p = V{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return p * (r * r) + r + 1.f;
}
template <class V, class I> INLINE V exp_poly(V x) {
  V n, t, p = exp_core<V>(x < -87.f ? V{} - 87.f : x, n, t);
  p = p * (V)(((I)t << 23) + 0x3f800000);
  return x < -87.f ? V{} : x > 88.7f ? V{} + __builtin_inff() : p;  // only infinity is that large after the maximum is off
}
template <class V> INLINE V exp_core_double(V y, V &n, V &t) {
  const V magic = V{} + 6755399441055744.0;
  t = y * 1.4426950408889634 + magic;
  n = t - magic;
  V r = y - n * 6.93145751953125e-1;
  r = r - n * 1.42860682030941723212e-6;
  V p = V{} + 1.6059043836821613e-10;
  p = p * r + 2.08767569878681e-09;
  p = p * r + 2.505210838544172e-08;
  p = p * r + 2.755731922398589e-07;
  p = p * r + 2.7557319223985893e-06;
  p = p * r + 2.48015873015873e-05;
  p = p * r + 1.984126984126984e-04;
  p = p * r + 1.388888888888889e-03;
  p = p * r + 8.333333333333333e-03;
  p = p * r + 4.1666666666666664e-02;
  p = p * r + 1.6666666666666666e-01;
  p = p * r + 0.5;
  return p * (r * r) + r + 1.0;
}
template <class V, class I> INLINE V exp_poly_double(V x) {
  V n, t, p = exp_core_double<V>(x < -708.0 ? V{} - 708.0 : x, n, t);
  p = p * (V)(((I)t << 52) + 0x3ff0000000000000);
  return x < -708.0 ? V{} : x > 709.7 ? V{} + __builtin_inf() : p;
}
#if defined(__AVX512F__)
INLINE VF vexp(VF x) {
  VF n, t, p = exp_core<VF>((VF)_mm512_max_ps(_mm512_set1_ps(-104.f), (__m512)x), n, t);  // the second where one is NaN
  return (VF)_mm512_scalef_ps((__m512)p, (__m512)n);
}
INLINE VD vexp(VD x) {
  VD n, t, p = exp_core_double<VD>((VD)_mm512_max_pd(_mm512_set1_pd(-746.0), (__m512d)x), n, t);
  return (VD)_mm512_scalef_pd((__m512d)p, (__m512d)n);
}
#else
INLINE VF vexp(VF x) { return exp_poly<VF, Simd<float>::I>(x); }
INLINE VD vexp(VD x) { return exp_poly_double<VD, Simd<double>::I>(x); }
#endif

INLINE float sexp(float x) { return __builtin_expf(x); }
INLINE double sexp(double x) { return __builtin_exp(x); }
INLINE float slog(float x) { return __builtin_logf(x); }
INLINE double slog(double x) { return __builtin_log(x); }
// tanh after Cephes (Moshier): a polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel
INLINE VF vtanh(VF x) {
  VF z = x * x, p = splat<float>(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  VF near = p * z * x + x, size = x < zerof() ? -x : x;
  VF far = 1.f - 2.f / (vexp(size > 40.f ? splat<float>(80.f) : 2.f * size) + 1.f);
  return size < 0.625f ? near : x < zerof() ? -far : x == x ? far : x;
}
INLINE VD vtanh(VD x) {
  VD z = x * x;
  VD p = (z * -9.64399179425052238628e-1 - 9.92877231001918586564e1) * z - 1.61468768441708447952e3;
  VD q = ((z + 1.12811678491632931402e2) * z + 2.23548839060100448583e3) * z + 4.84406305325125486048e3;
  VD near = p / q * z * x + x, size = x < VD{} ? -x : x;
  VD far = 1.0 - 2.0 / (vexp(size > 40.0 ? splat<double>(80.0) : 2.0 * size) + 1.0);
  return size < 0.625 ? near : x < VD{} ? -far : x == x ? far : x;
}

#define SHUF(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)

INLINE Simd<float>::V4 fold4(VF x) {
#if defined(__AVX512F__)
  typedef float V8 __attribute__((vector_size(32)));
  V8 y = SHUF(x, x, 0, 1, 2, 3, 4, 5, 6, 7) + SHUF(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
  return SHUF(y, y, 0, 1, 2, 3) + SHUF(y, y, 4, 5, 6, 7);
#elif defined(__AVX__)
  return SHUF(x, x, 0, 1, 2, 3) + SHUF(x, x, 4, 5, 6, 7);
#else
  return x;
#endif
}
INLINE Simd<double>::V4 fold4(VD x) {
#if defined(__AVX512F__)
  return SHUF(x, x, 0, 1, 2, 3) + SHUF(x, x, 4, 5, 6, 7);
#else
  return x;
#endif
}
template <class T> INLINE T hsum(TV x) {
  typename Simd<T>::V4 y = fold4(x);
  y = y + SHUF(y, y, 2, 3, 0, 1);
  return y[0] + y[1];
}
INLINE float hmax(VF x) {
#if defined(__AVX512F__)
  typedef float V8 __attribute__((vector_size(32)));
  V8 a = SHUF(x, x, 0, 1, 2, 3, 4, 5, 6, 7), b = SHUF(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
  a = a > b ? a : b;
  Simd<float>::V4 c = SHUF(a, a, 0, 1, 2, 3), d = SHUF(a, a, 4, 5, 6, 7);
#elif defined(__AVX__)
  Simd<float>::V4 c = SHUF(x, x, 0, 1, 2, 3), d = SHUF(x, x, 4, 5, 6, 7);
#else
  Simd<float>::V4 c = x, d = x;
#endif
  c = c > d ? c : d;
  d = SHUF(c, c, 2, 3, 0, 1);
  c = c > d ? c : d;
  return c[0] > c[1] ? c[0] : c[1];
}
INLINE double hmax(VD x) {
#if defined(__AVX512F__)
  Simd<double>::V4 c = SHUF(x, x, 0, 1, 2, 3), d = SHUF(x, x, 4, 5, 6, 7);
#else
  Simd<double>::V4 c = x, d = x;
#endif
  c = c > d ? c : d;
  d = SHUF(c, c, 2, 3, 0, 1);
  c = c > d ? c : d;
  return c[0] > c[1] ? c[0] : c[1];
}
// four vectors to the vector of their four sums
template <class T> INLINE typename Simd<T>::V4 sum4(TV a, TV b, TV c, TV d) {
  typedef typename Simd<T>::V4 V4;
  V4 x = fold4(a), y = fold4(b), z = fold4(c), w = fold4(d);
  V4 xy = SHUF(x, y, 0, 4, 1, 5) + SHUF(x, y, 2, 6, 3, 7);
  V4 zw = SHUF(z, w, 0, 4, 1, 5) + SHUF(z, w, 2, 6, 3, 7);
  return SHUF(xy, zw, 0, 1, 4, 5) + SHUF(xy, zw, 2, 3, 6, 7);
}

// Into the second level: a core has more misses to it in flight than to the first, which then follows by itself.
INLINE void prefetch(const void *p) { __builtin_prefetch(p, 0, 2); }

// eight numbers side by side, whatever the machine's vectors are
template <class T> struct Eight;
template <> struct Eight<float> {
  typedef float V __attribute__((vector_size(32)));
  typedef float U __attribute__((vector_size(32), aligned(4), may_alias));
  typedef int32_t I __attribute__((vector_size(32)));
};
template <> struct Eight<double> {
  typedef double V __attribute__((vector_size(64)));
  typedef double U __attribute__((vector_size(64), aligned(8), may_alias));
  typedef int64_t I __attribute__((vector_size(64)));
};
#define V8T typename Eight<T>::V
template <class T> INLINE V8T load8(const T *p) { return *(const typename Eight<T>::U *)p; }
INLINE Eight<float>::V load8(const BF16 *p) {
  typedef Halves16<8> H;
  return (Eight<float>::V)(__builtin_convertvector(*(const H::U *)p, H::W) << 16);
}
template <class T> INLINE void store8(T *p, V8T x) { *(typename Eight<T>::U *)p = x; }
// the transpose of eight rows of eight
template <class T> INLINE void turn8(V8T (&r)[8]) {
  V8T t[8], u[8];
  for (int z = 0; z < 8; z += 2) {
    t[z] = SHUF(r[z], r[z + 1], 0, 8, 2, 10, 4, 12, 6, 14);
    t[z + 1] = SHUF(r[z], r[z + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
  for (int z = 0; z < 8; z += 4)
    for (int y = 0; y < 2; y++) {
      u[z + y] = SHUF(t[z + y], t[z + y + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      u[z + y + 2] = SHUF(t[z + y], t[z + y + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int z = 0; z < 4; z++) {
    r[z] = SHUF(u[z], u[z + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    r[z + 4] = SHUF(u[z], u[z + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}
// the sums of eight vectors, side by side
template <class T> INLINE V8T sums8(const V8T (&r)[8]) {
  V8T t[4], u[2];
  for (int z = 0; z < 4; z++)
    t[z] = SHUF(r[2 * z], r[2 * z + 1], 0, 8, 2, 10, 4, 12, 6, 14) + SHUF(r[2 * z], r[2 * z + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  for (int z = 0; z < 2; z++)
    u[z] = SHUF(t[2 * z], t[2 * z + 1], 0, 1, 8, 9, 4, 5, 12, 13) + SHUF(t[2 * z], t[2 * z + 1], 2, 3, 10, 11, 6, 7, 14, 15);
  return SHUF(u[0], u[1], 0, 1, 2, 3, 8, 9, 10, 11) + SHUF(u[0], u[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

}  // namespace GA_NS
