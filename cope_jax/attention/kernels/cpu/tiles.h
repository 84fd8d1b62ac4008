// What generated steps call, for vectors and for single numbers: a width that no vector divides takes single numbers.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

#include "matrices.h"

namespace {

typedef uint32_t U __attribute__((vector_size(4 * W)));

template <int width>
constexpr bool whole = width % W == 0;
template <int width>
constexpr int step = whole<width> ? W : 1;

#define UNROLL _Pragma("GCC unroll 4")
#define EACH template <int width> INLINE

EACH auto at(const real* p) {
  if constexpr (whole<width>) return load(p);
  else return *p;
}
EACH auto at(const integer* p) {
  if constexpr (whole<width>) return load(p);
  else return *p;
}
template <int width, class T>
INLINE auto all(T x) {
  if constexpr (whole<width>) return all(x);
  else return x;
}
EACH auto indices(int c) {
  if constexpr (whole<width>) return iota() + c;
  else return (integer)c;
}
INLINE void store(real* p, real x) { *p = x; }
INLINE void store(integer* p, integer x) { *p = x; }
// Whether the columns from c on hold this one, and its entry.
EACH bool holds(int c, int column) { return c == column / step<width> * step<width>; }
template <int width, class T>
INLINE auto lane(T x, int column) {
  if constexpr (whole<width>) return x[column % W];
  else return x;
}

// A comparison is -1 where it is true, else 0.
#define COMPARISON(NAME, OPERATOR)                                        \
  INLINE I NAME(V a, V b) { return a OPERATOR b; }                        \
  INLINE I NAME(I a, I b) { return a OPERATOR b; }                        \
  INLINE integer NAME(real a, real b) { return -(a OPERATOR b); }         \
  INLINE integer NAME(integer a, integer b) { return -(a OPERATOR b); }
COMPARISON(gt_of, >)
COMPARISON(ge_of, >=)
COMPARISON(lt_of, <)
COMPARISON(le_of, <=)
COMPARISON(eq_of, ==)
COMPARISON(ne_of, !=)
#undef COMPARISON
// Of unsigned numbers, which lie in memory as signed ones of 32 bits.
INLINE I unsigned_ge(I a, I b) { return (a ^ INT32_MIN) >= (b ^ INT32_MIN); }
INLINE integer unsigned_ge(integer a, integer b) { return -((uint32_t)a >= (uint32_t)b); }

INLINE V choose(I condition, V yes, V no) { return condition ? yes : no; }
INLINE I choose(I condition, I yes, I no) { return condition ? yes : no; }
INLINE real choose(integer condition, real yes, real no) { return condition ? yes : no; }
INLINE integer choose(integer condition, integer yes, integer no) { return condition ? yes : no; }

// As XLA converts: numbers beyond int32 take the nearest, and NaN takes 0.
INLINE I float_to_int(V x) {
  const I above = x >= 2147483648.f, inside = (x >= -2147483648.f) & ~above;
  const I beyond = x < -2147483648.f ? all(INT32_MIN) : (above ? all(INT32_MAX) : I{});
  return inside ? truncate(inside ? x : V{}) : beyond;
}
INLINE integer float_to_int(real x) { return float_to_int(all(x))[0]; }
INLINE V int_to_float(I x) { return to_float(x); }
INLINE real int_to_float(integer x) { return (real)x; }
INLINE V bool_to_float(I x) { return x ? all(1.f) : V{}; }
INLINE real bool_to_float(integer x) { return x ? 1.f : 0.f; }
template <class T>
INLINE T bool_to_int(T x) { return -x; }
template <class T>
INLINE T int_to_bool(T x) { return ne_of(x, x ^ x); }

// The larger or smaller number; NaN if one is NaN.
template <class T>
INLINE T max_of(T a, T b) { return choose(gt_of(a, b) | ne_of(a, a), a, b); }
template <class T>
INLINE T min_of(T a, T b) { return choose(lt_of(a, b) | ne_of(a, a), a, b); }

// The same with a limit that is no NaN.
template <class T>
INLINE T at_least(T a, T limit) { return a < limit ? limit : a; }
template <class T>
INLINE T at_most(T a, T limit) { return a > limit ? limit : a; }
#if defined(__AVX2__)  // one instruction; if a number is NaN, its result is the operand that stands first here
#if defined(DOUBLE)
#define LIMITED(NAME) NAME "pd %1, %2, %0"
#else
#define LIMITED(NAME) NAME "ps %1, %2, %0"
#endif
INLINE V at_least(V a, V limit) {
  __asm__(LIMITED("vmax") : "=v"(a) : "v"(a), "v"(limit));
  return a;
}
INLINE V at_most(V a, V limit) {
  __asm__(LIMITED("vmin") : "=v"(a) : "v"(a), "v"(limit));
  return a;
}
#undef LIMITED
#endif

INLINE real sum_of_lanes(V x) { return sum(x); }
INLINE real sum_of_lanes(real x) { return x; }
template <int N = W / 2>
INLINE real max_of_lanes(V x) {
  if constexpr (N > 0) return max_of_lanes<N / 2>(max_of(x, swapped<N>(x, Lanes())));
  else return x[0];
}
INLINE real max_of_lanes(real x) { return x; }
INLINE real min_of_lanes(V x) { return -max_of_lanes(-x); }
INLINE real min_of_lanes(real x) { return x; }
INLINE V suffix_sums(V x, real& farther) {
  const V y = suffix_sum(x) + farther;
  farther = y[0];
  return y;
}
INLINE V prefix_sums(V x, real& before) {
  const V y = prefix_sum(x) + before;
  before = y[W - 1];
  return y;
}
INLINE real suffix_sums(real x, real& farther) { return farther += x; }
INLINE real prefix_sums(real x, real& before) { return before += x; }

// A function of vectors, for single numbers too.
#define SCALAR(NAME) INLINE real NAME(real x) { return NAME(all(x))[0]; }
// A function of the standard library, lane by lane.
#define LANES(NAME, FUNCTION)                          \
  INLINE real NAME(real x) { return FUNCTION(x); }     \
  INLINE V NAME(V x) {                                 \
    V y;                                               \
    for (int i = 0; i < W; i++) y[i] = FUNCTION(x[i]); \
    return y;                                          \
  }
LANES(sin_of, std::sin)
LANES(cos_of, std::cos)
LANES(erf_of, std::erf)
LANES(sqrt_of, std::sqrt)
INLINE V rsqrt_of(V x) { return 1.f / sqrt_of(x); }
SCALAR(rsqrt_of)
INLINE V abs_of(V x) { return (V)((I)x & std::numeric_limits<integer>::max()); }
INLINE I abs_of(I x) { return x < 0 ? -x : x; }
INLINE integer abs_of(integer x) { return x < 0 ? -x : x; }
SCALAR(abs_of)
INLINE V sign_of(V x) { return x > 0.f ? all(1.f) : (x < 0.f ? all(-1.f) : x); }
SCALAR(sign_of)
INLINE I is_finite_of(V x) { return abs_of(x) < INFINITY; }
INLINE integer is_finite_of(real x) { return -(integer)std::isfinite(x); }
INLINE V floor_of(V x) {
  const I fraction = abs_of(x) < 1 / std::numeric_limits<real>::epsilon();  // from here on all numbers are whole
  const V whole = to_float(truncate(fraction ? x : V{}));
  return fraction ? whole - (x < whole ? all(1.f) : V{}) : x;
}
SCALAR(floor_of)
#if defined(__AVX512F__) && !defined(DOUBLE)
INLINE V quotient_of(V a, V b) {  // by a normal b; a division takes as long as an exponential
  V y;
  __asm__("vrcp14ps %1, %0" : "=v"(y) : "v"(b));  // 14 bits
  return a * (y + y * (1.f - b * y));
}
#else
INLINE V quotient_of(V a, V b) { return a / b; }
#endif
#if defined(DOUBLE)  // for precision, not for speed
LANES(exp_of, std::exp)
LANES(log_of, std::log)
LANES(log1p_of, std::log1p)
LANES(tanh_of, std::tanh)
LANES(float32_of, (float))
#else
INLINE V bfloat16_of(V x) {  // the nearest bfloat16, of two the even one
  const U bits = (U)x;
  return x == x ? (V)((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u) : x;
}
SCALAR(bfloat16_of)
// e^x with a relative error of 2e-7, infinite above 88.73. Below -87.3, where it is denormal, it is 0; with AVX-512 it may
// be denormal down to -104.
INLINE V exp_of(V x) {
#if defined(__AVX512F__)
  constexpr float lowest = -110;
#else
  constexpr float lowest = -87.3f;
#endif
  x = at_most(at_least(x, all(lowest)), all(89.f));  // NaN stays NaN
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
#if defined(__AVX512F__)
  __asm__("vscalefps %2, %1, %0" : "=v"(p) : "v"(p), "v"(n));  // p·2^n
  return p;
#else
  return (p + p) * (V)((truncate(n) + 126) << 23);  // 2^n alone is too large for n = 128
#endif
}
INLINE real exp_of(real x) { return x == 0 ? 1 : exp_of(all(x))[0]; }  // often of 0: of a maximum that stays
// log x with a relative error of about 1e-7. Denormal numbers count as 0, as in XLA.
INLINE V log_of(V x) {
  const I bits = (I)x;
  I exponent = ((bits >> 23) & 255) - 126;
  V m = (V)((bits & 0x007fffff) | 0x3f000000);  // in [0.5, 1)
  const I small = m < 0.70710678f;
  exponent += small;
  m = (small ? m + m : m) - 1.f;
  const V z = m * m, e = to_float(exponent);
  V p = all(7.0376836292e-2f);
  for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                  2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    p = p * m + c;
  const V y = m * z * p + e * -2.12194440e-4f - z * 0.5f, value = m + y + e * 0.693359375f;
  const V edge = abs_of(x) < FLT_MIN ? all(-INFINITY) : (x == INFINITY ? x : all(NAN));
  return (x >= FLT_MIN) & (x < INFINITY) ? value : edge;
}
SCALAR(log_of)
INLINE V log1p_of(V x) {  // log u, plus what rounding took from u = 1 + x
  const V u = x + 1.f, lost = x - (u - 1.f);
  return u == 1.f ? x : (u == INFINITY ? u : log_of(u) + lost / u);
}
SCALAR(log1p_of)
INLINE V tanh_of(V x) {
  const V size = abs_of(x), e = exp_of(size * -2.f), z = x * x;
  const V large = (V)((I)quotient_of(1.f - e, 1.f + e) | ((I)x & INT32_MIN));
  V p = all(-5.70498872745e-3f);
  for (float c : {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f}) p = p * z + c;
  return size > 0.625f ? large : x + x * z * p;
}
SCALAR(tanh_of)
#endif
#if defined(__AVX512F__) && !defined(DOUBLE)
INLINE V logistic_of(V x) {
  const V y = quotient_of(all(1.f), 1.f + exp_of(at_most(-x, all(88.f))));  // finite, for what follows
  return x < -88.f ? V{} : y;
}
#else
INLINE V logistic_of(V x) { return 1.f / (1.f + exp_of(-x)); }
#endif
SCALAR(logistic_of)

// One of the two words of Threefry-2x32 with 20 rounds.
template <int word, class T>
INLINE T threefry(T k0, T k1, T x0, T x1) {
  const T keys[3] = {k0, k1, (T)(k0 ^ k1 ^ 0x1BD11BDA)};
  constexpr int turns[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  auto plus = [](auto a, auto b) {  // without overflow of signed numbers
    typedef std::conditional_t<std::is_same_v<decltype(a), int32_t>, uint32_t, U> Unsigned;
    return (decltype(a))((Unsigned)a + (Unsigned)b);
  };
  auto turned = [](auto a, int n) {
    typedef std::conditional_t<std::is_same_v<decltype(a), int32_t>, uint32_t, U> Unsigned;
    return (decltype(a))(((Unsigned)a << n) | ((Unsigned)a >> (32 - n)));
  };
  x0 = plus(x0, keys[0]), x1 = plus(x1, keys[1]);
  for (int round = 0; round < 5; round++) {
    for (int n : turns[round % 2]) x0 = plus(x0, x1), x1 = turned(x1, n) ^ x0;
    x0 = plus(x0, keys[(round + 1) % 3]);
    x1 = plus(plus(x1, keys[(round + 2) % 3]), (T)(k0 - k0 + round + 1));
  }
  return word ? x1 : x0;
}
#if defined(DOUBLE)  // the same of integers of 64 bits, whose values have 32
template <int word>
INLINE integer threefry(integer k0, integer k1, integer x0, integer x1) {
  return threefry<word, int32_t>(k0, k1, x0, x1);
}
template <int word>
INLINE I threefry(I k0, I k1, I x0, I x1) {
  for (int i = 0; i < W; i++) x0[i] = threefry<word>(k0[i], k1[i], x0[i], x1[i]);
  return x0;
}
#endif

// z[index] of one row with n entries; an index beyond them, of a NaN, takes the nearest.
INLINE I inside(I index, int n) {
  index = index < 0 ? I{} : index;
  return index >= n ? all(n - 1) : index;
}
INLINE integer inside(integer index, int n) { return std::max<integer>(0, std::min<integer>(index, n - 1)); }
// The builtins spare every kernel <immintrin.h>, which takes a second to compile.
// Whether no lane of a condition is true.
INLINE bool none(I condition) {
#if defined(__AVX512F__) && !defined(DOUBLE)
  return !__builtin_ia32_ptestmd512(condition, condition, -1);
#elif defined(__AVX2__) && !defined(DOUBLE)
  return !__builtin_ia32_movmskps256((V)condition);
#else
  integer any = 0;
  for (int i = 0; i < W; i++) any |= condition[i];
  return !any;
#endif
}
// Whether each place is in [0, W).
INLINE bool in_a_vector(I places) {
#if defined(__AVX512F__) && !defined(DOUBLE)
  return __builtin_ia32_ucmpd512_mask(places, all(W), 1, -1) == 0xffff;
#else
  return none((places < 0) | (places >= W));
#endif
}
EACH V take(const real* z, int n, I index) {
  index = inside(index, n);
  // Indices of neighbours are near each other.
  const int base = std::min<integer>(std::min(index[0], index[W - 1]), n - W);
  if (base >= 0 && in_a_vector(index - base)) return permute(load(z + base), index - base);
#if defined(__AVX512F__) && !defined(DOUBLE)
  return __builtin_ia32_gathersiv16sf(V{}, z, index, -1, 4);
#else
  V y;
  for (int i = 0; i < W; i++) y[i] = z[index[i]];
  return y;
#endif
}
EACH real take(const real* z, int n, integer index) { return z[inside(index, n)]; }
EACH I take(const integer* z, int n, I index) { return (I)take<width>((const real*)z, n, index); }
EACH integer take(const integer* z, int n, integer index) { return z[inside(index, n)]; }

// How many of the n entries of a row, which ascend, are below x.
EACH integer count_below(const real* z, int n, real x) {
  integer count = 0;
  for (int i = 0; i < n; i++) count += z[i] < x;
  return count;
}
EACH I count_below(const real* z, int n, V x) {
  const integer first = count_below<1>(z, n, x[0]);  // neighbours mostly have the same count
  const I more = first < n ? x > z[first] : I{}, fewer = first > 0 ? x <= z[first - 1] : I{};
  if (none(more | fewer)) return all(first);  // a NaN may have any count
  I count{};
  for (int i = 0; i < n; i++) count -= z[i] < x;
  return count;
}

// z[index] += x
INLINE void add_entries(real* z, int n, integer index, real x) { z[inside(index, n)] += x; }
INLINE void add_entries(real* z, int n, I index, V x) {
  if (none(index != index[0])) return add_entries(z, n, index[0], sum(x));
  for (int i = 0; i < W; i++) add_entries(z, n, index[i], x[i]);
}
// Where p is among the n entries of a row: between `cell` and the next one, at `weight`. The entries from `base` on
// are those of all lanes, if they are `near`. A p beyond them, or NaN, is in the nearest cell.
struct Cells {
  V weight;
  I cell;
  int base;
  bool near;
};
INLINE Cells cells(V p, int n) {
  const I cell = truncate(at_most(p > 0.f ? p : V{}, all((real)std::max(0, n - 2))));
  // Positions of neighbours are near each other: the first and the last one are equally far from the ends of the vector.
  const int middle = std::max<integer>(0, (cell[0] + cell[W - 1] - (W - 1)) >> 1), base = std::min(middle, n - W - 1);
  return {p - to_float(cell), cell, base, n > W && in_a_vector(cell - base)};
}

// Calls nothing: all columns of a table are known.
struct Known {
  INLINE void operator()(int) const {}
};
// z[⌊p⌋]·(1-w) + z[⌊p⌋+1]·w with w = p - ⌊p⌋, and the derivative by p, which is 0 at whole p. Before columns of z that
// end at `end` are read, `need(end)` is called.
template <class T>
struct Found {
  T value, slope;
};
template <int width, class Need = Known>
INLINE Found<V> look_up(const real* z, int n, V p, Need need = {}) {
  const Cells at = cells(p, n);
  V low, high;
  if (at.near) {
    need(at.base + W + 1);
    low = permute(load(z + at.base), at.cell - at.base);
    high = permute(load(z + at.base + 1), at.cell - at.base);
  } else {
    need(n);
    for (int i = 0; i < W; i++) low[i] = z[at.cell[i]], high[i] = z[std::min<integer>(at.cell[i] + 1, n - 1)];
  }
  const V slope = high - low;
  return {low + at.weight * slope, (at.weight == 0.f) | (at.weight == 1.f) ? V{} : slope};
}
template <int width, class Need = Known>
INLINE Found<real> look_up(const real* z, int n, real p, Need need = {}) {
  need(n);
  const int cell = (int)at_most(p > 0 ? p : 0.f, (real)std::max(0, n - 2));
  const real low = z[cell], slope = z[std::min(cell + 1, n - 1)] - low, weight = p - cell;
  return {low + weight * slope, weight == 0 || weight == 1 ? 0 : slope};
}
// z[⌊p⌋] += x·(1-w), z[⌊p⌋+1] += x·w
template <class Need = Known>
INLINE void add_hats(real* z, int n, real p, real x, Need need = {}) {
  need(n);
  const int cell = (int)at_most(p > 0 ? p : 0.f, (real)std::max(0, n - 2));
  const real above = x * (p - cell);
  z[cell] += x - above;
  z[std::min(cell + 1, n - 1)] += above;
}
template <class Need = Known>
INLINE void add_hats(real* z, int n, V p, V x, Need need = {}) {
  const Cells at = cells(p, n);
  const V above = x * at.weight;
  alignas(BYTES) real low[W], high[W];  // in memory, from where one number fills a vector in one instruction
  alignas(BYTES) integer places[W];
  store(high, above), store(low, x - above);
  if (!at.near) {
    need(n);
    store(places, at.cell);
    for (int i = 0; i < W; i++) z[places[i]] += low[i], z[std::min<integer>(places[i] + 1, n - 1)] += high[i];
    return;
  }
  need(at.base + W + 1);
  store(places, at.cell - at.base);
  __asm__("" : "+m"(low), "+m"(high), "+m"(places));  // else compilers take each number out of its register again
  const I lanes = iota();
  V first[2] = {}, second[2] = {};  // two sums each wait less for their additions
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) {
    const I hit = lanes == places[i];
    first[i % 2] = hit ? first[i % 2] + all(low[i]) : first[i % 2];
    second[i % 2] = hit ? second[i % 2] + all(high[i]) : second[i % 2];
  }
  const V above_first = second[0] + second[1];
  z += at.base;
  store(z, load(z) + (first[0] + first[1] + from_below<1>(above_first, Lanes())));
  if (above_first[W - 1] != 0) z[W] += above_first[W - 1];
}

// y[column][row] = x[row][column], with rows of x `distance` apart, and those of y `to_distance`
inline void transpose(const real* x, long distance, int rows, int columns, real* y, long to_distance) {
  for (int first = 0; first < rows; first += SIDE) {
    int c = 0;
#if defined(__AVX512F__) && !defined(DOUBLE)
    for (; first + SIDE <= rows && c + SIDE <= columns; c += SIDE) {
      Words tile[SIDE];
      for (int i = 0; i < SIDE; i++) tile[i] = words<true>(x + (first + i) * distance + c, SIDE);
      transpose_tile(tile);
      for (int i = 0; i < SIDE; i++) *reinterpret_cast<LooseWords*>(y + (c + i) * to_distance + first) = tile[i];
    }
#endif
    for (; c < columns; c++)
      for (int r = first; r < std::min(rows, first + SIDE); r++) y[c * to_distance + r] = x[r * distance + c];
  }
}

// C = A·B, plus C if `ADD`. Columns that are left after whole vectors become one vector, filled up with zeros.
template <int columns, bool ADD>
void product(int rows, int summed, Matrix a, const real* b, long b_row, real* c) {
  constexpr int vectors = columns / W * W, left = columns - vectors, MOST = 64;
  if (vectors) product<ADD>(rows, vectors, summed, a, b, b_row, c, columns);
  for (int m = 0; m < rows && left; m += MOST) {
    alignas(64) real sums[MOST * W] = {}, filled[MOST * W] = {};
    const int height = std::min(MOST, rows - m);
    for (int k = 0; k < summed; k += MOST) {
      const int depth = std::min(MOST, summed - k);
      for (int i = 0; i < depth; i++) std::copy_n(b + (k + i) * b_row + vectors, left, filled + i * W);
      product<true>(height, W, depth, {a.p + m * a.row + k * a.column, a.row, a.column}, filled, W, sums, W);
    }
    for (int i = 0; i < height; i++)
      for (int j = 0; j < left; j++) {
        real& to = c[(long)(m + i) * columns + vectors + j];
        to = (ADD ? to : 0) + sums[i * W + j];
      }
  }
}

}  // namespace
