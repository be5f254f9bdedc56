// Shapes, matrices and routings that the benchmarks share.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/matrix/dtype.h"
#include "kernels/matrix/matrix_view.h"
#include "kernels/routing/ragged_plan.h"

namespace maxmoe::benchmarks {

struct ExpertsShape {
  int64_t num_tokens;         // T
  int64_t hidden_size;        // D
  int64_t intermediate_size;  // F
  int64_t num_experts;        // E
  int64_t top_k;              // K
};

// A few large experts; many small experts; many small experts with a small batch, and with the tokens of a decoding
// step.
inline constexpr ExpertsShape kExpertsShapes[] = {
    {2048, 512, 1024, 8, 2}, {2048, 512, 192, 64, 8}, {128, 512, 192, 64, 8}, {16, 512, 192, 64, 8}};

// R rows of D elements, kTopK rows per token. With 1001 columns, rows begin anywhere in a cache line. 128 rows are a
// decoding step.
struct RowsShape {
  int64_t num_rows;
  int64_t hidden_size;
};
inline constexpr RowsShape kRowsShapes[] = {{16384, 512}, {16384, 1001}, {16384, 7168}, {128, 512}};
inline constexpr int64_t kTopK = 8;

inline std::string text(std::initializer_list<std::pair<char, int64_t>> sizes) {
  std::string text;
  for (const auto& [letter, size] : sizes) {
    if (!text.empty()) text += ", ";
    (text += letter) += ' ';
    text += std::to_string(size);
  }
  return text;
}
inline std::string text(const ExpertsShape& s) {
  return text(
      {{'T', s.num_tokens}, {'D', s.hidden_size}, {'F', s.intermediate_size}, {'E', s.num_experts}, {'K', s.top_k}});
}
inline std::string text(const RowsShape& s) {
  return text({{'R', s.num_rows}, {'D', s.hidden_size}});
}

// A matrix of numbers in [-0.5, 0.5): 4099 random numbers, repeated. Filling it touches every page, so that page faults
// are not timed.
template <class T>
class Table {
 public:
  Table(int64_t rows, int64_t columns)
      : rows_(rows), columns_(columns), values_(static_cast<T*>(::operator new(bytes(), kAlignment))) {
    std::mt19937 generator(0);
    std::uniform_real_distribution<double> uniform(-0.5, 0.5);
    const int64_t count = rows * columns;
    const int64_t num_random = std::min<int64_t>(count, 4099);  // a prime: no row equals the next
    for (int64_t i = 0; i < num_random; ++i) data()[i] = narrow<T>(static_cast<Accumulator<T>>(uniform(generator)));
    for (int64_t i = num_random; i < count; ++i) data()[i] = data()[i - num_random];
  }

  size_t bytes() const { return static_cast<size_t>(rows_ * columns_) * sizeof(T); }
  T* data() const { return values_.get(); }
  MatrixView<T> view() const { return {data(), rows_, columns_, columns_}; }
  ConstMatrixView<T> read() const { return view().as_const(); }

  // Stack of `count` matrices, stored one below the other.
  MatrixStack<T> stack(int64_t count) const {
    return {view().row_range(0, rows_ / count), count, rows_ / count * columns_};
  }
  ConstMatrixStack<T> read_stack(int64_t count) const {
    return {read().row_range(0, rows_ / count), count, rows_ / count * columns_};
  }

 private:
  static constexpr std::align_val_t kAlignment{64};  // like tensors of torch
  struct Delete {
    void operator()(T* values) const { ::operator delete(values, kAlignment); }
  };

  int64_t rows_;
  int64_t columns_;
  std::unique_ptr<T, Delete> values_;
};

// The numbers from 0 to count - 1 in random order.
inline std::vector<int64_t> permutation(int64_t count) {
  std::vector<int64_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(0));
  return order;
}

// Routes every token to top_k different experts, more often to low ids, because the load of real routers is skewed.
inline std::vector<int64_t> skewed_experts(int64_t num_tokens, int64_t num_experts, int64_t top_k) {
  std::mt19937 generator(0);
  std::vector<int64_t> experts;
  std::vector<int64_t> all(static_cast<size_t>(num_experts));
  for (int64_t token = 0; token < num_tokens; ++token) {
    std::iota(all.begin(), all.end(), 0);
    for (size_t k = 0; k < static_cast<size_t>(top_k); ++k) {
      const size_t left = all.size() - k;
      std::swap(all[k], all[k + std::min(generator() % left, generator() % left)]);
      experts.push_back(all[k]);
    }
  }
  return experts;
}

// The results of ragged_plan, with their memory.
struct Plan {
  Plan(std::vector<int64_t> experts_of_slots, int64_t num_experts)
      : experts(std::move(experts_of_slots)),
        group_sizes(static_cast<size_t>(num_experts)),
        slots(experts.size()),
        rows(experts.size()) {
    compute(SerialExecutor());
  }
  Plan(int64_t num_tokens, int64_t num_experts, int64_t top_k)
      : Plan(skewed_experts(num_tokens, num_experts, top_k), num_experts) {}

  int64_t num_rows() const { return static_cast<int64_t>(slots.size()); }

  void compute(const Executor& executor) {
    RaggedPlan<int64_t> plan{.experts = experts.data(),
                             .num_slots = num_rows(),
                             .first_expert = 0,
                             .num_local_experts = static_cast<int64_t>(group_sizes.size()),
                             .max_rows = -1,
                             .group_sizes = group_sizes.data(),
                             .dropped = &dropped,
                             .slots = nullptr,
                             .rows = nullptr};
    ragged_plan(plan, executor);
    plan.slots = slots.data();
    plan.rows = rows.data();
    ragged_plan(plan, executor);
  }

  std::vector<int64_t> experts;
  std::vector<int64_t> group_sizes;
  std::vector<int64_t> slots;
  std::vector<int64_t> rows;
  int64_t dropped = 0;
};

}  // namespace maxmoe::benchmarks
