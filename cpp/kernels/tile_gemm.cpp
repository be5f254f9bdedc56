// How the product is computed. A micro-tile of c, kHeight rows and kWidth columns, stays in registers while the inner
// dimension runs past: per step one vector load for each kLanes columns of b and one broadcast for each row of a. Its
// columns of b are first copied to a panel, where they follow each other (and are widened, and transposed where b is).
// The panel stays in the first- or second-level cache while all rows of a block of a run past it. With few rows the
// copy would cost more than it gives: b is read where it lies, and multiplied from the left where it is transposed.
//
// Where the processor multiplies pairs of bfloat16, a step is two elements of the inner dimension, and a block of a and
// a panel of b hold pairs.
#include "tile_gemm.h"

#include "few_rows.h"
#include "micro_tile.h"
#include "panels.h"
#include "row.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

// Rows of a and steps of the inner dimension that are worked on at a time: they fit into the second-level cache, or
// stream from the third at no loss.
constexpr int64_t kBlockRows = 264;
constexpr int64_t kBlockDepth = 2048;

static_assert(kBlockRows % kHeight == 0 && kBlockDepth % 2 == 0);

#if defined(__AVX512BF16__) || defined(MAXMOE_PAIRS)
constexpr bool kHasPairs = true;
#else
constexpr bool kHasPairs = false;
#endif

// The columns of b that a micro-tile takes: a panel, or where they lie.
template <class Element>
struct RightColumns {
  const Element* data;
  int64_t stride;  // of rows
};

// sum = or += a * b for the columns of one micro-tile.
template <Layout kLayout, class Element, class S, class Ask>
void multiply_columns(LeftBlock<Element> left, RightColumns<Element> right, int64_t depth, MatrixView<S> sum,
                      bool accumulate, const Ask& ask) {
  const bool is_whole = sum.columns == kWidth<S> && sum.column_stride == 1;
  for (int64_t begin = 0; begin < sum.rows; begin += kHeight) {
    const MatrixView<S> rows = sum.row_range(begin, at_most(sum.rows, begin + kHeight));
    const auto micro = micro_tile_of<S, Element, Ask, kLayout>(rows.rows);
    const Element* a = left.data + begin * (kLayout == Layout::rows ? left.stride : depth);
    if (is_whole) {
      micro(a, left.stride, right.data, right.stride, depth, rows.data, rows.row_stride, accumulate, ask);
      continue;
    }
    alignas(kVectorBytes) S tile[kHeight * kWidth<S>] = {};
    const auto for_elements = [&](const auto& copy) {
      for (int64_t r = 0; r < rows.rows; ++r) {
        for (int64_t c = 0; c < rows.columns; ++c) copy(tile[r * kWidth<S> + c], rows.row(r)[c * rows.column_stride]);
      }
    };
    if (accumulate) for_elements([](S& in_tile, S of_sum) { in_tile = of_sum; });
    micro(a, left.stride, right.data, right.stride, depth, tile, kWidth<S>, accumulate, ask);
    for_elements([](S in_tile, S& of_sum) { of_sum = in_tile; });
  }
}

// sum = or += a * b; a block of rows and of the inner dimension.
template <class Element, class T>
void multiply_panels(LeftBlock<Element> left, ConstMatrixView<T> b, MatrixView<Accumulator<T>> sum, bool accumulate) {
  constexpr int64_t kPanelWidth = kWidth<Accumulator<T>>;
  const int64_t depth = steps<Element>(b.rows);
  const auto multiply = left.layout == Layout::rows
                            ? multiply_columns<Layout::rows, Element, Accumulator<T>, AskNothing>
                            : multiply_columns<Layout::panels, Element, Accumulator<T>, AskNothing>;
  for (int64_t begin = 0; begin < b.columns; begin += kPanels * kPanelWidth) {
    const int64_t end = at_most(b.columns, begin + kPanels * kPanelWidth);
    const Element* panel = right_panels<Element>(b.column_range(begin, end));
    for (int64_t column = begin; column < end; column += kPanelWidth, panel += depth * kPanelWidth) {
      const MatrixView<Accumulator<T>> columns = sum.column_range(column, at_most(end, column + kPanelWidth));
      multiply(left, {panel, kPanelWidth}, depth, columns, accumulate, AskNothing());
    }
  }
}

// Whether copying b would cost more than it gives, as its rows are multiplied with few rows of a. They are lines apart
// then, so that none of its vectors lies in two lines.
template <class T>
bool is_read_in_place(ConstMatrixView<T> a, ConstMatrixView<T> b) {
  const auto is_aligned = [](int64_t address) { return address % kVectorBytes == 0; };
  return a.column_stride == 1 && b.column_stride == 1 && a.rows <= 3 * kHeight &&
         is_aligned(reinterpret_cast<intptr_t>(b.data)) && is_aligned(b.row_stride * int64_t{sizeof(T)});
}

// sum = or += a * b for the columns that fill micro-tiles, with b read where it lies; returns how many these are. While
// some columns are multiplied, those next to them are asked for.
template <class T>
int64_t multiply_in_place(LeftBlock<T> left, ConstMatrixView<T> b, MatrixView<T> sum, bool accumulate) {
  constexpr int kEveryRow = 62;
  int64_t begin = 0;
  for (; begin + kWidth<T> <= b.columns; begin += kWidth<T>) {
    const T* columns = b.data + begin;
    const AskRows next{reinterpret_cast<const std::byte*>(columns + kWidth<T>), b.row_stride * int64_t{sizeof(T)},
                       kEveryRow};
    multiply_columns<Layout::rows>(left, {columns, b.row_stride}, b.rows, sum.column_range(begin, begin + kWidth<T>),
                                   accumulate, next);
  }
  return begin;
}

// Whether copying a transposed b would cost more than multiplying it from the left, with rows of a that do not fill
// micro-tiles. Rows that have to be widened first are worth it where they fill half of one.
template <class Element, class T>
bool is_multiplied_from_left(ConstMatrixView<T> a, ConstMatrixView<T> b) {
  constexpr int64_t kPanelWidth = kWidth<Accumulator<T>>;
  const bool is_few_rows =
      std::is_same_v<Element, T> ? a.rows <= 2 * kPanelWidth : kPanelWidth / 2 <= a.rows && a.rows <= kPanelWidth;
  return is_few_rows && a.column_stride == 1 && b.column_stride != 1;
}

// sum = or += a * b by way of the transposed product: panels are those of a, and b is read where it lies. While some
// columns of b are multiplied, those after them are asked for.
template <class Element, class T>
void multiply_from_left(ConstMatrixView<T> a, ConstMatrixView<T> b, MatrixView<Accumulator<T>> sum, bool accumulate) {
  constexpr int64_t kPanelWidth = kWidth<Accumulator<T>>;
  constexpr int kEightRows = 3;
  const ConstMatrixView<T> left = b.transposed();
  const int64_t depth = steps<Element>(left.columns);
  const Element* const panels = right_panels<Element>(a.transposed());
  for (int64_t begin = 0; begin < left.rows; begin += kHeight) {
    const int64_t end = at_most(left.rows, begin + kHeight);
    const LeftBlock<Element> block = left_block<Element>(left.row_range(begin, end));
    const AskRows next{reinterpret_cast<const std::byte*>(left.row(begin + kHeight)),
                       left.row_stride * int64_t{sizeof(T)}, kEightRows};
    for (int64_t row = 0; row < sum.rows; row += kPanelWidth) {
      const MatrixView<Accumulator<T>> out = sum.row_range(row, at_most(sum.rows, row + kPanelWidth));
      multiply_columns<Layout::rows>(block, {panels + row * depth, kPanelWidth}, depth,
                                     out.column_range(begin, end).transposed(), accumulate, next);
    }
  }
}

template <class T>
void multiply_block(ConstMatrixView<T> a, ConstMatrixView<T> b, MatrixView<Accumulator<T>> sum, bool accumulate) {
  using Element = std::conditional_t<kHasPairs && std::is_same_v<T, BFloat16>, Pair, Accumulator<T>>;
  if (is_multiplied_from_left<Element>(a, b)) return multiply_from_left<Element>(a, b, sum, accumulate);
  const LeftBlock<Element> left = left_block<Element>(a);
  int64_t done = 0;
  if constexpr (std::is_same_v<Element, T>) {
    if (is_read_in_place(a, b)) done = multiply_in_place(left, b, sum, accumulate);
  }
  multiply_panels(left, b.column_range(done, b.columns), sum.column_range(done, b.columns), accumulate);
}

template <class T>
void multiply_rows(ConstMatrixView<T> a, ConstMatrixView<T> b, MatrixView<Accumulator<T>> sum, bool accumulate) {
  for (int64_t begin = 0; begin < a.columns || begin == 0; begin += kBlockDepth) {
    const int64_t end = at_most(a.columns, begin + kBlockDepth);
    multiply_block(a.column_range(begin, end), b.row_range(begin, end), sum, accumulate || begin > 0);
  }
}

template <class T>
void multiply(ConstMatrixView<T> a, ConstMatrixView<T> b, MatrixView<T> c, bool accumulate) {
  using S = Accumulator<T>;
  for (int64_t begin = 0; begin < c.rows; begin += kBlockRows) {
    const int64_t end = at_most(c.rows, begin + kBlockRows);
    const MatrixView<T> rows = c.row_range(begin, end);
    if constexpr (std::is_same_v<T, S>) {
      multiply_rows(a.row_range(begin, end), b, rows, accumulate);
    } else {
      const MatrixView<S> sum{scratch<S>(kGemmScratch + 2, rows.rows * c.columns), rows.rows, c.columns, c.columns};
      for (int64_t r = 0; r < rows.rows && accumulate; ++r) widen_row(rows.row(r), sum.row(r), c.columns);
      multiply_rows(a.row_range(begin, end), b, sum, accumulate);
      for (int64_t r = 0; r < rows.rows; ++r) narrow_row<T>(sum.row(r), rows.row(r), c.columns);
    }
  }
}

// How many of the first columns multiply_few_rows can take.
template <class T>
int64_t columns_in_place(const TileGemm<T>& p) {
  const bool is_few_rows = 0 < p.a.rows && p.a.rows <= kFewRows && p.a.column_stride == 1;
  if (!is_few_rows || p.b.rows == 0 || p.b.column_stride != 1) return 0;
  return p.b.columns / kColumnsInPlace<Accumulator<T>> * kColumnsInPlace<Accumulator<T>>;
}

}  // namespace

template <class T>
void tile_gemm(const TileGemm<T>& p, const Executor& /*executor*/) {
  const int64_t begin = columns_in_place(p);
  const int64_t end = p.b.columns;
  if (begin > 0) multiply_few_rows(p.a, p.b.column_range(0, begin), p.c.column_range(0, begin), p.accumulate);
  if (begin < end) multiply(p.a, p.b.column_range(begin, end), p.c.column_range(begin, end), p.accumulate);
}

MAXMOE_INSTANTIATE(tile_gemm, TileGemm)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
