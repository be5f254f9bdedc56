// Scores of the experts of a token, computed by one warp in shared memory.
#pragma once

#include "cuda/launch.h"

namespace maxmoe::cuda {

// The warps of a block that each have `bytes` of shared memory. Throws if one does not fit.
inline int warps_with(const char* op, size_t bytes) {
  if (bytes > kMaxSharedBytes) {
    throw std::runtime_error(std::string("maxmoe::") + op + ": too many experts for the shared memory of a device: " +
                             std::to_string(bytes) + " bytes for a token, at most " + std::to_string(kMaxSharedBytes));
  }
  return static_cast<int>(std::min<size_t>(4, kMaxSharedBytes / bytes));
}

inline size_t padded_bytes(size_t bytes) {
  return (bytes + 15) / 16 * 16;
}

// The exponentials of a row are divided by `sum`: exp(x - largest) / sum is its softmax.
template <class T>
struct SoftmaxTerms {
  T largest;
  T sum;
};

template <class T>
__device__ SoftmaxTerms<T> softmax_terms(const T* logits, int num_experts) {
  T largest = -std::numeric_limits<T>::infinity();
  for (int e = lane_index(); e < num_experts; e += kWarp) largest = std::fmax(largest, logits[e]);
  largest = warp_max(largest);
  T sum = 0;
  for (int e = lane_index(); e < num_experts; e += kWarp) sum += std::exp(logits[e] - largest);
  return {largest, warp_sum(sum)};
}

template <class T>
__device__ T sigmoid(T x) {
  return T(1) / (T(1) + std::exp(-x));
}

// No finite logit overflows: softplus is computed as max(x, 0) + log1p(exp(-|x|)). A NaN stays a NaN.
template <class T>
__device__ T elementwise_score(ScoreFunction function, T x) {
  if (function == ScoreFunction::sigmoid) return sigmoid(x);
  if (function == ScoreFunction::identity) return x;
  return std::sqrt((x < T(0) ? T(0) : x) + std::log1p(std::exp(-std::fabs(x))));
}

// Derivative of an elementwise score with respect to its logit; 0 where sqrtsoftplus underflows to 0.
template <class T>
__device__ T score_slope(ScoreFunction function, T logit, T score) {
  if (function == ScoreFunction::sigmoid) return score * (T(1) - score);
  if (function == ScoreFunction::identity) return T(1);
  return score > T(0) ? sigmoid(logit) / (T(2) * score) : T(0);
}

// Writes the scores to shared memory, which all lanes can read afterwards, and returns the numbers from which the
// probabilities are computed: for softmax and identity, the terms of the softmax of the logits; for the others, the sum
// of the scores.
template <class T>
__device__ SoftmaxTerms<T> score_token(ScoreFunction function, const T* logits, int num_experts, T* scores) {
  SoftmaxTerms<T> terms{T(0), T(0)};
  const bool is_softmax = function == ScoreFunction::softmax;
  if (is_softmax || function == ScoreFunction::identity) terms = softmax_terms(logits, num_experts);
  T sum = 0;
  for (int e = lane_index(); e < num_experts; e += kWarp) {
    scores[e] = is_softmax ? std::exp(logits[e] - terms.largest) / terms.sum : elementwise_score(function, logits[e]);
    sum += scores[e];
  }
  sum = warp_sum(sum);
  __syncwarp();
  return is_softmax || function == ScoreFunction::identity ? terms : SoftmaxTerms<T>{T(0), sum + T(kSumEpsilon)};
}

// The probability of an expert: its score divided by the sum of all scores, for identity the softmax of the logits.
template <class T>
__device__ T probability(ScoreFunction function, T logit, T score, const SoftmaxTerms<T>& terms) {
  if (function == ScoreFunction::softmax) return score;
  if (function == ScoreFunction::identity) return std::exp(logit - terms.largest) / terms.sum;
  return score / terms.sum;
}

// Terms of the softmax of the selected scores; slots without an expert are left out. All lanes compute the same.
template <class T, class Selected>
__device__ SoftmaxTerms<T> selected_softmax_terms(int top_k, const Selected& selected, const int* experts) {
  T largest = -std::numeric_limits<T>::infinity();
  for (int k = 0; k < top_k; ++k) {
    if (experts[k] >= 0) largest = std::fmax(largest, selected(k));
  }
  T sum = 0;
  for (int k = 0; k < top_k; ++k) {
    if (experts[k] >= 0) sum += std::exp(selected(k) - largest);
  }
  return {largest, sum};
}

}  // namespace maxmoe::cuda
