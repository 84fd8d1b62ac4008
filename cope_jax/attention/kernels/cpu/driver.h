// Runs the steps of a generated kernel: blocks of queries visit blocks of keys, from the nearest to the farthest.
#pragma once

#include <vector>

#include "tiles.h"

namespace {

constexpr int MOST = 96;  // arguments

struct Tiles {  // what a step sees
  const void* in[MOST];
  const float* turned[MOST];
  float* out[MOST];
};

enum Side { QUERY, KEY, HEAD };

// An array [batch or 1, heads, blocks, size] of 32-bit numbers. A block is [rows, columns], and may be needed transposed.
struct Argument {
  Side side;
  bool batched;
  int heads, rows, columns;
  bool turned;

  long size() const { return (long)rows * columns; }
};

enum How { LOOP, TOTAL };

// A result. LOOP passes from one block of keys to the next, and begins as input `start`, or else as `fill`.
// TOTAL is a sum. `written` is the place among the kernel's results.
struct Output {
  Argument array;
  How how;
  int start;
  float fill;
};

typedef void (*Step)(const Tiles&, float*);
typedef void (*Parallel)(void* threads, int count, void (*work)(void*, int), void* arg);

// Steps by what they see: blocks with hidden pairs, blocks without, and blocks of which all rows are saturated.
struct Kernel {
  const Argument* inputs;
  const Output* outputs;
  int input_count, output_count, heads, groups, memory;
  bool boundary, spans_by_example;
  Step masked, plain, saturated;
  bool (*is_saturated)(Tiles&, float*);
  bool (*is_done)(Tiles&, float*);
};

struct Call {
  const Kernel& kernel;
  void* const* in;
  void* const* out;
  const int32_t* spans;  // first, end, full, full_end of each block of queries, in blocks of keys
  int batch, strips, blocks;
  std::vector<float*> turned;

  long base(const Argument& x, int b, int h, int number) const {
    const int repeats = kernel.heads / kernel.groups;
    const int head = x.heads == 1 ? 0 : x.heads == kernel.heads ? h : h / repeats;
    const long count = x.side == QUERY ? strips : x.side == KEY ? blocks : 1;
    return ((((long)(x.batched ? b : 0) * x.heads + head) * count) + number) * x.size();
  }

  // All blocks of keys for one block of queries of one head.
  void visit(int b, int h, int strip, float* memory) const {
    Tiles t;
    auto number = [&](const Argument& x, int block) { return x.side == QUERY ? strip : x.side == KEY ? block : 0; };
    auto see = [&](int block, bool all) {
      for (int n = 0; n < kernel.input_count; n++) {
        const Argument& x = kernel.inputs[n];
        if (!all && x.side != KEY) continue;
        const long from = base(x, b, h, number(x, block));
        t.in[n] = (const float*)in[n] + from;
        t.turned[n] = turned[n] ? turned[n] + from : nullptr;
      }
      for (int n = 0; n < kernel.output_count; n++) {
        const Argument& x = kernel.outputs[n].array;
        if (all || x.side == KEY) t.out[n] = (float*)out[n] + base(x, b, h, number(x, block));
      }
    };
    see(0, true);
    for (int n = 0; n < kernel.output_count; n++) {
      const Output& x = kernel.outputs[n];
      if (x.how == LOOP && x.start >= 0) std::memcpy(t.out[n], t.in[x.start], 4 * x.array.size());
      else if (x.array.side == QUERY) std::fill_n(t.out[n], x.array.size(), x.fill);
    }
    const int32_t* span = spans + 4 * ((kernel.spans_by_example ? (long)b * strips : 0) + strip);
    const int first = span[0], full = span[2], full_end = span[3];
    int block = span[1] - 1;
    auto go = [&](Step step, auto here, bool (*stop)(Tiles&, float*) = nullptr) {
      for (; block >= first && here(); block--) {
        if (kernel.is_done && kernel.is_done(t, memory)) break;
        if (stop && stop(t, memory)) break;
        see(block, false);
        step(t, memory);
      }
    };
    auto interior = [&] { return block >= full && block < full_end; };
    go(kernel.masked, [&] { return !interior(); });
    go(kernel.plain, interior, kernel.is_saturated);
    if (kernel.saturated) go(kernel.saturated, interior);
    if (kernel.boundary) go(kernel.masked, [] { return true; });
  }
};

inline float* memory_of_thread(size_t count) {
  static thread_local std::vector<float> memory;
  if (memory.size() < count + 16) memory.resize(count + 16);
  return (float*)(((uintptr_t)memory.data() + 63) / 64 * 64);
}

// With sums over blocks of queries, one thread computes all heads that share keys; else each block is on its own.
inline void run(const Kernel& kernel, void* const* in, void* const* out, Parallel parallel, void* threads) {
  const int32_t* sizes = (const int32_t*)in[0];
  Call call{kernel, in + 2, out, (const int32_t*)in[1], sizes[0], sizes[1], sizes[2], {}};
  call.turned.resize(kernel.input_count);
  std::vector<std::vector<float>> copies;
  copies.reserve(kernel.input_count);
  for (int n = 0; n < kernel.input_count; n++) {
    const Argument& x = kernel.inputs[n];
    if (!x.turned) continue;
    struct Turn {
      const float* from;
      float* to;
      const Argument& x;
      int blocks;
    };
    const int count = (x.batched ? call.batch : 1) * x.heads;
    copies.emplace_back(count * (size_t)call.blocks * x.size());
    Turn turn{(const float*)call.in[n], copies.back().data(), x, call.blocks};
    call.turned[n] = turn.to;
    parallel(threads, count, [](void* p, int item) {
      const Turn& turn = *(const Turn*)p;
      for (long n = (long)item * turn.blocks; n < (long)(item + 1) * turn.blocks; n++)
        transpose(turn.from + n * turn.x.size(), turn.x.columns, turn.x.rows, turn.x.columns, turn.to + n * turn.x.size());
    }, &turn);
  }
  bool shared = false;
  for (int n = 0; n < kernel.output_count; n++) shared |= kernel.outputs[n].array.side != QUERY;
  if (!shared) {
    parallel(threads, call.batch * kernel.heads * call.strips, [](void* p, int item) {
      const Call& call = *(const Call*)p;
      const int heads = call.batch * call.kernel.heads, at = item % heads;
      const int strip = call.strips - 1 - item / heads;  // the longest first
      call.visit(at / call.kernel.heads, at % call.kernel.heads, strip, memory_of_thread(call.kernel.memory));
    }, &call);
    return;
  }
  parallel(threads, call.batch * kernel.groups, [](void* p, int item) {
    const Call& call = *(const Call*)p;
    const Kernel& kernel = call.kernel;
    const int b = item / kernel.groups, repeats = kernel.heads / kernel.groups, first = item % kernel.groups * repeats;
    for (int n = 0; n < kernel.output_count; n++) {
      const Argument& x = kernel.outputs[n].array;
      if (x.side == QUERY) continue;
      const long size = x.size() * (x.side == KEY ? call.blocks : 1);
      for (int h = first; h < first + (x.heads == kernel.heads ? repeats : 1); h++)
        std::fill_n((float*)call.out[n] + call.base(x, b, h, 0), size, 0.f);
    }
    for (int h = first; h < first + repeats; h++)
      for (int strip = 0; strip < call.strips; strip++) call.visit(b, h, strip, memory_of_thread(kernel.memory));
  }, &call);
}

}  // namespace
