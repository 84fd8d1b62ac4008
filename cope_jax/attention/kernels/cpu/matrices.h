// Products of small matrices.
#pragma once

#include "vectors.h"

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

}  // namespace
