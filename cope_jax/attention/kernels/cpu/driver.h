// Runs the steps of a generated kernel: blocks of queries visit blocks of keys, from the nearest to the farthest.
#pragma once

#include <memory>
#include <vector>

#include "tiles.h"

namespace {

constexpr int MOST = 96;  // arguments
// Blocks of queries that visit keys together, at most. They keep no more bytes than this, which leaves room in a cache
// of 1 MiB, and leave this many parts for each thread.
constexpr long TOGETHER = 8, CACHE_BYTES = 600 << 10, PARTS = 4;
constexpr int PART = 64, MORE = PANEL * W;  // the columns of a panel of a table that grows, and by how many it does

struct Tiles {  // what a step sees
  const void* in[MOST];
  const real* turned[MOST];
  const Words* packed[MOST][FORMS];
  real* out[MOST];
  int known[MOST];  // of outputs that grow: how many columns exist
};

// Adds columns to an output until `end` exist: products of the queries in[q] with panels of a table, or zeros.
template <int left, int right>
INLINE void grow_product(Tiles& t, int end, int n, int rows, int columns, int distance, int q, int table, int width) {
  for (int& known = t.known[n]; known < end; known = std::min(known + MORE, columns)) {
    const real* queries = (const real*)t.in[q];
    const real* panel = t.turned[table] + known / PART * PART * width + known % PART;
    real* to = t.out[n] + known;
    if constexpr (left > 0) tile_product<left, right>(false, rows, MORE, width, queries, width, panel, PART, to, distance);
    else product<false>(rows, MORE, width, {queries, width, 1}, panel, PART, to, distance);
  }
}
INLINE void grow_zeros(Tiles& t, int end, int n, int rows, int columns, int distance) {
  for (int& known = t.known[n]; known < end; known = std::min(known + MORE, columns))
    for (int r = 0; r < rows; r++) std::fill_n(t.out[n] + r * distance + known, MORE, real(0));
}

// Brings a later row into the cache: the rows of tokens are far apart, so that no CPU expects them.
constexpr int AHEAD = 12;  // rows, of which as much is on its way as a core can wait for
template <class T>
INLINE void expect(const T* p, int count) {
  for (int c = 0; c < count; c += 64 / sizeof(T)) __builtin_prefetch(p + c);
}

enum Side { QUERY, KEY, HEAD };

// Arrays lie as [batch, heads, blocks, rows, columns]; or the heads of a token are neighbours, and tokens are the rows
// or the columns of a block: [batch, blocks, tokens, heads, width].
enum Order { BY_HEAD, TOKEN_ROWS, TOKEN_COLUMNS };

// An array of numbers, all of one width. `plain` and `turned`: functions read its blocks as they are, and transposed; if `panels`,
// PART of its rows after each other. `forms`: in which forms they read its blocks in tiles, a bit for each. `halves`: its
// numbers are bfloat16 in memory.
struct Argument {
  Side side;
  Order order;
  int heads, rows, columns;
  bool batched, plain, turned, panels;
  int forms;
  bool halves = false;

  long turned_size() const { return panels ? (rows + PART - 1) / PART * PART * (long)columns : size(); }
  long size() const { return (long)rows * columns; }
  long space() const { return (size() + 15) / 16 * 16; }  // of a copy
  long distance() const { return (long)heads * (order == TOKEN_ROWS ? columns : rows); }  // of tokens
  // Where a block begins, among `blocks` blocks.
  long at(int b, int head, int blocks, int block) const {
    if (!batched) b = 0;
    if (order == BY_HEAD) return (((long)b * heads + head) * blocks + block) * size();
    return ((long)b * blocks + block) * heads * size() + (long)head * (order == TOKEN_ROWS ? columns : rows);
  }
  template <class T, class Copy>
  void pack_rows(const T* from, real* to, Copy copy) const {
    for (int r = 0; r < rows; r++) {
      expect(from + (r + AHEAD) * row(), columns);
      copy(from + r * row(), columns, to + (long)r * columns);
    }
  }
  void pack(const void* from, real* to) const {
    if (halves) pack_rows((const uint16_t*)from, to, [](auto p, int n, real* to) { widen(p, n, (float*)to); });
    else pack_rows((const real*)from, to, [](auto p, int n, real* to) { std::copy_n(p, n, to); });
  }
  void pack_turned(const real* from, real* to) const {
    const long apart = row();
    if (!panels) return transpose(from, apart, rows, columns, to, rows);
    std::fill_n(to, turned_size(), real(0));
    for (int r = 0; r < rows; r += PART)
      transpose(from + r * apart, apart, std::min(PART, rows - r), columns, to + r * (long)columns, PART);
  }
  long row() const { return order == BY_HEAD ? columns : distance(); }
  bool has(int form) const { return forms >> form & 1; }
  long packed_size(int form) const { return form_size(form, rows, columns); }
  template <class T, class Copy>
  void unpack_rows(const real* from, int rows, int columns, T* to, Copy copy) const {
    for (int r = 0; r < rows; r++) {
      expect(to + (r + AHEAD) * distance(), columns);
      copy(from + (long)r * columns, columns, to + r * distance());
    }
  }
  // `space` has room for a block.
  void unpack(const real* from, void* to, real* space) const {
    const bool turns = order == TOKEN_COLUMNS;
    if (turns && !halves) return transpose(from, columns, rows, columns, (real*)to, distance());
    if (turns) transpose(from, columns, rows, columns, space, rows), from = space;
    const int tokens = turns ? columns : rows, width = turns ? rows : columns;
    if (halves) unpack_rows(from, tokens, width, (uint16_t*)to, [](auto p, int n, auto to) { narrow((float*)p, n, to); });
    else unpack_rows(from, tokens, width, (real*)to, [](auto p, int n, auto to) { std::copy_n(p, n, to); });
  }
};

// What functions write: result number `result` of the kernel, or, if this is -1, what exists only while a block of
// queries visits its keys. It begins as `fill`, if `filled`.
struct Output {
  Argument array;
  int result;
  bool filled;
  real fill;
};

typedef void (*Step)(Tiles&, real*);
typedef void (*Parallel)(void* threads, int count, void (*work)(void*, int), void* arg);

// `begin` and `end` come before and after the blocks of keys. Steps by what they see: blocks with hidden pairs, blocks
// without, and the latter once all rows are saturated. The last one, and each question, is null if its answer is never yes.
struct Kernel {
  const Argument* inputs;
  const Output* outputs;
  int input_count, output_count, heads, groups, memory;
  bool spans_by_example;
  void (*pack)(int form, bool halves, const void* p, long row, int rows, int columns, Words* to);  // or null: no tiles
  Step begin, end, masked, plain, saturated;
  bool (*is_saturated)(Tiles&, real*);
  bool (*is_done)(Tiles&, real*);
};

inline real* memory_of_thread(int number, size_t count) {
  static thread_local std::vector<real> memory[2];
  if (memory[number].size() < count + 16) memory[number].resize(count + 16);
  return (real*)(((uintptr_t)memory[number].data() + 63) / 64 * 64);
}

struct Call {
  const Kernel& kernel;
  void* const* in;
  void* const* out;
  const int32_t* spans;  // first, end, full, full_end of each block of queries, in blocks of keys
  int batch, strips, blocks, together;
  std::vector<real*> plain, turned;  // copies of all blocks of keys, head by head, or null
  std::vector<Words*> packed[FORMS];

  int count(const Argument& x) const { return x.side == QUERY ? strips : x.side == KEY ? blocks : 1; }
  int head(const Argument& x, int h) const {
    return x.heads == 1 ? 0 : x.heads == kernel.heads ? h : h / (kernel.heads / kernel.groups);
  }
  // The number of a block in arrays that lie head by head.
  long by_head(const Argument& x, int b, int h, int block) const {
    return ((long)(x.batched ? b : 0) * x.heads + head(x, h)) * count(x) + block;
  }
  long at(const Argument& x, int b, int h, int block) const { return x.at(b, head(x, h), count(x), block); }
  const void* input(int n, long at) const { return (const char*)in[n] + at * (kernel.inputs[n].halves ? 2 : sizeof(real)); }
  bool staged(const Argument& x) const { return x.side == QUERY && x.plain && (x.halves || x.order != BY_HEAD); }
  bool staged(const Output& x) const { return x.array.side == QUERY && (x.result < 0 || x.array.order != BY_HEAD); }
  real* result(const Output& x, long at) const {
    return (real*)((char*)out[x.result] + at * (x.array.halves ? 2 : sizeof(real)));
  }

  // How many numbers a block of queries keeps while it visits its keys.
  size_t space_of_visit() const {
    size_t space = 0;
    for (int n = 0; n < kernel.input_count; n++) {
      const Argument& x = kernel.inputs[n];
      space += staged(x) ? x.space() : 0;
      for (int form = 0; form < FORMS && x.side == QUERY; form++) space += x.has(form) ? SIDE * x.packed_size(form) : 0;
    }
    for (int n = 0; n < kernel.output_count; n++) space += staged(kernel.outputs[n]) ? kernel.outputs[n].array.space() : 0;
    return space;
  }

  // Block `strip` of the queries of one head on its way over the blocks of keys.
  struct Visit {
    int b, h, strip;
    const int32_t* span;
    bool saturated, done;
    Tiles t;
  };

  void begin(Visit& v, real* memory, real* stage) const {
    Tiles& t = v.t;
    v.span = spans + 4 * ((kernel.spans_by_example ? (long)v.b * strips : 0) + v.strip);
    v.saturated = v.done = false;
    std::fill_n(t.known, kernel.output_count, 0);
    for (int n = 0; n < kernel.input_count; n++) {
      const Argument& x = kernel.inputs[n];
      if (x.side == KEY) continue;
      t.in[n] = input(n, at(x, v.b, v.h, x.side == QUERY ? v.strip : 0));
      if (turned[n]) t.turned[n] = turned[n] + by_head(x, v.b, v.h, 0) * x.turned_size();
      if (x.side == HEAD)
        for (int f = 0; f < FORMS; f++)
          if (x.has(f)) t.packed[n][f] = packed[f][n] + by_head(x, v.b, v.h, 0) * x.packed_size(f);
      for (int form = 0; form < FORMS && x.side == QUERY; form++)
        if (x.has(form)) {
          kernel.pack(form, x.halves, t.in[n], x.row(), x.rows, x.columns, (Words*)stage);
          t.packed[n][form] = (const Words*)stage, stage += SIDE * x.packed_size(form);
        }
      if (!staged(x)) continue;
      x.pack(t.in[n], stage);
      t.in[n] = stage, stage += x.space();
    }
    for (int n = 0; n < kernel.output_count; n++) {
      const Output& x = kernel.outputs[n];
      if (x.array.side == KEY) continue;
      if (staged(x)) t.out[n] = stage, stage += x.array.space();
      else t.out[n] = result(x, at(x.array, v.b, v.h, x.array.side == QUERY ? v.strip : 0));
      if (x.array.side == QUERY && x.filled) std::fill_n(t.out[n], x.array.size(), x.fill);
    }
    kernel.begin(t, memory);
  }
  // Visits a block of keys. `sums` are the sums of each output over these blocks.
  void visit(Visit& v, int block, real* const* sums, real* memory) const {
    if (block < v.span[0] || block >= v.span[1] || v.done) return;
    v.done = kernel.is_done && kernel.is_done(v.t, memory);
    if (v.done) return;
    const bool inside = block >= v.span[2] && block < v.span[3];  // all its pairs are visible
    if (inside && kernel.is_saturated && !v.saturated) v.saturated = kernel.is_saturated(v.t, memory);
    for (int n = 0; n < kernel.input_count; n++) {
      const Argument& x = kernel.inputs[n];
      if (x.side != KEY) continue;
      const long from = by_head(x, v.b, v.h, block);
      v.t.in[n] = plain[n] ? plain[n] + from * x.size() : input(n, from * x.size());
      if (turned[n]) v.t.turned[n] = turned[n] + from * x.turned_size();
      for (int form = 0; form < FORMS; form++)
        if (x.has(form)) v.t.packed[n][form] = packed[form][n] + from * x.packed_size(form);
    }
    for (int n = 0; n < kernel.output_count; n++) {
      const Argument& x = kernel.outputs[n].array;
      if (x.side == KEY) v.t.out[n] = sums[n] + block * x.size();
    }
    (inside ? v.saturated ? kernel.saturated : kernel.plain : kernel.masked)(v.t, memory);
  }
  void finish(Visit& v, real* memory) const {
    kernel.end(v.t, memory);
    for (int n = 0; n < kernel.output_count; n++) {
      const Output& x = kernel.outputs[n];
      if (staged(x) && x.result >= 0) x.array.unpack(v.t.out[n], result(x, at(x.array, v.b, v.h, v.strip)), memory);
    }
  }

  // All blocks of keys for `count` blocks of queries of one head, from `strip` on. Each block of keys, and the sums of its
  // gradients, come into the core's cache once for all of them.
  void visit_keys(int b, int h, int strip, int count, real* const* sums) const {
    const size_t space = space_of_visit();
    real* memory = memory_of_thread(0, kernel.memory + count * space);
    Visit visits[TOGETHER];
    if (kernel.pack) configure_tiles();  // again for each visit: other libraries use them too
    int first = blocks, last = 0;
    for (int n = 0; n < count; n++) {
      Visit& v = visits[n];
      v.b = b, v.h = h, v.strip = strip + n;
      begin(v, memory, memory + kernel.memory + n * space);
      first = std::min<int>(first, v.span[0]), last = std::max<int>(last, v.span[1]);
    }
    for (int block = last - 1; block >= first; block--)
      for (int n = 0; n < count; n++) visit(visits[n], block, sums, memory);
    for (int n = 0; n < count; n++) finish(visits[n], memory);
    if (kernel.pack) release_tiles();
  }

  // All heads of one example that share keys, with sums over all blocks of queries.
  void visit_group(int b, int group) const {
    const int repeats = kernel.heads / kernel.groups, first = group * repeats;
    auto heads = [&](const Argument& x) { return x.heads == kernel.heads ? repeats : 1; };
    size_t needed = 0;
    for (int n = 0; n < kernel.output_count; n++) {
      const Argument& x = kernel.outputs[n].array;
      if (x.side == KEY) needed += heads(x) * blocks * x.size();
      if (x.side == HEAD)
        for (int h = first; h < first + heads(x); h++) std::fill_n(result(kernel.outputs[n], at(x, b, h, 0)), x.size(), real(0));
    }
    real* memory = memory_of_thread(1, needed);
    std::fill_n(memory, needed, real(0));
    for (int h = first; h < first + repeats; h++) {
      real *sums[MOST], *free = memory;
      for (int n = 0; n < kernel.output_count; n++) {
        const Argument& x = kernel.outputs[n].array;
        if (x.side != KEY) continue;
        sums[n] = free + (heads(x) > 1 ? h - first : 0) * blocks * x.size();
        free += heads(x) * blocks * x.size();
      }
      for (int strip = 0; strip < strips; strip += together) visit_keys(b, h, strip, std::min(together, strips - strip), sums);
    }
    real* free = memory;
    for (int n = 0; n < kernel.output_count; n++) {
      const Argument& x = kernel.outputs[n].array;
      if (x.side != KEY) continue;
      for (int h = first; h < first + heads(x); h++)
        for (int block = 0; block < blocks; block++, free += x.size()) {
          real* to = result(kernel.outputs[n], at(x, b, h, block));
          if (x.order == BY_HEAD) std::copy_n(free, x.size(), to);
          else x.unpack(free, to, memory_of_thread(0, x.size()));
        }
    }
  }
};

// With sums over blocks of queries, one thread computes all heads that share keys; else each block is on its own.
inline void run(const Kernel& kernel, void* const* in, void* const* out, Parallel parallel, void* threads, int count) {
  const int32_t* sizes = (const int32_t*)in[0];
  Call call{kernel, in + 2, out, (const int32_t*)in[1], sizes[0], sizes[1], sizes[2], 1, {}, {}, {}};
  call.plain.resize(kernel.input_count), call.turned.resize(kernel.input_count);
  for (auto& form : call.packed) form.resize(kernel.input_count);
  std::vector<std::unique_ptr<Words[]>> copies;
  // A copy of all blocks; each takes `size` numbers.
  auto copy = [&](int number, long size, auto pack) {
    const Argument& x = kernel.inputs[number];
    const int heads = (x.batched ? call.batch : 1) * x.heads;
    const int blocks = call.count(x);
    copies.emplace_back(new Words[heads * (size_t)blocks * size * sizeof(real) / sizeof(Words) + 1]);
    real* to = (real*)copies.back().get();
    auto work = [&](int item) {
      for (int block = 0; block < blocks; block++)
        pack(call.input(number, x.at(item / x.heads, item % x.heads, blocks, block)),
             to + ((long)item * blocks + block) * size);
    };
    typedef decltype(work) Work;
    parallel(threads, heads, [](void* work, int item) { (*(Work*)work)(item); }, &work);
    return to;
  };
  bool shared = false;
  for (int n = 0; n < kernel.input_count; n++) {
    const Argument& x = kernel.inputs[n];
    if (x.side == KEY && x.plain && (x.halves || x.order != BY_HEAD))
      call.plain[n] = copy(n, x.size(), [&](const void* from, real* to) { x.pack(from, to); });
    if (x.turned)
      call.turned[n] = copy(n, x.turned_size(), [&](const void* from, real* to) { x.pack_turned((const real*)from, to); });
    for (int form = 0; form < FORMS; form++)
      if (x.has(form) && x.side != QUERY)
        call.packed[form][n] = (Words*)copy(n, SIDE * x.packed_size(form), [&](const void* from, real* to) {
          kernel.pack(form, x.halves, from, x.row(), x.rows, x.columns, (Words*)to);
        });
  }
  for (int n = 0; n < kernel.output_count; n++) shared |= kernel.outputs[n].array.side != QUERY;
  const long most = CACHE_BYTES / std::max(1L, (long)(call.space_of_visit() * sizeof(real)));
  const long parts = (long)call.batch * kernel.heads * call.strips / (PARTS * count);
  call.together = std::max(1L, std::min({TOGETHER, most, shared ? TOGETHER : parts}));
  if (shared)
    parallel(threads, call.batch * kernel.groups, [](void* p, int item) {
      const Call& call = *(const Call*)p;
      call.visit_group(item / call.kernel.groups, item % call.kernel.groups);
    }, &call);
  else
    parallel(threads, call.batch * kernel.heads * in_blocks(call.strips, call.together), [](void* p, int item) {
      const Call& call = *(const Call*)p;
      const int heads = call.batch * call.kernel.heads, at = item % heads;
      const int strip = (in_blocks(call.strips, call.together) - 1 - item / heads) * call.together;  // the longest first
      call.visit_keys(at / call.kernel.heads, at % call.kernel.heads, strip, std::min(call.together, call.strips - strip), nullptr);
    }, &call);
}

}  // namespace
