// The backward pass, which computes the logits again.
#pragma once

#include "forward.h"

namespace {

struct Gradients {  // arrays of one head: rows of dk, dv and du are as far apart as those of k and v
  float *k, *v, *u, *table, slope;
};

// What the second pass over the counted tiles of a strip needs: dS, g(1-g) and dp, [64, 64] each.
struct Counted {
  int first, count;
  float *dlogits, *dgates, *dpositions;
};

// Adds w·(1-weight) to dz[cell] and w·weight to dz[cell+1], for each lane.
INLINE void scatter(float* dz, const Strip::Lookup& at, V w) {
  alignas(4 * W) float low[W], high[W];  // in memory, from where one number fills a vector in one instruction
  alignas(4 * W) int32_t cell[W];
  const V right = w * at.weight;
  store(high, right);
  store(low, w - right);
  store(cell, at.cell);
  const I lane = iota();
  V first{}, second{};
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) {
    const I hit = lane == cell[i];
    first += hit ? all(low[i]) : V{};
    second += hit ? all(high[i]) : V{};
  }
  store(dz + at.base, load(dz + at.base) + first);
  store(dz + at.base + 1, load(dz + at.base + 1) + second);
}

// Turns one row's logits into weights a, and stores dS_ij = a_ij (dout_i·v_j - delta_i) and dp_ij.
template <Position POSITION>
void counted_row(const Strip& strip, const Tile& t, int r, float logsumexp, float delta, float* logits,
                 const float* dweights, const float* counts, const Counted& to, float* dz, float& dslope) {
  for (int c = 0; c < TILE; c += W) {
    const int at = r * TILE + c;
    if (t.masked && strip.hidden(t, r, c / W)) {
      for (float* p : {logits + c, to.dlogits + at, to.dpositions + at}) store(p, V{});
      continue;
    }
    const V count = load(counts + c);
    Strip::Lookup found{};
    if (POSITION == TABLE) found = strip.interpolate(r, count);
    const V added = POSITION == TABLE ? found.value : strip.slope() * count;
    V weights = exponential(load(logits + c) + added - logsumexp);
    if (t.masked) weights = strip.visible(t, r, c / W) ? weights : V{};
    const V dlogits = weights * (load(dweights + c) - delta);
    store(logits + c, weights);
    store(to.dlogits + at, dlogits);
    store(to.dpositions + at, dlogits * (POSITION == TABLE ? found.slope : all(strip.slope())));
    if (POSITION == TABLE) scatter(dz, found, dlogits);
    else dslope += sum(dlogits * count);
  }
}

// The same for a row whose farther keys all add one constant. Returns Σ_j dS_ij.
float constant_row(const Strip& strip, const Tile& t, int r, float shift, float delta, float* logits, float* dweights) {
  V total{};
  for (int c = 0; c < CHUNKS; c++) {
    V weights = exponential(load(logits + W * c) + shift);
    if (t.masked) weights = strip.visible(t, r, c) ? weights : V{};
    const V dlogits = weights * (load(dweights + W * c) - delta);
    store(logits + W * c, weights);
    store(dweights + W * c, dlogits);
    total += dlogits;
  }
  return sum(total);
}

// The arrays that all heads read and write.
struct Arrays {
  const float *out, *logsumexp, *dout;
  float *dq, *dk, *dv, *dx, *du;
  const float *table_panels, *padded_table;  // eᵀ as `transpose` makes it, and e with panels() · 64 rows
};

// The gradients of one head: adds to those of its keys, values and parameters, and writes those of its queries.
template <Gate GATE, Position POSITION>
class HeadBackward {
 public:
  static constexpr bool HAS_TABLE = GATE != NO_GATE && POSITION == TABLE;

  HeadBackward(const Problem& p, const Arrays& arrays, int b, int h, float* dtable)
      : p(p), arrays(arrays), b(b), h(h), z_row(p.z_row()), out_row((long)p.H * p.KV) {
    to = {arrays.dk + p.k_at(b, h), arrays.dv + p.v_at(b, h), arrays.du + p.k_at(b, h), dtable, 0};
    const size_t panels = (size_t)p.tiles() * TILE;
    keys = scratch<0>(panels * (2 * p.K + p.KV));
    values = keys + panels * p.K, gate_keys = values + panels * p.KV;
    transpose(p.k + p.k_at(b, h), p.k_row(), p.M, p.K, keys);
    transpose(p.v + p.v_at(b, h), p.v_row(), p.M, p.KV, values);
    if (GATE == OF_KEYS) transpose(p.u + p.k_at(b, h), p.k_row(), p.M, p.K, gate_keys);
    logits = scratch<1>(4 * AREA + 3 * STRIP * p.K + (HAS_TABLE ? 2 * STRIP * z_row : 0));
    dweights = logits + AREA, gate_logits = dweights + AREA, counts = gate_logits + AREA, q = counts + AREA, dq = q + STRIP * p.K;
    dx = dq + STRIP * p.K, z = dx + STRIP * p.K, dz = z + (HAS_TABLE ? STRIP * z_row : 0);
  }

  float run() {  // returns the gradient of the slope
    for (int start = 0; start < p.L; start += STRIP) {
      Strip strip(p, b, h, start, arrays.table_panels, z);
      begin(strip);
      strip.visit([&](const Tile& t) { counting ? count(strip, t) : add_constant(strip, t); });
      add_gates(strip);
      finish(strip);
    }
    return to.slope;
  }

 private:
  void begin(const Strip& strip) {
    const int start = strip.start;
    counting = GATE != NO_GATE, counted.clear();
    x = p.x + p.q_at(b, h, start), dout = arrays.dout + p.out_at(b, h, start);
    logsumexp = arrays.logsumexp + ((size_t)b * p.H + h) * p.L + start;
    for (int r = 0; r < strip.rows; r++) {
      const float* out = arrays.out + p.out_at(b, h, start + r);
      V total{};
      for (int c = 0; c < p.KV; c += W) total += load(out + c) * load(dout + r * out_row + c);
      delta[r] = sum(total), dconstant[r] = 0;
      for (int c = 0; c < p.K; c++) q[r * p.K + c] = p.q[p.q_at(b, h, start + r) + c] * p.scale;
    }
    std::fill(dq, dq + STRIP * p.K, 0.f);
    std::fill(dx, dx + STRIP * p.K, 0.f);
    const long used = (strip.limit + W - 1) / W * W + W;
    for (int r = 0; HAS_TABLE && r < strip.rows; r++) std::fill(dz + r * z_row, dz + r * z_row + used, 0.f);
  }

  // s_ij and dout_i·v_j of a tile.
  void products(const Strip& strip, const Tile& t) {
    const float *k = keys + (size_t)t.first * p.K, *v = values + (size_t)t.first * p.KV;
    product<false>(strip.rows, t.width(), p.K, {q, p.K, 1}, k, TILE, logits, TILE);
    product<false>(strip.rows, t.width(), p.KV, {dout, out_row, 1}, v, TILE, dweights, TILE);
  }

  void add_dv(const Strip& strip, const Tile& t) {
    float* dv = to.v + t.first * p.v_row();
    product<true>(t.count, p.KV, strip.rows, {logits, 1, TILE}, dout, out_row, dv, p.v_row());
  }

  void add_dq_dk(const Strip& strip, int first, int count, const float* dlogits) {
    const float* k = p.k + p.k_at(b, h, first);
    product<true>(strip.rows, p.K, count, {dlogits, TILE, 1}, k, p.k_row(), dq, p.K);
    product<true>(count, p.K, strip.rows, {dlogits, 1, TILE}, q, p.K, to.k + first * p.k_row(), p.k_row());
  }

  void count(Strip& strip, const Tile& t) {
    products(strip, t);
    if (GATE == OF_KEYS) strip.gate_logits(t, gate_keys + (size_t)t.first * p.K, gate_logits);
    static thread_local std::vector<std::vector<float>> kept;
    if (kept.size() <= counted.size()) kept.emplace_back(3 * AREA);
    float* areas = kept[counted.size()].data();
    counted.push_back({t.first, t.count, areas, areas + AREA, areas + 2 * AREA});
    const Counted& to_tile = counted.back();
    const float* logits_of_gates = GATE == OF_KEYS ? gate_logits : logits;
    const bool saturated = ::count<GATE, POSITION>(strip, t, logits_of_gates, counts, to_tile.dgates);
    for (int r = 0; r < strip.rows; r++)
      counted_row<POSITION>(strip, t, r, logsumexp[r], delta[r], logits + r * TILE, dweights + r * TILE,
                            counts + r * TILE, to_tile, dz + r * z_row, to.slope);
    counting = !saturated;
    add_dv(strip, t);
  }

  void add_constant(const Strip& strip, const Tile& t) {
    products(strip, t);
    for (int r = 0; r < strip.rows; r++) {
      const float shift = (HAS_TABLE ? z[r * z_row + p.N - 1] : 0) - logsumexp[r];
      dconstant[r] += constant_row(strip, t, r, shift, delta[r], logits + r * TILE, dweights + r * TILE);
    }
    add_dv(strip, t);
    add_dq_dk(strip, t.first, t.count, dweights);
  }

  // From the farthest tile to the nearest: a gate moves its own position and those of all farther keys.
  void add_gates(const Strip& strip) {
    float farther[STRIP] = {};
    for (auto tile = counted.rbegin(); tile != counted.rend(); tile++) {
      for (int r = 0; r < strip.rows; r++) {
        V carry = all(farther[r]);
        for (int at = r * TILE; at < (r + 1) * TILE; at += W) {
          const V sums = prefix_sum(load(tile->dpositions + at)) + carry;
          carry = all(sums[W - 1]);
          const V dgate = load(tile->dgates + at) * sums;
          if (GATE == OF_LOGITS) store(tile->dlogits + at, load(tile->dlogits + at) + dgate);
          else store(tile->dgates + at, dgate * p.scale);
        }
        farther[r] = carry[0];
      }
      add_dq_dk(strip, tile->first, tile->count, tile->dlogits);
      if (GATE == OF_KEYS) {
        const float* u = p.u + p.k_at(b, h, tile->first);
        float* du = to.u + tile->first * p.k_row();
        product<true>(strip.rows, p.K, tile->count, {tile->dgates, TILE, 1}, u, p.k_row(), dx, p.K);
        product<true>(tile->count, p.K, strip.rows, {tile->dgates, 1, TILE}, x, p.q_row(), du, p.k_row());
      }
    }
  }

  void finish(const Strip& strip) {
    if (HAS_TABLE) {
      for (int r = 0; r < strip.rows; r++) {
        float* row = dz + r * z_row;
        if (!counting) row[p.N - 1] += dconstant[r];
        for (int n = p.N; n < strip.known + W; n++) row[p.N - 1] += row[n], row[n] = 0;
      }
      const int reached = std::min(strip.known, p.panels() * TILE);
      product<true>(strip.rows, p.K, reached, {dz, z_row, 1}, arrays.padded_table, p.K, dx, p.K);
      product<true>(reached, p.K, strip.rows, {dz, 1, z_row}, x, p.q_row(), to.table, p.K);
    }
    for (int r = 0; r < strip.rows; r++) {
      const size_t at = p.q_at(b, h, strip.start + r);
      for (int c = 0; c < p.K; c++) arrays.dq[at + c] = dq[r * p.K + c] * p.scale;
      if (GATE != NO_GATE) std::copy(dx + r * p.K, dx + (r + 1) * p.K, arrays.dx + at);
    }
  }

  const Problem& p;
  const Arrays& arrays;
  const int b, h;
  const long z_row, out_row;
  Gradients to;
  float *keys, *values, *gate_keys;                            // transposed, of all tiles
  float *logits, *dweights, *gate_logits, *counts, *q, *dq, *dx, *z, *dz;  // of one strip; q is multiplied by 1/√K
  const float *x, *dout, *logsumexp;                           // of one strip
  float delta[STRIP], dconstant[STRIP];                        // out·dout; the gradient of the constant
  bool counting;
  std::vector<Counted> counted;  // from the nearest tile to the farthest
};

template <Gate GATE, Position POSITION>
void backward(xla::ffi::ThreadPool pool, const Problem& p, Arrays arrays, float* dtable, float* dslopes) {
  using Head = HeadBackward<GATE, POSITION>;
  const int groups = p.B * p.G, shares = std::min(groups, 64);  // each share sums its own gradient of the table
  const size_t table_size = Head::HAS_TABLE ? (size_t)p.panels() * TILE * p.K : 0;
  std::vector<float> table_panels(table_size), padded(table_size), tables(table_size * shares), slopes(p.B * p.H);
  if (Head::HAS_TABLE) {
    transpose(p.table, p.K, p.N, p.K, table_panels.data());
    std::copy(p.table, p.table + (size_t)p.N * p.K, padded.begin());
  }
  arrays.table_panels = table_panels.data(), arrays.padded_table = padded.data();
  in_parallel(pool, shares, [&](int share) {
    for (int group = (long)groups * share / shares; group < (long)groups * (share + 1) / shares; group++) {
      const int b = group / p.G, first = group % p.G * (p.H / p.G);
      for (int key = 0; key < p.M; key++) {
        std::fill_n(arrays.dk + p.k_at(b, first, key), p.K, 0.f);
        std::fill_n(arrays.dv + p.v_at(b, first, key), p.KV, 0.f);
        if (GATE == OF_KEYS) std::fill_n(arrays.du + p.k_at(b, first, key), p.K, 0.f);
      }
      for (int h = first; h < first + p.H / p.G; h++)
        slopes[b * p.H + h] = Head(p, arrays, b, h, tables.data() + table_size * share).run();
    }
  });
  if (Head::HAS_TABLE) std::fill(dtable, dtable + (size_t)p.N * p.K, 0.f);
  for (int share = 0; Head::HAS_TABLE && share < shares; share++)
    for (size_t i = 0; i < (size_t)p.N * p.K; i++) dtable[i] += tables[table_size * share + i];
  for (int h = 0; GATE != NO_GATE && POSITION == SLOPE && h < p.H; h++) {
    dslopes[h] = 0;
    for (int b = 0; b < p.B; b++) dslopes[h] += slopes[b * p.H + h];
  }
}

}  // namespace
