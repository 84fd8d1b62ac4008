// Vectors of the width of the CPU: sums over lanes, lookups within a register, and exponentials.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace {

#if defined(__AVX512F__)
constexpr int W = 16, ROWS = 6, PANEL = 4;  // lanes; rows and vectors of a block of a matrix product in registers
#elif defined(__AVX2__)
constexpr int W = 8, ROWS = 6, PANEL = 2;
#else  // NEON, and x86 without AVX2
constexpr int W = 4, ROWS = 6, PANEL = 2;
#endif

#define INLINE inline __attribute__((always_inline))

typedef float V __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));
typedef V LooseV __attribute__((aligned(4), may_alias));
typedef I LooseI __attribute__((aligned(4), may_alias));

INLINE V load(const float* p) { return *reinterpret_cast<const LooseV*>(p); }
INLINE I load(const int32_t* p) { return *reinterpret_cast<const LooseI*>(p); }
INLINE void store(float* p, V x) { *reinterpret_cast<LooseV*>(p) = x; }
INLINE void store(int32_t* p, I x) { *reinterpret_cast<LooseI*>(p) = x; }
INLINE V all(float x) { return x - V{}; }  // x - 0 is x, so nothing is computed; 0 + x is not x for -0
INLINE I all(int x) { return I{} + x; }
INLINE I truncate(V x) { return __builtin_convertvector(x, I); }
INLINE V to_float(I x) { return __builtin_convertvector(x, V); }
INLINE V clipped(V x, float low, float high) {  // NaN stays NaN
  x = x < low ? all(low) : x;
  return x > high ? all(high) : x;
}

INLINE I iota() {
  I x;
  for (int i = 0; i < W; i++) x[i] = i;
  return x;
}

// Lanes of x by the indices of `order`; index W and above mean 0.
INLINE V shuffled(V x, I order) {
#if defined(__clang__)
  V y;
  for (int i = 0; i < W; i++) y[i] = order[i] < W ? x[order[i]] : 0;
  return y;
#else
  return __builtin_shuffle(x, V{}, order);
#endif
}
template <int N, size_t... i>
INLINE V swapped(V x, std::index_sequence<i...>) {
  return shuffled(x, I{int(i ^ N)...});
}
template <int N, size_t... i>
INLINE V from_above(V x, std::index_sequence<i...>) {
  return shuffled(x, I{int(i + N < W ? i + N : W)...});
}
template <int N, size_t... i>
INLINE V from_below(V x, std::index_sequence<i...>) {
  return shuffled(x, I{int(i >= N ? i - N : W)...});
}
using Lanes = std::make_index_sequence<W>;

// Σ of this lane and all lanes above it.
template <int N = 1>
INLINE V suffix_sum(V x) {
  if constexpr (N < W) return suffix_sum<2 * N>(x + from_above<N>(x, Lanes()));
  else return x;
}
// Σ of this lane and all lanes below it.
template <int N = 1>
INLINE V prefix_sum(V x) {
  if constexpr (N < W) return prefix_sum<2 * N>(x + from_below<N>(x, Lanes()));
  else return x;
}
template <int N = W / 2>
INLINE float sum(V x) {
  if constexpr (N > 0) return sum<N / 2>(x + swapped<N>(x, Lanes()));
  else return x[0];
}

// x[index], lane by lane; each index is in [0, W).
INLINE V permute(V x, I index) {
#if defined(__clang__)
  V y;
  for (int i = 0; i < W; i++) y[i] = x[index[i]];
  return y;
#else
  return __builtin_shuffle(x, index);
#endif
}

// e^x with a relative error of 2e-7: 0 below -87, where it would be denormal, and infinite above 88.73.
INLINE V exponential(V x) {
  x = clipped(x, -87.3f, 89);
  const V magic = all(12582912.f);  // 1.5·2^23: adding it rounds to a whole number
  V n = (x * 1.44269504088896341f + magic) - magic;
  V r = x - n * 0.693359375f + n * 2.12194440e-4f;
  V p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.f);
  return (p + p) * (V)((truncate(n) + 126) << 23);  // 2^n alone is too large for n = 128
}

}  // namespace
