// Products of small matrices, memory of a thread, and work for the threads of XLA.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace {

struct Matrix {  // element (m, k) is at p[m·row + k·column]
  const float* p;
  long row, column;
};

// C[M, n·W] = A[M, K] B[K, n·W], plus C if `ADD`. All M·n vectors of the result are in registers.
template <int M, int n, bool ADD>
INLINE void block(int K, Matrix a, const float* b, long b_row, float* c, long c_row) {
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
void columns(int M, int K, Matrix a, const float* b, long b_row, float* c, long c_row) {
  int m = 0;
  auto at = [&](int m) { return Matrix{a.p + m * a.row, a.row, a.column}; };
  for (; m + ROWS <= M; m += ROWS) block<ROWS, n, ADD>(K, at(m), b, b_row, c + m * c_row, c_row);
  for (; m + 2 <= M; m += 2) block<2, n, ADD>(K, at(m), b, b_row, c + m * c_row, c_row);
  for (; m < M; m++) block<1, n, ADD>(K, at(m), b, b_row, c + m * c_row, c_row);
}

// C[M, N] = A[M, K] B[K, N], plus C if `ADD`; N is a multiple of W.
template <bool ADD>
void product(int M, int N, int K, Matrix a, const float* b, long b_row, float* c, long c_row) {
  int j = 0;
  for (; j + PANEL * W <= N; j += PANEL * W) columns<PANEL, ADD>(M, K, a, b + j, b_row, c + j, c_row);
  for (; j + 2 * W <= N; j += 2 * W) columns<2, ADD>(M, K, a, b + j, b_row, c + j, c_row);
  for (; j + W <= N; j += W) columns<1, ADD>(M, K, a, b + j, b_row, c + j, c_row);
}

// Copies x[count, K], with rows `row` apart, to panels [⌈count/64⌉, K, 64] that are filled up with zeros.
void transpose(const float* x, long row, int count, int K, float* panels) {
  for (int first = 0; first < count; first += TILE, panels += K * TILE)
    for (int c = 0; c < K; c++)
      for (int j = 0; j < TILE; j++) panels[c * TILE + j] = first + j < count ? x[(first + j) * row + c] : 0;
}

// Calls work(0 … count-1). The caller works too, and never waits for a thread that has not begun: no deadlock.
// If memory does not suffice, all items end, and then this function throws.
template <class Work>
void in_parallel(xla::ffi::ThreadPool pool, int count, Work work) {
  struct Progress {
    std::atomic<int> next{0}, finished{0};
    std::atomic<bool> failed{false};
  };
  auto progress = std::make_shared<Progress>();
  Work* shared = &work;  // a late thread finds no item left, and does not use it
  auto run = [progress, shared, count] {
    for (int i; (i = progress->next++) < count; progress->finished++) try {
        (*shared)(i);
      } catch (const std::bad_alloc&) {
        progress->failed = true;
      }
  };
  const int helpers = std::min<int64_t>(count, pool.num_threads()) - 1;
  for (int i = 0; i < helpers; i++) pool.Schedule([run] { run(); });
  run();
  for (int spins = 0; progress->finished.load() < count; spins++)
    if (spins < 1000) _mm_pause();
    else std::this_thread::yield();
  if (progress->failed) throw std::bad_alloc();
}

// Memory of a thread that lives from call to call. Contents are not kept.
template <int number>
float* scratch(size_t count) {
  static thread_local std::vector<float> memory;
  if (memory.size() < count) memory.resize(count);
  return memory.data();
}

}  // namespace
