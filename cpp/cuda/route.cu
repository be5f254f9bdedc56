// One warp routes a token. Its scores stay in shared memory from the logits to the weights.
#include "cuda/scores.h"

namespace maxmoe::cuda {
namespace {

// Shared memory of a warp.
template <class T>
struct Token {
  T* scores;        // [E]
  T* group_scores;  // [num_groups]
  T* is_open;       // [num_groups], whether the experts of a group are candidates
  int* chosen;      // [K]

  static size_t bytes(int64_t num_experts, int64_t num_groups, int64_t top_k) {
    return padded_bytes(static_cast<size_t>(num_experts + 2 * num_groups) * sizeof(T) +
                        static_cast<size_t>(top_k) * sizeof(int));
  }
  __device__ Token(unsigned char* memory, const Route<T>& a)
      : scores(reinterpret_cast<T*>(memory)),
        group_scores(scores + a.logits.columns),
        is_open(group_scores + a.rule.num_groups),
        chosen(reinterpret_cast<int*>(is_open + a.rule.num_groups)) {}
};

template <class T>
struct Candidate {
  T key;
  int index;  // -1: none
};

// Whether `a` comes before `b`: the larger key, and the lower index among equal keys.
template <class T>
__device__ bool comes_before(const Candidate<T>& a, const Candidate<T>& b) {
  if (a.index < 0 || b.index < 0) return a.index >= 0;
  return a.key > b.key || (a.key == b.key && a.index < b.index);
}

// The first candidate that comes after `last`, or the first of all if last.index is -1. Every lane gets it.
template <class T, class Key, class IsCandidate>
__device__ Candidate<T> next_largest(int count, const Candidate<T>& last, const Key& key,
                                     const IsCandidate& is_candidate) {
  Candidate<T> best{T(0), -1};
  for (int i = lane_index(); i < count; i += kWarp) {
    if (!is_candidate(i)) continue;
    const Candidate<T> candidate{key(i), i};
    if (last.index >= 0 && !comes_before(last, candidate)) continue;
    if (comes_before(candidate, best)) best = candidate;
  }
  MAXMOE_UNROLL
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    const Candidate<T> other{__shfl_xor_sync(kAllLanes, best.key, lanes),
                             __shfl_xor_sync(kAllLanes, best.index, lanes)};
    if (comes_before(other, best)) best = other;
  }
  return best;
}

// The largest biased score of a group, or the sum of its two largest.
template <class T, class Key>
__device__ T score_group(GroupScore group_score, int begin, int end, const Key& key) {
  T best = -std::numeric_limits<T>::infinity();
  T second = best;
  const auto add = [&](T value) {
    // The smaller one of the new score and the best so far may be the second best.
    const T smaller = value > best ? best : value;
    best = value > best ? value : best;
    second = smaller > second ? smaller : second;
  };
  for (int e = begin + lane_index(); e < end; e += kWarp) add(key(e));
  MAXMOE_UNROLL
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    const T other_best = __shfl_xor_sync(kAllLanes, best, lanes);
    const T other_second = __shfl_xor_sync(kAllLanes, second, lanes);
    add(other_best);
    second = other_second > second ? other_second : second;
  }
  return group_score == GroupScore::top2 && end - begin > 1 ? best + second : best;
}

template <class T, class Key>
__device__ void open_groups(const RoutingRule& rule, int num_experts, const Key& key, const Token<T>& s) {
  const int num_groups = static_cast<int>(rule.num_groups);
  const int group_size = num_experts / num_groups;
  for (int group = 0; group < num_groups; ++group) {
    const T score = score_group<T>(rule.group_score, group * group_size, (group + 1) * group_size, key);
    if (lane_index() != 0) continue;
    // Infinity minus infinity: the group comes last. A NaN would be in no order, and the groups to open would run out.
    s.group_scores[group] = score == score ? score : -std::numeric_limits<T>::infinity();
    s.is_open[group] = T(0);
  }
  __syncwarp();
  Candidate<T> last{T(0), -1};
  for (int i = 0; i < static_cast<int>(rule.top_k_groups); ++i) {
    last =
        next_largest<T>(num_groups, last, [&](int group) { return s.group_scores[group]; }, [](int) { return true; });
    if (lane_index() == 0) s.is_open[last.index] = T(1);
  }
  __syncwarp();
}

// Selects K experts. If there are groups, only the experts of the best groups are candidates.
template <class T, class Key>
__device__ void select_experts(const Route<T>& a, const Key& key, const Token<T>& s) {
  const int num_experts = static_cast<int>(a.logits.columns);
  const int num_groups = static_cast<int>(a.rule.num_groups);
  if (num_groups > 1) open_groups<T>(a.rule, num_experts, key, s);
  const int group_size = num_experts / num_groups;
  Candidate<T> last{T(0), -1};
  for (int k = 0; k < static_cast<int>(a.experts.columns); ++k) {
    last = next_largest<T>(num_experts, last, key,
                           [&](int e) { return num_groups == 1 || s.is_open[e / group_size] != T(0); });
    if (lane_index() == 0) s.chosen[k] = last.index;
  }
}

template <class T>
__device__ void write_weights(const Route<T>& a, int64_t token, const Token<T>& s) {
  const int top_k = static_cast<int>(a.experts.columns);
  const auto selected = [&](int k) { return s.chosen[k] >= 0 ? s.scores[s.chosen[k]] : T(0); };
  SoftmaxTerms<T> terms{T(0), T(0)};
  if (a.rule.normalization == Normalization::softmax) terms = selected_softmax_terms<T>(top_k, selected, s.chosen);
  if (a.rule.normalization == Normalization::sum) {
    for (int k = 0; k < top_k; ++k) terms.sum += selected(k);
    terms.sum += T(kSumEpsilon);
  }
  for (int k = lane_index(); k < top_k; k += kWarp) {
    T weight = selected(k);
    if (a.rule.normalization == Normalization::sum) weight /= terms.sum;
    if (a.rule.normalization == Normalization::softmax) {
      weight = s.chosen[k] >= 0 ? std::exp(weight - terms.largest) / terms.sum : T(0);
    }
    a.weights.row(token)[k] = weight * static_cast<T>(a.rule.scale);
    a.experts.row(token)[k] = s.chosen[k];
  }
}

template <class T>
__global__ void route_tokens(const Route<T> a, size_t bytes) {
  MAXMOE_SHARED_MEMORY(memory);
  const int num_experts = static_cast<int>(a.logits.columns);
  const int top_k = static_cast<int>(a.experts.columns);
  const Token<T> s(memory + threadIdx.x / kWarp * bytes, a);
  for (int64_t token = first_item_of_warp(); token < a.logits.rows; token += items_of_all_warps()) {
    const T* const logits = a.logits.row(token);
    const auto key = [&](int e) {
      return a.correction_bias == nullptr ? s.scores[e] : s.scores[e] + a.correction_bias[e];
    };
    const SoftmaxTerms<T> terms = score_token(a.rule.score_function, logits, num_experts, s.scores);
    bool is_nan = false;
    for (int e = lane_index(); e < num_experts; e += kWarp) {
      a.probabilities.row(token)[e] = probability(a.rule.score_function, logits[e], s.scores[e], terms);
      is_nan = is_nan || key(e) != key(e);
    }
    if (__ballot_sync(kAllLanes, is_nan) != 0) {
      for (int k = lane_index(); k < top_k; k += kWarp) {
        a.weights.row(token)[k] = T(0);
        a.experts.row(token)[k] = kNotANumber;
      }
      __syncwarp();
      continue;
    }
    if (a.given == nullptr) {
      select_experts(a, key, s);
    } else {
      for (int k = lane_index(); k < top_k; k += kWarp) {
        const int64_t expert = a.given[token * top_k + k];
        MAXMOE_DEVICE_CHECK(expert >= -1 && expert < num_experts,
                            "maxmoe::route: a value of experts is out of range (-1 or one of E)");
        s.chosen[k] = static_cast<int>(expert);
      }
    }
    __syncwarp();
    write_weights(a, token, s);
    __syncwarp();  // the next token overwrites the scores
  }
}

}  // namespace

template <class T>
void route(const Route<T>& a, Stream stream) {
  if (a.logits.rows == 0) return;
  const size_t bytes = Token<T>::bytes(a.logits.columns, a.rule.num_groups, a.experts.columns);
  const int warps = warps_with("route", bytes);
  launch("route", route_tokens<T>, grid_of(a.logits.rows, warps), warps * kWarp, bytes * static_cast<size_t>(warps),
         stream, a, bytes);
}

template void route<float>(const Route<float>&, Stream);
template void route<double>(const Route<double>&, Stream);

}  // namespace maxmoe::cuda
