// The problem, and the rows of one head that visit the tiles of keys together.
#pragma once

#include <algorithm>
#include <cmath>

#include "products.h"

namespace {

enum Gate { NO_GATE, OF_LOGITS, OF_KEYS };
enum Position { TABLE, SLOPE };

struct Problem {
  int B, L, M, H, G, K, KV, N, window;  // window 0: none
  bool causal;
  const float *q, *k, *v, *x, *u, *table, *slopes;
  const int32_t *q_segments, *k_segments;  // [B, L] and [B, M], or null
  float scale;

  int strips() const { return (L + STRIP - 1) / STRIP; }
  int tiles() const { return (M + TILE - 1) / TILE; }
  int index(int row) const { return M - L + row; }  // the last query is at the last key
  int panels() const { return (N + TILE - 1) / TILE; }
  long z_row() const { return panels() * (long)TILE + 2 * TILE; }
  long q_row() const { return (long)H * K; }
  long k_row() const { return (long)G * K; }
  long v_row() const { return (long)G * KV; }
  size_t q_at(int b, int h, int row = 0) const { return (((size_t)b * L + row) * H + h) * K; }
  size_t out_at(int b, int h, int row = 0) const { return (((size_t)b * L + row) * H + h) * KV; }
  size_t k_at(int b, int h, int key = 0) const { return (((size_t)b * M + key) * G + h * G / H) * K; }
  size_t v_at(int b, int h, int key = 0) const { return (((size_t)b * M + key) * G + h * G / H) * KV; }
};

// The keys of one tile that the rows of one strip see.
struct Tile {
  int first, count;
  bool empty, masked;  // no row sees a key; some row does not see some key

  int width() const { return (count + W - 1) / W * W; }
};

// One head's queries `start` … `start + rows`, with the sums that they carry from tile to tile.
struct Strip {
  const Problem& of;
  int b, h, start, rows;
  const float* table_panels;  // eᵀ, as `transpose` makes it
  float* z;                   // z_i[n] for n < `known`, with rows z_row() apart
  int known = 0, limit;       // no row can be at a position `limit` or beyond
  float counts[STRIP] = {};   // P_i

  Strip(const Problem& p, int b, int h, int start, const float* table_panels, float* z)
      : of(p), b(b), h(h), start(start), rows(std::min(STRIP, p.L - start)), table_panels(table_panels), z(z) {
    limit = std::min(p.N, end() + 2);
  }

  int end() const {  // all keys that a row sees come before it
    const int last = of.index(start + rows - 1);
    if (of.causal) return std::max(0, last + 1);
    return of.window ? std::max(0, std::min(of.M, last + of.window)) : of.M;
  }
  int begin() const { return of.window ? std::max(0, of.index(start) - of.window + 1) : 0; }

  Tile tile(int number) const {
    const int first = number * TILE, count = std::min(TILE, of.M - first);
    Tile t{first, count, false, count < TILE};
    t.masked |= of.causal && first + count - 1 > of.index(start);
    if (of.window) {
      t.masked |= first <= of.index(start + rows - 1) - of.window;
      t.masked |= first + count - 1 >= of.index(start) + of.window;
    }
    if (of.q_segments) {
      const int32_t *q = of.q_segments + (size_t)b * of.L + start, *k = of.k_segments + (size_t)b * of.M + first;
      const auto [q_low, q_high] = std::minmax_element(q, q + rows);
      const auto [k_low, k_high] = std::minmax_element(k, k + count);
      t.empty = *q_high < *k_low || *k_high < *q_low;
      t.masked |= *q_low != *q_high || *k_low != *k_high;
    }
    return t;
  }

  // Whether causality, or the end of the keys, hides a whole chunk from `row`.
  bool hidden(const Tile& t, int row, int chunk) const {
    const int first = t.first + W * chunk;
    return first >= t.first + t.count || (of.causal && first > of.index(start + row));
  }

  // -1 for the keys that `row` sees, else 0.
  I visible(const Tile& t, int row, int chunk) const {
    const int index = of.index(start + row), first = t.first + W * chunk;
    const I key = iota() + first;
    I seen = key < t.first + t.count;
    if (of.causal) seen &= key <= index;
    if (of.window) seen &= (key > index - of.window) & (key < index + of.window);
    if (of.q_segments) {
      const int32_t* k = of.k_segments + (size_t)b * of.M + first;
      I ids{};
      if (first + W <= of.M) ids = load(k);
      else
        for (int i = 0; first + i < of.M; i++) ids[i] = k[i];
      seen &= ids == of.q_segments[(size_t)b * of.L + start + row];
    }
    return seen;
  }

  // Computes z_i[n] for n < `end` and a few more.
  void need(int end) {
    const int before = known, whole = (limit + W - 1) / W * W;
    const Matrix x{of.x + of.q_at(b, h, start), of.q_row(), 1};
    end = std::min((end + W - 1) / W * W, whole);
    while (known < end) {
      const int panel = known / TILE * TILE, stop = std::min(end, panel + TILE);
      const float* table = table_panels + (size_t)panel * of.K + known - panel;
      product<false>(rows, stop - known, of.K, x, table, TILE, z + known, of.z_row());
      known = stop;
    }
    if (known == before || known < of.N) return;
    for (int r = 0; r < rows; r++) {  // beyond the table: its last row, so the slope is 0
      float* row = z + r * of.z_row();
      std::fill(row + of.N, row + whole + W, row[of.N - 1]);
    }
  }

  // x_i·u_j/√K of a tile, whose gate keys are transposed.
  void gate_logits(const Tile& t, const float* gate_keys, float* to) const {
    const Matrix x{of.x + of.q_at(b, h, start), of.q_row(), 1};
    product<false>(rows, t.width(), of.K, x, gate_keys, TILE, to, TILE);
    for (int i = 0; i < rows * TILE; i += W) store(to + i, load(to + i) * of.scale);
  }

  // What z_i adds, and its derivative in P. `cell` and `weight` say where: z[cell]·(1 - weight) + z[cell+1]·weight.
  struct Lookup {
    V value, slope, weight;
    I cell;
    int base;
  };
  Lookup interpolate(int row, V counts) const {
    Lookup found;
    const float last = of.N - 1;
    const I floor = truncate(counts < last ? counts : all(last));  // also for NaN
    found.base = floor[W - 1];  // the nearest key of the chunk has the smallest position
    const I far = floor - found.base;
    found.cell = far < W ? far : all(W - 1);  // only rounding makes this W
    const V position = clipped(counts, 0, last);
    found.weight = position - to_float(found.cell + found.base);
    const float* window = z + row * of.z_row() + found.base;
    const V low = permute(load(window), found.cell);
    found.slope = permute(load(window + 1), found.cell) - low;
    found.value = low + found.weight * found.slope;
    found.slope = position == to_float(floor) ? V{} : found.slope;  // at whole positions the derivative is 0
    return found;
  }

  float slope() const { return of.slopes[h]; }

  // Calls step(tile) from the nearest tile to the farthest.
  template <class Step>
  void visit(Step step) const {
    const int first = begin() / TILE, last = (end() + TILE - 1) / TILE - 1;
    for (int number = last; number >= first; number--) {
      const Tile t = tile(number);
      if (!t.empty) step(t);
    }
  }
};

// Counts the gates of one row: writes P_ij for each key of the tile, and g(1-g) if `slopes` is given.
inline void count_row(Strip& strip, const Tile& t, int r, const float* logits, float* counts, float* slopes = nullptr) {
  V carry = all(strip.counts[r]);
  for (int c = W * (CHUNKS - 1); c >= 0; c -= W) {
    V gates{};
    if (!t.masked) gates = sigmoid(load(logits + c));
    else if (!strip.hidden(t, r, c / W)) gates = strip.visible(t, r, c / W) ? sigmoid(load(logits + c)) : V{};
    const V sums = suffix_sum(gates) + carry;
    carry = all(sums[0]);
    store(counts + c, sums);
    if (slopes) store(slopes + c, gates - gates * gates);
  }
  strip.counts[r] = carry[0];
}

// Counts the gates of all rows, and computes the z that their positions need. Returns whether all rows are saturated.
template <Position POSITION>
bool count(Strip& strip, const Tile& t, const float* logits, float* counts, float* slopes = nullptr) {
  const float last = strip.of.N - 1;
  float most = 0;
  bool saturated = POSITION == TABLE;
  for (int r = 0; r < strip.rows; r++) {
    const int at = r * TILE;
    count_row(strip, t, r, logits + at, counts + at, slopes ? slopes + at : nullptr);
    most = std::max(most, std::min(strip.counts[r], last));
    if (strip.counts[r] < last) saturated = false;  // NaN counts as saturated
  }
  if (POSITION == TABLE) strip.need(saturated ? strip.of.N : (int)most + 2);
  return saturated;
}

}  // namespace
