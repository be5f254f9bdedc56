// Contenders of a benchmark: the kernel and its upper bounds.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "bounds.h"
#include "harness.h"
#include "inputs.h"
#include "kernels/experts/group_tiles.h"
#include "kernels/product/tiled/tile_gemm.h"

namespace maxmoe::benchmarks {

// The kernel under test.
template <class Call>
Contender kernel(Call call) {
  return {"maxmoe", call};
}

template <class T>
Contender multiply_add_bound(int64_t multiply_adds) {
  return {"bound: multiply-adds", [=] { peak_multiply_adds(PeakMultiplyAdds<T>{multiply_adds}, SerialExecutor()); }};
}

// `count` dense products [R, D] [D, F], divided into tiles of rows like grouped products.
template <class T>
class DenseProducts {
 public:
  DenseProducts(int64_t count, int64_t num_rows, int64_t hidden_size, int64_t intermediate_size)
      : count_(count),
        lhs_(num_rows, hidden_size),
        rhs_(hidden_size, intermediate_size),
        out_(count * num_rows, intermediate_size) {}

  Contender bound(const ThreadPool& threads) const {
    return {"bound: " + (count_ > 1 ? std::to_string(count_) + " " : "") + "dense tile_gemm", [this, &threads] {
              const int64_t num_rows = lhs_.read().rows;
              const int64_t height = tile_rows(count_ * num_rows, lhs_.read().columns, threads.num_threads());
              const int64_t tiles = (num_rows + height - 1) / height;
              run_ranges(threads, count_ * tiles, 1, [&](int64_t index, int64_t) {
                const int64_t begin = index % tiles * height;
                const int64_t end = std::min(begin + height, num_rows);
                const int64_t first_row = index / tiles * num_rows;  // first row of this product in out
                gemm_.multiply(lhs_.read().row_range(begin, end),
                               {rhs_.read(), out_.view().row_range(first_row + begin, first_row + end), false});
              });
            }};
  }

 private:
  int64_t count_;
  Table<T> lhs_;
  Table<T> rhs_;
  Table<T> out_;
  KernelGemm<T> gemm_;
};

template <class T>
Contender read_bound(const ThreadPool& threads, const T* data, size_t bytes) {
  const SequentialRead<uint32_t> read{reinterpret_cast<const uint32_t*>(data),
                                      static_cast<int64_t>(bytes / sizeof(uint32_t))};
  return {"bound: read", [read, &threads] { sequential_read(read, threads); }};
}

// Reads one table and writes another one, once and in order: a memcpy of the size of the smaller table, and a read or a
// memset of the rest of the larger one. Index and weights, some hundredths of the bytes of a row, are not counted.
template <class T>
Contender read_write_bound(const ThreadPool& threads, const Table<T>& source, const Table<T>& target) {
  const auto read_write = [&threads, &source, &target] {
    const auto* from = reinterpret_cast<const std::byte*>(source.data());
    auto* to = reinterpret_cast<std::byte*>(target.data());
    const size_t copied = std::min(source.bytes(), target.bytes());
    // One piece per thread, but no piece that takes less time than waking a thread.
    const auto share = [&](size_t bytes, const auto& body) {
      const auto count = static_cast<int64_t>(bytes);
      const int64_t grain = std::max<int64_t>(count / threads.num_threads() + 1, 1 << 16);
      run_ranges(threads, count, grain, [&](int64_t begin, int64_t end) {
        body(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
      });
    };
    share(copied, [&](size_t begin, size_t size) { std::memcpy(to + begin, from + begin, size); });
    share(target.bytes() - copied, [&](size_t begin, size_t size) { std::memset(to + copied + begin, 0, size); });
    read_bound(threads, from + copied, source.bytes() - copied).call();
  };
  return {source.bytes() == target.bytes()  ? "bound: memcpy"
          : source.bytes() > target.bytes() ? "bound: memcpy and read"
                                            : "bound: memcpy and memset",
          read_write};
}

}  // namespace maxmoe::benchmarks
