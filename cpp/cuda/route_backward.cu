// One warp computes the gradient of the logits of a token. The scores are computed again; formulas are explained in
// cpp/kernels/routing/route.simd.cpp.
#include "cuda/scores.h"

namespace maxmoe::cuda {
namespace {

// Shared memory of a warp.
template <class T>
struct Token {
  T* scores;         // [E]
  T* selected;       // [K], scores of the experts, 0 for a slot without an expert
  T* grad;           // [K], gradient of the weights
  T* grad_selected;  // [K], gradient of the selected scores
  int* experts;      // [K]

  static size_t bytes(int64_t num_experts, int64_t top_k) {
    return padded_bytes(static_cast<size_t>(num_experts + 3 * top_k) * sizeof(T) +
                        static_cast<size_t>(top_k) * sizeof(int));
  }
  __device__ Token(unsigned char* memory, int64_t num_experts, int64_t top_k)
      : scores(reinterpret_cast<T*>(memory)),
        selected(scores + num_experts),
        grad(selected + top_k),
        grad_selected(grad + top_k),
        experts(reinterpret_cast<int*>(grad_selected + top_k)) {}
};

// Fills `selected`, `grad` and `experts`.
template <class T>
__device__ void read_slots(const RouteBackward<T>& a, int64_t token, const Token<T>& s) {
  for (int k = lane_index(); k < static_cast<int>(a.experts.columns); k += kWarp) {
    const int64_t expert = a.experts.row(token)[k];
    MAXMOE_DEVICE_CHECK(expert >= -1 && expert < a.logits.columns,
                        "maxmoe::route_backward: a value of experts is out of range (-1 or one of E experts)");
    s.experts[k] = static_cast<int>(expert);
    s.selected[k] = expert >= 0 ? s.scores[expert] : T(0);
    s.grad[k] = expert >= 0 ? a.grad_weights.row(token)[k] * static_cast<T>(a.rule.scale) : T(0);
  }
  __syncwarp();
}

// With w = s / total: ds = (dw - <dw, w>) / total. The gradient of the largest score is subtracted first.
template <class T>
__device__ void sum_backward(int top_k, const Token<T>& s) {
  T total = 0;
  int largest = 0;
  for (int k = 0; k < top_k; ++k) {
    total += s.selected[k];
    if (std::fabs(s.selected[k]) > std::fabs(s.selected[largest])) largest = k;
  }
  total += static_cast<T>(kSumEpsilon);
  const T common = s.grad[largest];
  T product = 0;
  for (int k = 0; k < top_k; ++k) product += (s.grad[k] - common) * s.selected[k];
  for (int k = lane_index(); k < top_k; k += kWarp) {
    s.grad_selected[k] =
        (s.grad[k] - common - product / total + common * (static_cast<T>(kSumEpsilon) / total)) / total;
  }
}

// With w = softmax(s): ds = w * (dw - <dw, w>).
template <class T>
__device__ void softmax_backward(int top_k, const Token<T>& s) {
  const SoftmaxTerms<T> terms = selected_softmax_terms<T>(top_k, [&](int k) { return s.selected[k]; }, s.experts);
  const auto softmax = [&](int k) {
    return s.experts[k] >= 0 ? std::exp(s.selected[k] - terms.largest) / terms.sum : T(0);
  };
  T product = 0;
  for (int k = 0; k < top_k; ++k) product += s.grad[k] * softmax(k);
  for (int k = lane_index(); k < top_k; k += kWarp) s.grad_selected[k] = softmax(k) * (s.grad[k] - product);
}

template <class T>
__device__ void normalize_backward(const RoutingRule& rule, int top_k, const Token<T>& s) {
  if (rule.normalization == Normalization::sum) sum_backward(top_k, s);
  if (rule.normalization == Normalization::softmax) softmax_backward(top_k, s);
  if (rule.normalization == Normalization::none) {
    for (int k = lane_index(); k < top_k; k += kWarp) s.grad_selected[k] = s.grad[k];
  }
  __syncwarp();
}

template <class T>
__device__ void write_gradient(const RouteBackward<T>& a, int64_t token, const SoftmaxTerms<T>& terms,
                               const Token<T>& s) {
  const ScoreFunction function = a.rule.score_function;
  const bool is_softmax = function == ScoreFunction::softmax;
  const int num_experts = static_cast<int>(a.logits.columns);
  const int top_k = static_cast<int>(a.experts.columns);
  const T* const logits = a.logits.row(token);
  const bool has_loss = a.grad_probabilities.rows > 0;
  const T* const grad = has_loss ? a.grad_probabilities.row(token) : nullptr;
  T through_probabilities = 0;
  for (int e = lane_index(); e < num_experts && has_loss; e += kWarp) {
    through_probabilities += grad[e] * probability(function, logits[e], s.scores[e], terms);
  }
  through_probabilities = warp_sum(through_probabilities);
  // In softmax every logit has a gradient through the sum of the exponentials.
  T through_selected = 0;
  for (int k = 0; k < top_k && is_softmax; ++k) {
    if (s.experts[k] >= 0) through_selected += s.grad_selected[k] * s.selected[k];
  }
  for (int e = lane_index(); e < num_experts; e += kWarp) {
    const T slope = is_softmax ? s.scores[e] : score_slope(function, logits[e], s.scores[e]);
    T sum = 0;
    if (has_loss) {
      const bool is_softmax_of_logits = is_softmax || function == ScoreFunction::identity;
      sum = (grad[e] - through_probabilities) *
            (is_softmax_of_logits ? probability(function, logits[e], s.scores[e], terms) : slope / terms.sum);
    }
    sum -= through_selected * s.scores[e];
    for (int k = 0; k < top_k; ++k) {
      if (s.experts[k] == e) sum += s.grad_selected[k] * slope;
    }
    a.grad_logits.row(token)[e] = sum;
  }
}

template <class T>
__global__ void route_tokens_backward(const RouteBackward<T> a, size_t bytes) {
  MAXMOE_SHARED_MEMORY(memory);
  const Token<T> s(memory + threadIdx.x / kWarp * bytes, a.logits.columns, a.experts.columns);
  for (int64_t token = first_item_of_warp(); token < a.logits.rows; token += items_of_all_warps()) {
    const SoftmaxTerms<T> terms =
        score_token(a.rule.score_function, a.logits.row(token), static_cast<int>(a.logits.columns), s.scores);
    read_slots(a, token, s);
    normalize_backward(a.rule, static_cast<int>(a.experts.columns), s);
    write_gradient(a, token, terms, s);
    __syncwarp();  // the next token overwrites the scores
  }
}

}  // namespace

template <class T>
void route_backward(const RouteBackward<T>& a, Stream stream) {
  if (a.logits.rows == 0 || a.logits.columns == 0) return;
  const size_t bytes = Token<T>::bytes(a.logits.columns, a.experts.columns);
  const int warps = warps_with("route_backward", bytes);
  launch("route_backward", route_tokens_backward<T>, grid_of(a.logits.rows, warps), warps * kWarp,
         bytes * static_cast<size_t>(warps), stream, a, bytes);
}

template void route_backward<float>(const RouteBackward<float>&, Stream);
template void route_backward<double>(const RouteBackward<double>&, Stream);

}  // namespace maxmoe::cuda
