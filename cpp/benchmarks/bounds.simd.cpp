#include "bounds.h"

#include "kernels/isa/vector.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

// The compiler must assume that the vector is read and changed here, so that it neither drops nor hoists computations.
template <class Vector>
MAXMOE_INLINE void consume(Vector& vector) {
  asm volatile("" : "+m"(vector) : : "memory");
}

// Number of independent accumulators. A multiply-add takes 4 or 5 cycles and two begin in each cycle, so that 10
// accumulators keep both units busy. A micro-kernel has the same number of accumulators, which stay in registers.
// The loop is unrolled so that its own cost is negligible.
constexpr int kSums = kVectorRegisters == 32 ? 24 : 12;
constexpr int kUnroll = 4;

// Calls step(sum) `steps` times in total. A step is one multiply-add of kLanes<S> numbers, or of kLanes<S> pairs.
template <class S, class Step>
MAXMOE_INLINE void run_steps(int64_t steps, const Step& step) {
  Vector<S> sums[kSums] = {};
  for (Vector<S>& sum : sums) consume(sum);  // otherwise the compiler can prove that all are equal
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
    Vector<BFloat16Pair> vector = Vector<BFloat16Pair>{} + 0x3f803f80U;  // (1, 1)
    consume(vector);
    run_steps<S>(a.multiply_adds / (2 * kLanes<S>),
                 [&](Vector<S> sum) { return multiply_add(sum, BFloat16Pair{0x3f803f80U}, vector); });
    return;
  }
#endif
  Vector<S> one = Vector<S>{} + S(1);
  consume(one);
  // The accumulator is a factor: a product of constants would be hoisted out of the loop.
  run_steps<S>(a.multiply_adds / kLanes<S>, [&](Vector<S> sum) { return multiply_add(one, S(0.5), sum); });
}

template <class Word>
void sequential_read(const SequentialRead<Word>& a, const Executor& executor) {
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
template void sequential_read<uint32_t>(const SequentialRead<uint32_t>&, const Executor&);

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
