// The product as a loop nest around a micro-kernel, in the words of BLIS (Van Zee and van de Geijn, 2015). Its loops,
// outermost first:
//
//   ic  blocks of MC rows of A and C                        multiply
//   pc  blocks of KC of the inner dimension: packs A        multiply_row_block, multiply_block
//   jc  blocks of NC columns of B and C: packs B            multiply_packed_b
//   jr  micro-panels of B, of NR columns                    multiply_packed_b
//   ir  micro-tiles of C, of MR rows                        multiply_micro_panel
//   k   steps of the inner dimension                        micro_kernel
//
// A micro-tile of C stays in registers during k, a micro-panel of B in the first- or second-level cache during ir, and
// the block of A in the second- or third-level cache during jc. Unlike in BLIS, jc is not outermost: callers cut C into
// blocks of rows, which run on different threads and pack B each for itself. NC then only bounds how much of B is
// packed at a time.
//
// With few rows of A each element of packed B is used so rarely that packing costs more than it saves. Then B is read
// in place:
//
//   B row-major, up to MR rows of A                         multiply_few_rows (few_rows.h)
//   B row-major, a few more rows, nothing to convert        multiply_unpacked_b
//   B transposed                                            multiply_transposed, which computes C^T = B^T * A^T
//
// With AVX512-BF16 packed blocks of bfloat16 matrices hold BFloat16Pairs, and a step is two elements of the inner
// dimension.
#include "tile_gemm.h"

#include "few_rows.h"
#include "micro_kernel.h"
#include "pack.h"
#include "row.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

// The inner dimension in a block. In float32 a micro-panel of B (KC x NR) takes 128 KiB (AVX2) or 256 KiB (AVX-512),
// and a block of A (MC x KC) 2 MiB: more than many second-level caches, but reading it from the third costs no time.
// The next block continues the sums in the accumulator's type, so that KC does not change the bits of a result.
constexpr int64_t kKC = 2048;

static_assert(kMC % kMR == 0, "a block of MC rows has full micro-tiles only");
static_assert(kKC % 2 == 0, "blocks end between pairs");

// MAXMOE_BFLOAT16_PAIRS: pairs in plain arithmetic, for tests on processors without the instruction.
#if defined(__AVX512BF16__) || defined(MAXMOE_BFLOAT16_PAIRS)
constexpr bool kMultipliesPairs = true;
#else
constexpr bool kMultipliesPairs = false;
#endif

// Rows of A up to which a row-major B is not packed: three micro-tiles. Measured with AVX2 in float32: 0.8 of the time
// of packing B for 8 to 16 rows, up to 1.6 times that time for 32 rows and more.
constexpr int64_t kMaxRowsUnpackedB = 3 * int64_t{kMR};

// Rows of A for which the transposed product is faster than packing a transposed B (measured). If elements have to be
// converted, those of B are so each time that they are read: rows of A must fill at least half of a micro-panel, and no
// more than one.
template <class S>
constexpr int64_t kMaxRowsTransposed = 2 * int64_t{kNR<S>};
template <class S>
constexpr int64_t kMinRowsTransposedConverted = kNR<S> / 2;
template <class S>
constexpr int64_t kMaxRowsTransposedConverted = kNR<S>;

// Rows of B^T that the transposed product prefetches while it computes a micro-tile: about as many as the next one has
// (MR is 6 or 12), and a power of two.
constexpr int64_t kPrefetchedRows = 8;

// The NR columns of B that a micro-kernel reads: a packed micro-panel, or in place.
template <class Element>
struct BColumns {
  const Element* data;
  int64_t row_stride;
};

// c = or += a * b for at most NR columns: the loop ir. A micro-tile that is not full, or whose columns are not
// neighbours in memory, is computed in a buffer and copied.
template <ALayout kALayout, class Element, class S, class Prefetch>
void multiply_micro_panel(ABlock<Element> a, BColumns<Element> b, int64_t num_steps, MatrixView<S> c, bool accumulate,
                          const Prefetch& prefetch) {
  const bool is_full = c.columns == kNR<S> && c.column_stride == 1;
  for (int64_t ir = 0; ir < c.rows; ir += kMR) {
    const MatrixView<S> c_rows = c.row_range(ir, at_most(c.rows, ir + kMR));
    const auto kernel = micro_kernel_of_rows<S, Element, Prefetch, kALayout>(c_rows.rows);
    const Element* a_rows = a.data + ir * (kALayout == ALayout::rows ? a.row_stride : num_steps);
    if (is_full) {
      kernel(a_rows, a.row_stride, b.data, b.row_stride, num_steps, c_rows.data, c_rows.row_stride, accumulate,
             prefetch);
      continue;
    }
    alignas(kVectorBytes) S tile[kMR * kNR<S>] = {};
    const auto for_elements = [&](const auto& copy) {
      for (int64_t r = 0; r < c_rows.rows; ++r) {
        for (int64_t j = 0; j < c_rows.columns; ++j) {
          copy(tile[r * kNR<S> + j], c_rows.row(r)[j * c_rows.column_stride]);
        }
      }
    };
    if (accumulate) for_elements([](S& in_tile, S in_c) { in_tile = in_c; });
    kernel(a_rows, a.row_stride, b.data, b.row_stride, num_steps, tile, kNR<S>, accumulate, prefetch);
    for_elements([](S in_tile, S& in_c) { in_c = in_tile; });
  }
}

// c = or += a * b for a block of A: the loops jc and jr.
template <class Element, class T>
void multiply_packed_b(ABlock<Element> a, ConstMatrixView<T> b, MatrixView<Accumulator<T>> c, bool accumulate) {
  using S = Accumulator<T>;
  const int64_t num_steps = steps_of_depth<Element>(b.rows);
  const auto multiply = a.layout == ALayout::rows ? multiply_micro_panel<ALayout::rows, Element, S, NoPrefetch>
                                                  : multiply_micro_panel<ALayout::micro_panels, Element, S, NoPrefetch>;
  for (int64_t jc = 0; jc < b.columns; jc += kNC<S>) {
    const int64_t jc_end = at_most(b.columns, jc + kNC<S>);
    const Element* panel = pack_b<Element>(b.column_range(jc, jc_end));
    for (int64_t jr = jc; jr < jc_end; jr += kNR<S>, panel += num_steps * kNR<S>) {
      const MatrixView<S> c_columns = c.column_range(jr, at_most(jc_end, jr + kNR<S>));
      multiply(a, {panel, kNR<S>}, num_steps, c_columns, accumulate, NoPrefetch());
    }
  }
}

// B must be aligned, and its rows whole vectors apart: then no vector load crosses a cache line.
template <class T>
bool is_faster_unpacked(ConstMatrixView<T> a, ConstMatrixView<T> b) {
  const auto is_aligned = [](int64_t address) { return address % kVectorBytes == 0; };
  return a.column_stride == 1 && b.column_stride == 1 && a.rows <= kMaxRowsUnpackedB &&
         is_aligned(reinterpret_cast<intptr_t>(b.data)) && is_aligned(b.row_stride * int64_t{sizeof(T)});
}

// c = or += a * b for the columns that fill micro-tiles, with B read in place; returns how many these are. At step k
// the micro-kernel prefetches row k of the next micro-panel: its rows are a stride apart,
// which for large matrices is more than a page, where hardware prefetchers stop.
template <class T>
int64_t multiply_unpacked_b(ABlock<T> a, ConstMatrixView<T> b, MatrixView<T> c, bool accumulate) {
  int64_t jr = 0;
  for (; jr + kNR<T> <= b.columns; jr += kNR<T>) {
    const T* columns = b.data + jr;
    const PrefetchRows next_panel(columns + kNR<T>, b.row_stride, /*num_rows=*/b.rows);
    multiply_micro_panel<ALayout::rows>(a, {columns, b.row_stride}, b.rows, c.column_range(jr, jr + kNR<T>), accumulate,
                                        next_panel);
  }
  return jr;
}

template <class Element, class T>
bool is_faster_transposed(ConstMatrixView<T> a, ConstMatrixView<T> b) {
  using S = Accumulator<T>;
  const bool is_few_rows = std::is_same_v<Element, T>
                               ? a.rows <= kMaxRowsTransposed<S>
                               : kMinRowsTransposedConverted<S> <= a.rows && a.rows <= kMaxRowsTransposedConverted<S>;
  return is_few_rows && a.column_stride == 1 && b.column_stride != 1;
}

// c = or += a * b for a transposed B, as C^T = or += B^T * A^T: B^T is row-major, and read in
// place (or converted MR rows at a time), and A^T, of few columns, is packed.
template <class Element, class T>
void multiply_transposed(ConstMatrixView<T> a, ConstMatrixView<T> b, MatrixView<Accumulator<T>> c, bool accumulate) {
  using S = Accumulator<T>;
  const ConstMatrixView<T> left = b.transposed();
  const int64_t num_steps = steps_of_depth<Element>(left.columns);
  const Element* const panels = pack_b<Element>(a.transposed());
  for (int64_t ir = 0; ir < left.rows; ir += kMR) {
    const int64_t ir_end = at_most(left.rows, ir + kMR);
    const ABlock<Element> block = pack_a<Element>(left.row_range(ir, ir_end));
    const PrefetchRows next_rows(left.row(ir + kMR), left.row_stride, kPrefetchedRows);
    for (int64_t jr = 0; jr < c.rows; jr += kNR<S>) {
      const MatrixView<S> c_tile = c.row_range(jr, at_most(c.rows, jr + kNR<S>)).column_range(ir, ir_end);
      multiply_micro_panel<ALayout::rows>(block, {panels + jr * num_steps, kNR<S>}, num_steps, c_tile.transposed(),
                                          accumulate, next_rows);
    }
  }
}

// c = or += a * b for a block of at most MC rows and KC of the inner dimension: chooses what is packed.
template <class T>
void multiply_block(ConstMatrixView<T> a, ConstMatrixView<T> b, MatrixView<Accumulator<T>> c, bool accumulate) {
  using Element = std::conditional_t<kMultipliesPairs && std::is_same_v<T, BFloat16>, BFloat16Pair, Accumulator<T>>;
  if (is_faster_transposed<Element>(a, b)) return multiply_transposed<Element>(a, b, c, accumulate);
  const ABlock<Element> block = pack_a<Element>(a);
  int64_t done = 0;
  if constexpr (std::is_same_v<Element, T>) {
    if (is_faster_unpacked(a, b)) done = multiply_unpacked_b(block, b, c, accumulate);
  }
  multiply_packed_b(block, b.column_range(done, b.columns), c.column_range(done, b.columns), accumulate);
}

// c = or += a * b for at most MC rows: the loop pc. It runs once even if the inner dimension is 0: c must become 0.
template <class T>
void multiply_row_block(ConstMatrixView<T> a, ConstMatrixView<T> b, MatrixView<Accumulator<T>> c, bool accumulate) {
  for (int64_t pc = 0; pc < a.columns || pc == 0; pc += kKC) {
    const int64_t pc_end = at_most(a.columns, pc + kKC);
    multiply_block(a.column_range(pc, pc_end), b.row_range(pc, pc_end), c, accumulate || pc > 0);
  }
}

// The loop ic. C of 16-bit types is summed in a buffer of the accumulator's type, so that it is rounded once, after all
// blocks of the inner dimension.
template <class T>
void multiply(ConstMatrixView<T> a, ConstMatrixView<T> b, MatrixView<T> c, bool accumulate) {
  using S = Accumulator<T>;
  for (int64_t ic = 0; ic < c.rows; ic += kMC) {
    const int64_t ic_end = at_most(c.rows, ic + kMC);
    const ConstMatrixView<T> a_rows = a.row_range(ic, ic_end);
    const MatrixView<T> c_rows = c.row_range(ic, ic_end);
    if constexpr (std::is_same_v<T, S>) {
      multiply_row_block(a_rows, b, c_rows, accumulate);
    } else {
      const MatrixView<S> wide_c{scratch<S>(kWideCScratch, c_rows.rows * c.columns), c_rows.rows, c.columns, c.columns};
      for (int64_t r = 0; r < c_rows.rows && accumulate; ++r) widen_row(c_rows.row(r), wide_c.row(r), c.columns);
      multiply_row_block(a_rows, b, wide_c, accumulate);
      for (int64_t r = 0; r < c_rows.rows; ++r) narrow_row<T>(wide_c.row(r), c_rows.row(r), c.columns);
    }
  }
}

// How many of the first columns multiply_few_rows takes: those that fill its vectors.
template <class T>
int64_t few_rows_columns(const TileGemm<T>& p) {
  const bool is_few_rows = 0 < p.a.rows && p.a.rows <= kMaxFewRows && p.a.column_stride == 1;
  if (!is_few_rows || p.b.rows == 0 || p.b.column_stride != 1) return 0;
  return p.b.columns / kLanesX2<Accumulator<T>> * kLanesX2<Accumulator<T>>;
}

}  // namespace

template <class T>
void tile_gemm(const TileGemm<T>& p, const Executor& /*executor*/) {
  const int64_t begin = few_rows_columns(p);
  const int64_t end = p.b.columns;
  if (begin > 0) multiply_few_rows(p.a, p.b.column_range(0, begin), p.c.column_range(0, begin), p.accumulate);
  if (begin < end) multiply(p.a, p.b.column_range(begin, end), p.c.column_range(begin, end), p.accumulate);
}

MAXMOE_INSTANTIATE(tile_gemm, TileGemm)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
