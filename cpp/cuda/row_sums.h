// Sums of rows, each times a weight.
#pragma once

#include "cuda/launch.h"

namespace maxmoe::cuda {

// A row of a sum; null: it is left out.
template <class T>
struct Term {
  const T* row;
  Accumulator<T> weight;
};

// sums += the terms [begin, end), in order. term(j, index(j)) is a term at the columns of this thread. A thread reads
// the indices of kAhead terms, then their rows, then adds: one row at a time, 16 KB would be on their way to a
// multiprocessor, and a device needs about 32 KB.
template <class T, int kAhead = 4, int kWidth, class Index, class GetTerm>
__device__ void add_terms(Accumulator<T> (&sums)[kWidth], int64_t begin, int64_t end, const Index& index,
                          const GetTerm& term) {
  for (int64_t first = begin; first < end; first += kAhead) {
    int64_t indices[kAhead];
    Term<T> terms[kAhead];
    T values[kAhead][kWidth];
    MAXMOE_UNROLL
    for (int i = 0; i < kAhead; ++i) indices[i] = first + i < end ? index(first + i) : -1;
    MAXMOE_UNROLL
    for (int i = 0; i < kAhead; ++i) terms[i] = first + i < end ? term(first + i, indices[i]) : Term<T>{};
    MAXMOE_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      if (terms[i].row != nullptr) load(terms[i].row, values[i]);
    }
    MAXMOE_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      if (terms[i].row == nullptr) continue;
      MAXMOE_UNROLL
      for (int v = 0; v < kWidth; ++v) sums[v] += terms[i].weight * to_wide(values[i][v]);
    }
  }
}

// Writes the sums, rounded once.
template <class T, int kWidth>
__device__ void store_sums(T* to, const Accumulator<T> (&sums)[kWidth]) {
  T values[kWidth];
  MAXMOE_UNROLL
  for (int v = 0; v < kWidth; ++v) values[v] = to_narrow<T>(sums[v]);
  store(to, values);
}

}  // namespace maxmoe::cuda
