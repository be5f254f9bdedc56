// Routings of tokens to experts for tests. Their plans are computed by plain loops.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "random.h"

namespace maxmoe {

struct Routing {
  int64_t num_tokens;
  int64_t top_k;
  int64_t num_experts;
  std::vector<int64_t> experts;      // [T * K], -1 for a slot that is not routed
  std::vector<int64_t> slots;        // [R], ordered by expert, then slot
  std::vector<int64_t> rows;         // [T * K], row of each slot or -1
  std::vector<int64_t> group_sizes;  // [E]

  int64_t num_rows() const { return static_cast<int64_t>(slots.size()); }
};

inline Routing plan_routing(int64_t num_tokens, int64_t top_k, int64_t num_experts, std::vector<int64_t> experts) {
  Routing routing{num_tokens, top_k, num_experts, std::move(experts), {}, {}, {}};
  routing.rows.assign(static_cast<size_t>(num_tokens * top_k), -1);
  routing.group_sizes.assign(static_cast<size_t>(num_experts), 0);
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    for (size_t slot = 0; slot < routing.experts.size(); ++slot) {
      if (routing.experts[slot] != expert) continue;
      routing.rows[slot] = routing.num_rows();
      routing.slots.push_back(static_cast<int64_t>(slot));
      ++routing.group_sizes[static_cast<size_t>(expert)];
    }
  }
  return routing;
}

// Routes every token to `top_k` different experts, more often to low ids. One slot in eight is not routed.
inline Routing random_routing(int64_t num_tokens, int64_t top_k, int64_t num_experts, unsigned seed) {
  Random random(seed);
  std::vector<int64_t> experts;
  std::vector<int64_t> all(static_cast<size_t>(num_experts));
  for (int64_t token = 0; token < num_tokens; ++token) {
    std::iota(all.begin(), all.end(), 0);
    for (int64_t k = 0; k < top_k; ++k) {
      const auto left = all.size() - static_cast<size_t>(k);
      const auto pick = k + static_cast<int64_t>(std::min(random.below(left), random.below(left)));
      std::swap(all[static_cast<size_t>(k)], all[static_cast<size_t>(pick)]);
      experts.push_back(random.below(8) == 0 ? -1 : all[static_cast<size_t>(k)]);
    }
  }
  return plan_routing(num_tokens, top_k, num_experts, std::move(experts));
}

inline Routing all_to_one_routing(int64_t num_tokens, int64_t num_experts, int64_t expert) {
  return plan_routing(num_tokens, 1, num_experts, std::vector<int64_t>(static_cast<size_t>(num_tokens), expert));
}

}  // namespace maxmoe
