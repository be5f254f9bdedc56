// Products with vector instructions that have the bits of products of tiles: for few rows, where packing B for tiles
// takes longer than the multiply-adds, and for few steps of the inner dimension, of which a tile multiplies 32.
//
// An element is computed as multiply_tiles computes it: for each block of 32 of the inner dimension a chain of fused
// multiply-adds over its even steps and one over its odd steps, from zero, which are added to each other and then to
// the sum.
#pragma once

#include "kernels/product/amx/beside.amx.h"
#include "kernels/product/amx/tiles_of_a.amx.h"

#if !MAXMOE_EMULATES_TILES
#include <immintrin.h>
#endif

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Most rows that are multiplied at a time: 4 * 6 chains, of even and odd steps and columns, stay in registers.
constexpr int kFewRows = 6;
// Most steps of the inner dimension for which many rows are multiplied in this way.
constexpr int64_t kFewSteps = 4;

// Subnormal inputs and results are zeros on this thread while an instance exists, as they are for tiles.
class FlushedSubnormals {
 public:
#if MAXMOE_EMULATES_TILES
  FlushedSubnormals() {}  // fused and added_to flush
#else
  FlushedSubnormals() : before_(_mm_getcsr()) {
    constexpr unsigned kFlushToZero = 0x8000;
    constexpr unsigned kSubnormalsAreZeros = 0x0040;
    _mm_setcsr(before_ | kFlushToZero | kSubnormalsAreZeros);
  }
  FlushedSubnormals(const FlushedSubnormals&) = delete;
  FlushedSubnormals& operator=(const FlushedSubnormals&) = delete;
  ~FlushedSubnormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#endif
};

// sum + factor * vector, rounded once.
MAXMOE_INLINE Vector<float> fused(Vector<float> sum, float factor, Vector<float> vector) {
#if MAXMOE_EMULATES_TILES
#pragma GCC unroll 1
  for (int i = 0; i < kLanes<float>; ++i) sum[i] = emulated_tiles::multiply_add(sum[i], factor, vector[i]);
  return sum;
#else
  return _mm512_fmadd_ps(_mm512_set1_ps(factor), vector, sum);
#endif
}

MAXMOE_INLINE Vector<float> added_to(Vector<float> sum, Vector<float> even_steps, Vector<float> odd_steps) {
#if MAXMOE_EMULATES_TILES
#pragma GCC unroll 1
  for (int i = 0; i < kLanes<float>; ++i) {
    sum[i] = emulated_tiles::add(sum[i], emulated_tiles::add(even_steps[i], odd_steps[i]));
  }
  return sum;
#else
  return sum + (even_steps + odd_steps);
#endif
}

// 32 columns of a row of B, or 16 pairs, widened: the numbers at even places, and at odd places.
MAXMOE_INLINE VectorX2<float> widened(Vector<uint32_t> pairs) {
  return {std::bit_cast<Vector<float>>(pairs << 16), std::bit_cast<Vector<float>>(pairs & 0xffff0000U)};
}

// The sums of kRows rows, a panel of kPanelColumns columns after the other, each kRows rows in the order of VectorX2.
template <int kRows>
class FewRowsProduct {
 public:
  // `a`, one number of each row for each step, and `sums` are scratch memory.
  FewRowsProduct(float* a, float* sums) : a_(a), sums_(sums) {}

  void begin(ConstMatrixView<BFloat16> c, bool accumulate) {
    for (int64_t column = 0; column < c.columns; column += kPanelColumns) {
      for (int r = 0; r < kRows; ++r) {
        load_sums(c.row(r) + column, accumulate ? c.columns - column : 0, panel(column) + r * kPanelColumns);
      }
    }
  }

  // Adds the product of `rows`, kRows rows, with b. Lines of `next_b` are prefetched at the end of b.
  void add(const GemmOperand<BFloat16>& rows, const GemmOperand<BFloat16>& b, const GemmOperand<BFloat16>& next_b) {
    for (int64_t d = 0; d < b.rows(); ++d) {
      for (int r = 0; r < kRows; ++r) {
        a_[d * kRows + r] = widen(rows.is_transposed ? rows.memory_row(d)[r] : rows.memory_row(r)[d]);
      }
    }
    if (b.is_transposed) {
      add_transposed(b.memory, next_b);
    } else {
      add_row_major(b.memory, next_b);
    }
  }

  void store(MatrixView<BFloat16> c, bool is_nontemporal) {
    // Row by row, in the order of memory.
    for (int r = 0; r < kRows; ++r) {
      for (int64_t column = 0; column < c.columns; column += kPanelColumns) {
        FinishedTile{panel(column) + r * kPanelColumns,          c.row(r) + column, c.row_stride, 1,
                     at_most(kPanelColumns, c.columns - column), is_nontemporal}
            .store();
      }
    }
  }

 private:
  using Sums = Vector<float>[kRows][2];  // of even and odd columns, or steps
  // Panels at a time: the four chains of one row and one panel would wait for each other.
  static constexpr int kPanels = kRows <= 2 ? 2 : 1;

  static constexpr int64_t kVector = kLanes<float>;

  float* panel(int64_t column) const { return sums_ + column * kRows; }

  // Blocks of 32 rows of B, in the order of memory, with the next block prefetched.
  void add_row_major(ConstMatrixView<BFloat16> b, const GemmOperand<BFloat16>& next_b) {
    for (int64_t d = 0; d < b.rows; d += kTileDepth) {
      const Range depth = range_from(d, kTileDepth, b.rows);
      const Range next = range_from(depth.end, kTileDepth, b.rows);
      BlockPrefetch lines =
          next.size() > 0 ? BlockPrefetch(GemmOperand<BFloat16>(b), next, {0, b.columns})
                          : BlockPrefetch(next_b, range_from(0, kTileDepth, next_b.rows()), {0, next_b.columns()});
      int64_t column = 0;
      for (; column + kPanels * kPanelColumns <= b.columns; column += kPanels * kPanelColumns) {
        add_panels<kPanels>(b.row(depth.begin) + column, b.row_stride, depth, column, lines);
      }
      for (; column < b.columns; column += kPanelColumns) {
        const int64_t width = b.columns - column;
        if (width >= kPanelColumns) {
          add_panels<1>(b.row(depth.begin) + column, b.row_stride, depth, column, lines);
        } else {
          BFloat16 padded[kTileDepth * kPanelColumns];
          zero_row(padded, kTileDepth * kPanelColumns);
          for (int64_t i = 0; i < depth.size(); ++i) {
            copy_row(b.row(depth.begin + i) + column, padded + i * kPanelColumns, width);
          }
          add_panels<1>(padded, kPanelColumns, depth, column, lines);
        }
      }
    }
  }

  // A block of kCount panels from `column` on: `b` is their first column in row depth.begin.
  template <int kCount>
  MAXMOE_INLINE void add_panels(const BFloat16* b, int64_t stride, Range depth, int64_t column, BlockPrefetch& lines) {
    Sums chains[kCount][2]{};  // of even and of odd steps
    const auto add_step = [&](int64_t d, int parity) MAXMOE_INLINE_LAMBDA {
#pragma GCC unroll 2
      for (int p = 0; p < kCount; ++p) {
        if (lines.num_lines() > 0) lines.advance();
        const VectorX2<float> row =
            widened(load_along_depth<BFloat16Pair>(b + (d - depth.begin) * stride + p * kPanelColumns));
        Sums& chain = chains[p][parity];
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r) {
          chain[r][0] = fused(chain[r][0], a_[d * kRows + r], row.first);
          chain[r][1] = fused(chain[r][1], a_[d * kRows + r], row.second);
        }
      }
    };
    int64_t d = depth.begin;
    for (; d + 2 <= depth.end; d += 2) {
      add_step(d, 0);
      add_step(d + 1, 1);
    }
    if (d < depth.end) add_step(d, 0);
#pragma GCC unroll 2
    for (int p = 0; p < kCount; ++p) {
      float* const of_panel = panel(column + p * kPanelColumns);
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          float* const sum = of_panel + r * kPanelColumns + v * kVector;
          store_vector<float>(sum, added_to(load_vector(sum), chains[p][0][r][v], chains[p][1][r][v]));
        }
      }
    }
  }

  // The columns that are multiplied after these: of the same product, or the first ones of the next.
  static ConstMatrixView<BFloat16> columns_after(ConstMatrixView<BFloat16> memory, int64_t column,
                                                 const GemmOperand<BFloat16>& next_b) {
    if (column < memory.rows) return memory.row_range(column, at_most(column + kPanelColumns, memory.rows));
    const bool has_columns = next_b.is_transposed && !next_b.is_quantized() && next_b.index == nullptr &&
                             next_b.memory.columns >= memory.columns;
    return has_columns ? next_b.memory.row_range(0, at_most(kPanelColumns, next_b.memory.rows))
                       : ConstMatrixView<BFloat16>{};
  }

  // 32 columns at a time, along the whole inner dimension; the next columns are prefetched.
  void add_transposed(ConstMatrixView<BFloat16> memory, const GemmOperand<BFloat16>& next_b) {
    for (int64_t column = 0; column < memory.rows; column += kPanelColumns) {
      const ConstMatrixView<BFloat16> ahead = columns_after(memory, column + kPanelColumns, next_b);
      for (int vector = 0; vector < 2; ++vector) {
        float* const of_vector = panel(column) + vector * kVector;
        Vector<float> sums[kRows];
        for (int r = 0; r < kRows; ++r) sums[r] = load_vector(of_vector + r * kPanelColumns);
        const BFloat16* rows[kVector];
        for (int64_t lane = 0; lane < kVector; ++lane) {
          rows[lane] = memory.row(at_most(column + 2 * lane + vector, memory.rows - 1));
        }
        for (int64_t d = 0; d < memory.columns; d += kTileDepth) {
          add_block(rows, d, at_most(kTileDepth, memory.columns - d), sums);
          for (int64_t i = vector; i < ahead.rows; i += 2) __builtin_prefetch(ahead.row(i) + d, 0, 2);
        }
        for (int r = 0; r < kRows; ++r) store_vector<float>(of_vector + r * kPanelColumns, sums[r]);
      }
    }
  }

  // 16 columns of a block of 32, transposed in registers.
  MAXMOE_INLINE void add_block(const BFloat16* const* rows, int64_t d, int64_t count, Vector<float> (&sums)[kRows]) {
    Vector<BFloat16Pair> steps[16];
#pragma GCC unroll 16
    for (int64_t lane = 0; lane < 16; ++lane) steps[lane] = load_along_depth<BFloat16Pair>(rows[lane] + d, count);
    transpose_square<BFloat16Pair>(steps);
    Sums chains{};
#pragma GCC unroll 16
    for (int64_t k = 0; k < 16; ++k) {
      if (2 * k >= count) break;
      const VectorX2<float> pair = widened(steps[k]);
      const float* const of_step = a_ + (d + 2 * k) * kRows;
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        chains[r][0] = fused(chains[r][0], of_step[r], pair.first);
        if (2 * k + 1 < count) chains[r][1] = fused(chains[r][1], of_step[kRows + r], pair.second);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) sums[r] = added_to(sums[r], chains[r][0], chains[r][1]);
  }

  float* a_;
  float* sums_;
};

// Whether the vectors are faster than tiles.
inline bool multiplies_few_rows(int64_t rows, const Product<BFloat16>& p) {
  if (p.b.is_quantized() || p.b.index != nullptr || rows == 0) return false;
  if (rows <= kFewRows) return true;
  return !p.b.is_transposed && p.b.rows() <= kFewSteps && !p.has_low_rank_term();
}

template <int kRows>
void multiply_rows_of_group(const GemmOperand<BFloat16>& a, const Product<BFloat16>& p) {
  const int64_t depth = p.b.rows() < p.expand.rows ? p.expand.rows : p.b.rows();
  FewRowsProduct<kRows> product(scratch<float>(kPackedBScratch, depth * kRows),
                                scratch<float>(kSumsScratch, round_up(p.c.columns, kPanelColumns) * kRows));
  product.begin(p.c.as_const(), p.accumulate);
  product.add(a, p.b, p.next_b);
  if (p.has_low_rank_term()) product.add(GemmOperand<BFloat16>(p.reduced), GemmOperand<BFloat16>(p.expand), {});
  product.store(p.c, p.is_nontemporal);
}

// Computes a product for which multiplies_few_rows is true, in groups of rows. Not inlined: the compiler does not know
// that the arithmetic depends on FlushedSubnormals.
__attribute__((noinline)) inline void multiply_few_rows(const GemmOperand<BFloat16>& a, const Product<BFloat16>& p) {
  using Multiply = void (*)(const GemmOperand<BFloat16>&, const Product<BFloat16>&);
  static constexpr Multiply kOfRows[] = {multiply_rows_of_group<1>, multiply_rows_of_group<2>,
                                         multiply_rows_of_group<3>, multiply_rows_of_group<4>,
                                         multiply_rows_of_group<5>, multiply_rows_of_group<6>};
  for (int64_t row = 0; row < a.rows(); row += kFewRows) {
    const int64_t end = at_most(row + kFewRows, a.rows());
    Product<BFloat16> of_group = p;
    of_group.c = p.c.row_range(row, end);
    of_group.reduced = p.reduced.row_range(row, end);
    kOfRows[end - row - 1](a.row_range(row, end), of_group);
  }
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
