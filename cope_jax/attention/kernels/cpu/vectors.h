// Vectors of the width of the CPU: sums over lanes, and lookups within a register.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace {

// The numbers of a kernel. Integers are as wide, so both have the same lanes; their values fit into 32 bits.
#if defined(DOUBLE)
typedef double real;
typedef int64_t integer;
#else
typedef float real;
typedef int32_t integer;
#endif

#if defined(__AVX512F__)
constexpr int BYTES = 64, ROWS = 6, PANEL = 4;  // of a vector; rows and vectors of a product's block in registers
#elif defined(__AVX2__)
constexpr int BYTES = 32, ROWS = 6, PANEL = 2;
#else  // NEON, and x86 without AVX2
constexpr int BYTES = 16, ROWS = 6, PANEL = 2;
#endif
constexpr int W = BYTES / sizeof(real);  // lanes

#define INLINE inline __attribute__((always_inline))

typedef real V __attribute__((vector_size(BYTES)));
typedef integer I __attribute__((vector_size(BYTES)));
typedef V LooseV __attribute__((aligned(4), may_alias));
typedef I LooseI __attribute__((aligned(4), may_alias));

INLINE V load(const real* p) { return *reinterpret_cast<const LooseV*>(p); }
INLINE I load(const integer* p) { return *reinterpret_cast<const LooseI*>(p); }
INLINE void store(real* p, V x) { *reinterpret_cast<LooseV*>(p) = x; }
INLINE void store(integer* p, I x) { *reinterpret_cast<LooseI*>(p) = x; }
template <class T>
INLINE auto all(T x) {
  if constexpr (std::is_floating_point_v<T>) return (real)x - V{};  // x - 0 costs nothing; 0 + x is not x for -0
  else return I{} + (integer)x;
}
INLINE I truncate(V x) { return __builtin_convertvector(x, I); }
INLINE V to_float(I x) { return __builtin_convertvector(x, V); }

// As numbers of 32 bits do, whose sums and products are modulo 2^32.
#if defined(DOUBLE)
INLINE I wrapped(I x) { return (x << 32) >> 32; }
INLINE integer wrapped(integer x) { return (int32_t)x; }
#else
template <class T>
INLINE T wrapped(T x) { return x; }
#endif

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
INLINE real sum(V x) {
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

}  // namespace
