#include "bounds.h"

#include "kernels/vector.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

// The compiler must take the vector for used, and for changed.
template <class Vector>
MAXMOE_INLINE void consume(Vector& vector) {
  asm volatile("" : "+m"(vector) : : "memory");
}

// Steps of a loop that counts for nothing beside them, each on all sums: enough to fill the pipelines of the units
// (a multiply-add of four or five cycles on two units), and few enough to stay in registers.
constexpr int kSums = kVectorRegisters == 32 ? 24 : 12;
constexpr int kUnroll = 4;

// A step multiplies and adds kLanes<S> numbers, or as many pairs.
template <class S, class Step>
MAXMOE_INLINE void run_steps(int64_t steps, const Step& step) {
  Vector<S> sums[kSums] = {};
  for (Vector<S>& sum : sums) consume(sum);  // or else all are known to be equal
  for (int64_t i = 0; i < steps; i += int64_t{kSums} * kUnroll) {
#pragma GCC unroll 4
    for (int u = 0; u < kUnroll; ++u) {
#pragma GCC unroll 24
      for (int s = 0; s < kSums; ++s) sums[s] = step(sums[s]);
    }
  }
  for (Vector<S>& sum : sums) consume(sum);
}

}  // namespace

template <class T>
void peak_multiply_adds(const PeakMultiplyAdds<T>& a, const Executor& /*executor*/) {
  using S = Accumulator<T>;
#ifdef __AVX512BF16__
  if constexpr (std::is_same_v<T, BFloat16>) {
    Vector<Pair> vector = Vector<Pair>{} + 0x3f803f80U;  // (1, 1)
    consume(vector);
    run_steps<S>(a.multiply_adds / (2 * kLanes<S>),
                 [&](Vector<S> sum) { return multiply_add(sum, Pair{0x3f803f80U}, vector); });
    return;
  }
#endif
  Vector<S> one = Vector<S>{} + S(1);
  consume(one);
  // The sum is a factor: a product of constants would be moved out of the loop.
  run_steps<S>(a.multiply_adds / kLanes<S>, [&](Vector<S> sum) { return multiply_add(one, S(0.5), sum); });
}

template <class Word>
void streaming_read(const StreamingRead<Word>& a, const Executor& executor) {
  constexpr int kSumsOfWords = 4;
  constexpr int64_t kWordsPerTask = 1 << 16;
  run_ranges(executor, a.count, kWordsPerTask, [&](int64_t begin, int64_t end) {
    Vector<Word> sums[kSumsOfWords] = {};
    for (; begin + kSumsOfWords * kLanes<Word> <= end; begin += kSumsOfWords * kLanes<Word>) {
      for (int s = 0; s < kSumsOfWords; ++s) sums[s] += load_vector(a.data + begin + s * kLanes<Word>);
    }
    for (; begin < end; ++begin) sums[0] += a.data[begin];
    for (Vector<Word>& sum : sums) consume(sum);
  });
}

MAXMOE_INSTANTIATE(peak_multiply_adds, PeakMultiplyAdds)
template void streaming_read<uint32_t>(const StreamingRead<uint32_t>&, const Executor&);

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
