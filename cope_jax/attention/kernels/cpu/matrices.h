// Products of small matrices, of real numbers by vectors, or of bfloat16 by tiles.
#pragma once

#include <algorithm>
#include <cstring>

#include "vectors.h"

namespace {

struct Matrix {  // element (m, k) is at p[m·row + k·column]
  const real* p;
  long row, column;
};

// C[M, n·W] = A[M, K] B[K, n·W], plus C if `ADD`. All M·n vectors of the result are in registers.
template <int M, int n, bool ADD>
INLINE void block(int K, Matrix a, const real* b, long b_row, real* c, long c_row) {
  V total[M][n];
  for (int m = 0; m < M; m++)
    for (int j = 0; j < n; j++) total[m][j] = ADD ? load(c + m * c_row + W * j) : V{};
  for (int k = 0; k < K; k++) {
    V row[n];
    for (int j = 0; j < n; j++) row[j] = load(b + k * b_row + W * j);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      V factor = all(a.p[m * a.row + k * a.column]);
      for (int j = 0; j < n; j++) total[m][j] += factor * row[j];
    }
  }
  for (int m = 0; m < M; m++)
    for (int j = 0; j < n; j++) store(c + m * c_row + W * j, total[m][j]);
}

template <int n, bool ADD>
void columns(int M, int K, Matrix a, const real* b, long b_row, real* c, long c_row) {
  int m = 0;
  auto at = [&](int m) { return Matrix{a.p + m * a.row, a.row, a.column}; };
  for (; m + ROWS <= M; m += ROWS) block<ROWS, n, ADD>(K, at(m), b, b_row, c + m * c_row, c_row);
  for (; m + 4 <= M; m += 4) block<4, n, ADD>(K, at(m), b, b_row, c + m * c_row, c_row);
  for (; m + 2 <= M; m += 2) block<2, n, ADD>(K, at(m), b, b_row, c + m * c_row, c_row);
  for (; m < M; m++) block<1, n, ADD>(K, at(m), b, b_row, c + m * c_row, c_row);
}

// C[M, N] = A[M, K] B[K, N], plus C if `ADD`; N is a multiple of W.
template <bool ADD>
void product(int M, int N, int K, Matrix a, const real* b, long b_row, real* c, long c_row) {
  int j = 0;
  for (; j + PANEL * W <= N; j += PANEL * W) columns<PANEL, ADD>(M, K, a, b + j, b_row, c + j, c_row);
  for (; j + 2 * W <= N; j += 2 * W) columns<2, ADD>(M, K, a, b + j, b_row, c + j, c_row);
  for (; j + W <= N; j += W) columns<1, ADD>(M, K, a, b + j, b_row, c + j, c_row);
}

// Tiles of AMX: eight registers of 16 x 16 words. A word is a float32, or two bfloat16. Without AMX loops take their
// place, which is slow, but what is packed can be tested everywhere.
typedef int32_t Words __attribute__((vector_size(64)));
typedef Words LooseWords __attribute__((aligned(4), may_alias));
constexpr int SIDE = 16;

#if defined(__AMX_BF16__)
INLINE void configure_tiles() {
  struct {
    uint8_t palette = 1, rest[15] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } layout;
  __asm__ volatile("ldtilecfg %0" ::"m"(layout));
}
INLINE void release_tiles() { __asm__ volatile("tilerelease"); }
template <int t>
INLINE void zero_tile() { __asm__ volatile("tilezero %%tmm%c0" ::"i"(t)); }
template <int t>
INLINE void load_tile(const void* p, long bytes) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(bytes), "i"(t) : "memory");
}
template <int t>
INLINE void store_tile(void* p, long bytes) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(bytes), "i"(t) : "memory");
}
template <int t, int a, int b>
INLINE void multiply_tiles() { __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(t), "i"(a), "i"(b)); }
#else
inline thread_local Words tiles[8][SIDE];
INLINE void configure_tiles() {}
INLINE void release_tiles() {}
template <int t>
inline void zero_tile() { std::memset(tiles[t], 0, sizeof tiles[t]); }
template <int t>
inline void load_tile(const void* p, long bytes) {
  for (int i = 0; i < SIDE; i++) std::memcpy(&tiles[t][i], (const char*)p + i * bytes, 64);
}
template <int t>
inline void store_tile(void* p, long bytes) {
  for (int i = 0; i < SIDE; i++) std::memcpy((char*)p + i * bytes, &tiles[t][i], 64);
}
template <int t, int a, int b>
inline void multiply_tiles() {
  auto number = [](uint32_t bits) { return ((union { uint32_t i; float f; }){bits}).f; };
  for (int m = 0; m < SIDE; m++)
    for (int n = 0; n < SIDE; n++) {
      float sum = number(tiles[t][m][n]);
      for (int k = 0; k < SIDE; k++) {
        const uint32_t x = tiles[a][m][k], y = tiles[b][k][n];
        sum += number(x << 16) * number(y << 16) + number(x & 0xffff0000) * number(y & 0xffff0000);
      }
      tiles[t][m][n] = ((union { float f; int32_t i; }){sum}).i;
    }
}
#endif

// Without AVX-512, and so without AMX, compilers take what follows apart number by number: seconds for each call that is
// written out.
#if defined(__AVX512F__)
#define PACKING INLINE
#else
#define PACKING __attribute__((noinline))
#endif
typedef uint16_t Halves __attribute__((vector_size(64)));
template <size_t... l>
PACKING Halves halves_of(Words x, Words y, std::index_sequence<l...>) {
#if defined(__clang__)
  return __builtin_shufflevector((Halves)x, (Halves)y, int(l)...);
#else
  return __builtin_shuffle((Halves)x, (Halves)y, Halves{uint16_t(l)...});
#endif
}
// The upper halves of x and y, as bfloat16: those of x before those of y, or alternating.
template <bool alternating, size_t... l>
PACKING Words upper_halves(Words x, Words y, std::index_sequence<l...>) {
  return (Words)halves_of(x, y, std::index_sequence<(alternating ? l / 2 * 2 + 1 + l % 2 * 32 : 2 * l + 1)...>());
}
// The same of the nearest bfloat16, of two the even one. Denormal numbers may become 0, as they do in tiles.
template <bool alternating, size_t... l>
PACKING Words nearest_halves(Words x, Words y, std::index_sequence<l...> lanes) {
#if defined(__AVX512BF16__)
  Words both;
  __asm__("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both) : "v"(x), "v"(y));
  return alternating ? (Words)halves_of(both, both, std::index_sequence<(l / 2 + l % 2 * SIDE)...>()) : both;
#else
  typedef uint32_t Bits __attribute__((vector_size(64)));
  auto near = [](Words x) {
    const Words rounded = (Words)((Bits)x + 0x7fff + (((Bits)x >> 16) & 1));
    return (x & INT32_MAX) > 0x7f800000 ? x | 0x400000 : rounded;  // NaN stays NaN
  };
  return upper_halves<alternating>(near(x), near(y), lanes);
#endif
}
// Numbers p[0], p[1], …, and zeros from number `count` on.
template <bool whole>
INLINE Words words(const float* p, int count) {
  if (whole || count >= SIDE) return *reinterpret_cast<const LooseWords*>(p);
  Words x{};
  if (count > 0) std::memcpy(&x, p, 4 * count);
  return x;
}
// Puts 32 numbers as bfloat16 into `to`, rounded to the nearest: 16 at p and then 16 at q, or alternating; beyond the counts
// they are 0. With two parts, what rounding takes follows at to[part]; a number that would become infinite is cut off then.
template <int parts, bool alternating, bool whole>
PACKING void put_halves(const float* p, int p_count, const float* q, int q_count, Words* to, long part) {
  typedef float Floats __attribute__((vector_size(64)));
  typedef uint32_t Bits __attribute__((vector_size(64)));
  constexpr auto lanes = std::make_index_sequence<2 * SIDE>();
  const Words x = words<whole>(p, p_count), y = words<whole>(q, q_count);
  if (parts == 1) return void(*to = nearest_halves<alternating>(x, y, lanes));
  constexpr uint32_t half = 1 << 15;  // of the last bit that stays
  auto near = [](Words x) { return (x & INT32_MAX) < 0x7f7f8000 ? (Words)((Bits)x + half) : x; };
  auto rest = [](Words x, Words near) {
    const Floats from = (Floats)x, taken = (Floats)(near & -65536);
    return (Words)((Bits)(from == taken ? Floats{} : from - taken) + half);
  };
  const Words near_x = near(x), near_y = near(y);
  to[0] = upper_halves<alternating>(near_x, near_y, lanes);
  to[part] = upper_halves<alternating>(rest(x, near_x), rest(y, near_y), lanes);
}
// The same of numbers that are bfloat16 in memory.
template <bool alternating, size_t... l>
PACKING Words joined(Words x, Words y, std::index_sequence<l...>) {
  return (Words)halves_of(x, y, std::index_sequence<(alternating ? l / 2 + l % 2 * 32 : l % 16 + l / 16 * 32)...>());
}
template <int parts, bool alternating, bool whole>
PACKING void put_halves(const uint16_t* p, int p_count, const uint16_t* q, int q_count, Words* to, long) {
  auto lower = [](const uint16_t* p, int count) {
    Words x{};
    if (whole || count > 0) std::memcpy(&x, p, 2 * (whole ? SIDE : std::min(count, SIDE)));
    return x;
  };
  *to = joined<alternating>(lower(p, p_count), lower(q, q_count), std::make_index_sequence<2 * SIDE>());
}

// Numbers as bfloat16, and back.
inline void narrow(const float* p, int count, uint16_t* to) {
  for (int c = 0; c < count; c += SIDE) {
    const Words x = words<false>(p + c, count - c);
    const Words y = nearest_halves<false>(x, x, std::make_index_sequence<2 * SIDE>());
    std::memcpy(to + c, &y, 2 * std::min(SIDE, count - c));
  }
}
inline void widen(const uint16_t* p, int count, float* to) {
  for (int c = 0; c < count; c++) {
    const uint32_t bits = (uint32_t)p[c] << 16;
    std::memcpy(to + c, &bits, sizeof bits);
  }
}

template <int s, size_t... l>
PACKING void exchange(Words& x, Words& y, std::index_sequence<l...>) {
  const Words old = x;
#if defined(__clang__)
  x = __builtin_shufflevector(old, y, int(l & s ? l + SIDE - s : l)...);
  y = __builtin_shufflevector(old, y, int(l & s ? l + SIDE : l + s)...);
#else
  x = __builtin_shuffle(old, y, Words{int(l & s ? l + SIDE - s : l)...});
  y = __builtin_shuffle(old, y, Words{int(l & s ? l + SIDE : l + s)...});
#endif
}
template <int s = SIDE / 2>
PACKING void transpose_tile(Words* x) {
  for (int i = 0; i < SIDE; i++)
    if (!(i & s)) exchange<s>(x[i], x[i + s], std::make_index_sequence<SIDE>());
  if constexpr (s > 1) transpose_tile<s / 2>(x);
}

// How a matrix lies in tiles: as a left factor [M, K], or as a right one [K, N]; or its transpose does.
enum Form { LEFT, LEFT_TURNED, RIGHT, RIGHT_TURNED, TWO_PARTS, FORMS = 2 * TWO_PARTS };
constexpr bool sums_rows(Form form) { return form == RIGHT || form == LEFT_TURNED; }
inline int in_blocks(int count, int block) { return (count + block - 1) / block; }
// The number of words of one part: tiles [K/32, M/16] or [K/32, N/16].
inline long packed_size(Form form, int rows, int columns) {
  if (sums_rows(form)) std::swap(rows, columns);
  return in_blocks(columns, 2 * SIDE) * (long)in_blocks(rows, SIDE) * SIDE;
}

template <int parts, Form form, bool whole, class T>
void pack_tiles(const T* p, long row, int rows, int columns, Words* to) {
  constexpr bool down = sums_rows(form);
  const long part = packed_size(form, rows, columns);
  for (int k = 0; k < (down ? rows : columns); k += 2 * SIDE)
    for (int m = 0; m < (down ? columns : rows); m += SIDE, to += SIDE) {
#pragma GCC unroll 16
      for (int i = 0; i < SIDE; i++) {
        const int r = down ? k + 2 * i : m + i, c = down ? m : k;
        const int next = down ? r + 1 : r, after = down ? c : c + SIDE;
        put_halves<parts, down, whole>(p + r * row + c, r < rows ? columns - c : 0, p + next * row + after,
                                       next < rows ? columns - after : 0, to + i, part);
      }
      if (form != LEFT_TURNED && form != RIGHT_TURNED) continue;
      transpose_tile(to);
      if (parts > 1) transpose_tile(to + part);
    }
}
// Packs a matrix whose rows are `row` apart, filled up with zeros. In one part its numbers are rounded to bfloat16; in two
// they keep 16 bits, a relative error of at most 8e-6.
template <int parts, Form form, class T>
void pack(const T* p, long row, int rows, int columns, Words* to) {
  const int summed = sums_rows(form) ? rows : columns, others = sums_rows(form) ? columns : rows;
  const bool whole = summed % (2 * SIDE) == 0 && others % SIDE == 0;
  (whole ? pack_tiles<parts, form, true, T> : pack_tiles<parts, form, false, T>)(p, row, rows, columns, to);
}
// The number of words of what is known later: a form in one part, or `TWO_PARTS +` a form.
inline long form_size(int form, int rows, int columns) {
  return (form < TWO_PARTS ? 1 : 2) * packed_size((Form)(form % TWO_PARTS), rows, columns);
}

// A tile of C, of which `rows` and `columns` exist.
template <int t>
INLINE void begin_tile(bool add, const float* c, long c_row, int rows, int columns) {
  if (!add) return zero_tile<t>();
  if (rows >= SIDE && columns >= SIDE) return load_tile<t>(c, 4 * c_row);
  alignas(64) float filled[SIDE][SIDE] = {};
  for (int i = 0; i < std::min(rows, SIDE); i++) std::copy_n(c + i * c_row, std::min(columns, SIDE), filled[i]);
  load_tile<t>(filled, 64);
}
template <int t>
INLINE void end_tile(float* c, long c_row, int rows, int columns) {
  if (rows >= SIDE && columns >= SIDE) return store_tile<t>(c, 4 * c_row);
  alignas(64) float filled[SIDE][SIDE];
  store_tile<t>(filled, 64);
  for (int i = 0; i < std::min(rows, SIDE); i++) std::copy_n(filled[i], std::min(columns, SIDE), c + i * c_row);
}

// Packed factors: `part` and `chunk` are the numbers of words from a part to the next, and from 32 of K to the next.
struct Packed {
  const Words* p;
  long part, chunk;
};

// Up to 2 x 2 tiles of C: products of the parts of both factors, without the smallest one of four.
template <int lefts, int rights, int tall, int wide>
void multiply(bool add, int M, int N, int chunks, Packed a, Packed b, float* c, long c_row) {
  begin_tile<0>(add, c, c_row, M, N);
  if (wide > 1) begin_tile<1>(add, c + SIDE, c_row, M, N - SIDE);
  if (tall > 1) begin_tile<2>(add, c + SIDE * c_row, c_row, M - SIDE, N);
  if (tall > 1 && wide > 1) begin_tile<3>(add, c + SIDE * c_row + SIDE, c_row, M - SIDE, N - SIDE);
  for (int k = 0; k < chunks; k++) {
    auto left = [&](int part) {
      const Words* p = a.p + part * a.part + k * a.chunk;
      load_tile<4>(p, 64);
      if (tall > 1) load_tile<5>(p + SIDE, 64);
    };
    auto right = [&](int part) {
      const Words* p = b.p + part * b.part + k * b.chunk;
      load_tile<6>(p, 64);
      if (wide > 1) load_tile<7>(p + SIDE, 64);
    };
    auto both = [] {
      multiply_tiles<0, 4, 6>();
      if (wide > 1) multiply_tiles<1, 4, 7>();
      if (tall > 1) multiply_tiles<2, 5, 6>();
      if (tall > 1 && wide > 1) multiply_tiles<3, 5, 7>();
    };
    right(0);
    if (lefts > 1) left(1), both();
    left(0), both();
    if (rights > 1) right(1), both();
  }
  end_tile<0>(c, c_row, M, N);
  if (wide > 1) end_tile<1>(c + SIDE, c_row, M, N - SIDE);
  if (tall > 1) end_tile<2>(c + SIDE * c_row, c_row, M - SIDE, N);
  if (tall > 1 && wide > 1) end_tile<3>(c + SIDE * c_row + SIDE, c_row, M - SIDE, N - SIDE);
}

// C[M, N] = A[M, K] B[K, N], plus C if `add`, of packed factors.
template <int lefts, int rights>
void tile_product(bool add, int M, int N, int K, const Words* a, const Words* b, float* c, long c_row) {
  const int chunks = in_blocks(K, 2 * SIDE), tall = in_blocks(M, SIDE), wide = in_blocks(N, SIDE);
  const long a_chunk = tall * SIDE, b_chunk = wide * SIDE;
  for (int m = 0; m < tall; m += 2)
    for (int n = 0; n < wide; n += 2) {
      auto multiplied = m + 1 < tall ? n + 1 < wide ? multiply<lefts, rights, 2, 2> : multiply<lefts, rights, 2, 1>
                                     : n + 1 < wide ? multiply<lefts, rights, 1, 2> : multiply<lefts, rights, 1, 1>;
      multiplied(add, M - m * SIDE, N - n * SIDE, chunks, {a + m * SIDE, chunks * a_chunk, a_chunk},
                 {b + n * SIDE, chunks * b_chunk, b_chunk}, c + m * SIDE * c_row + n * SIDE, c_row);
    }
}
// The same of numbers that are not packed; N is at most 64.
template <int lefts, int rights>
void tile_product(bool add, int M, int N, int K, const float* a, long a_row, const float* b, long b_row, float* c,
                  long c_row) {
  constexpr int MOST = 64, DEEP = 256;
  Words left[lefts * MOST / SIDE * DEEP / 2], right[rights * MOST / SIDE * DEEP / 2];
  for (int k = 0; k < K; k += DEEP, add = true) {
    const int depth = std::min(DEEP, K - k);
    pack<rights, RIGHT>(b + k * b_row, b_row, depth, N, right);
    for (int m = 0; m < M; m += MOST) {
      const int height = std::min(MOST, M - m);
      pack<lefts, LEFT>(a + m * a_row + k, a_row, height, depth, left);
      tile_product<lefts, rights>(add, height, N, depth, left, right, c + m * c_row, c_row);
    }
  }
}

}  // namespace
