// The forward pass: out, and the log of the sum of exponentials of each row.
#pragma once

#include "strip.h"

namespace {

// Adds what positions add to the logits of one row, and hides the keys that it does not see.
template <Position POSITION>
void add_positions(const Strip& strip, const Tile& t, int r, float* logits, const float* counts) {
  for (int c = 0; c < TILE; c += W) {
    if (t.masked && strip.hidden(t, r, c / W)) {
      store(logits + c, all(LOW));
      continue;
    }
    const V at = load(counts + c), added = POSITION == TABLE ? strip.interpolate(r, at).value : strip.slope() * at;
    const V x = load(logits + c) + added;
    store(logits + c, t.masked ? (strip.visible(t, r, c / W) ? x : all(LOW)) : x);
  }
}

void add_constant(const Strip& strip, const Tile& t, int r, float* logits, float added) {
  for (int c = 0; c < CHUNKS; c++) {
    const V x = load(logits + W * c) + added;
    store(logits + W * c, t.masked ? (strip.visible(t, r, c) ? x : all(LOW)) : x);
  }
}

// Turns logits into weights relative to the row's largest logit so far, and rescales what the row has summed.
void online_softmax(float* logits, float& most, float& total, float* out, int width) {
  V high = load(logits);
  for (int c = 1; c < CHUNKS; c++) high = larger(high, load(logits + W * c));
  const float now = maximum(high);
  if (now > most) {
    const float factor = std::exp(most - now);
    most = now;
    total *= factor;
    for (int c = 0; c < width; c += W) store(out + c, load(out + c) * factor);
  }
  V added{};
  for (int c = 0; c < CHUNKS; c++) {
    const V x = load(logits + W * c), weight = x < LOW / 2 ? V{} : exponential(x - most);
    store(logits + W * c, weight);
    added += weight;
  }
  total += sum(added);
}

template <Gate GATE, Position POSITION>
void forward(xla::ffi::ThreadPool pool, const Problem& p, float* out, float* logsumexp) {
  const bool table = GATE != NO_GATE && POSITION == TABLE;
  const size_t per_head = (size_t)p.tiles() * TILE * p.K;
  std::vector<float> keys(per_head * p.B * p.G), gate_keys(GATE == OF_KEYS ? keys.size() : 0);
  std::vector<float> table_panels(table ? (size_t)p.panels() * TILE * p.K : 0);
  if (table) transpose(p.table, p.K, p.N, p.K, table_panels.data());
  in_parallel(pool, p.B * p.G, [&](int bg) {
    const size_t from = p.k_at(bg / p.G, bg % p.G * (p.H / p.G));
    transpose(p.k + from, p.k_row(), p.M, p.K, &keys[per_head * bg]);
    if (GATE == OF_KEYS) transpose(p.u + from, p.k_row(), p.M, p.K, &gate_keys[per_head * bg]);
  });
  in_parallel(pool, p.B * p.H * p.strips(), [&](int item) {
    const int b = item % (p.B * p.H) / p.H, h = item % p.H;
    const int start = (p.strips() - 1 - item / (p.B * p.H)) * STRIP;  // the longest first
    float* logits = scratch<0>(3 * AREA + STRIP * (p.K + p.KV));
    float *gate_logits = logits + AREA, *counts = gate_logits + AREA, *q = counts + AREA, *sums = q + STRIP * p.K;
    Strip strip(p, b, h, start, table_panels.data(), scratch<1>(table ? STRIP * p.z_row() : 0));
    float most[STRIP], total[STRIP] = {};
    std::fill(most, most + STRIP, LOW);
    std::fill(sums, sums + STRIP * p.KV, 0.f);
    const size_t group = per_head * (b * p.G + h * p.G / p.H);
    for (int r = 0; r < strip.rows; r++)
      for (int c = 0; c < p.K; c++) q[r * p.K + c] = p.q[p.q_at(b, h, start + r) + c] * p.scale;
    bool counting = GATE != NO_GATE;
    strip.visit([&](const Tile& t) {
      product<false>(strip.rows, t.width(), p.K, {q, p.K, 1}, &keys[group + (size_t)t.first * p.K], TILE, logits, TILE);
      bool saturated = false;
      if (counting) {
        if (GATE == OF_KEYS) strip.gate_logits(t, &gate_keys[group + (size_t)t.first * p.K], gate_logits);
        saturated = count<GATE, POSITION>(strip, t, GATE == OF_KEYS ? gate_logits : logits, counts);
      }
      for (int r = 0; r < strip.rows; r++) {
        float* row = logits + r * TILE;
        if (counting) add_positions<POSITION>(strip, t, r, row, counts + r * TILE);
        else if (table || t.masked) add_constant(strip, t, r, row, table ? strip.z[r * p.z_row() + p.N - 1] : 0);
        online_softmax(row, most[r], total[r], sums + r * p.KV, p.KV);
      }
      if (saturated) counting = false;
      const float* v = p.v + p.v_at(b, h, t.first);
      product<true>(strip.rows, p.KV, t.count, {logits, TILE, 1}, v, p.v_row(), sums, p.KV);
    });
    for (int r = 0; r < strip.rows; r++) {
      const float factor = total[r] == 0 ? 0 : 1 / total[r];  // a query that sees no key gets 0
      for (int c = 0; c < p.KV; c++) out[p.out_at(b, h, start + r) + c] = sums[r * p.KV + c] * factor;
      logsumexp[((size_t)b * p.H + h) * p.L + start + r] = total[r] == 0 ? 0 : most[r] + std::log(total[r]);
    }
  });
}

}  // namespace
