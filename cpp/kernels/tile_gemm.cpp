// The product as a loop nest around a micro-kernel, in the words of BLIS (Van Zee and van de Geijn, 2015). Its loops,
// outermost first:
//
//   ic  blocks of rows of A and C                           tile_gemm
//   jo  outer blocks of the columns of B and C              multiply
//   po  outer blocks of the inner dimension                 multiply
//   jc  blocks of NC columns of B and C                     multiply_outer_block
//   pc  blocks of KC of the inner dimension: packs A and,   multiply_outer_block
//       where it is transposed, B
//   ir  micro-tiles of C, of MR rows: the first ones pack   multiply_block
//       a row-major B
//   jr  micro-panels of B, of NR columns                    multiply_block
//   k   steps of the inner dimension                        micro_kernel
//
// ic runs once unless packed A would be too much scratch memory. A micro-tile of C stays in registers during k, a
// micro-panel of A in the first-level cache during jr, the block of B, KC x NC, in the second-level cache during ir,
// and the panels of A and the pages of B that an outer block reads in the third-level cache and the TLB during jc.
// Meanwhile the next block of B is prefetched. Every element of A and of B is packed once: A is packed while the first
// block of columns is computed, and kept.
//
// With few rows of A each element of packed B is used so rarely that packing costs more than it saves. Then B is read
// in place (few_rows.h).
//
// With AVX512-BF16 packed blocks of bfloat16 matrices hold BFloat16Pairs, and a step is two elements of the inner
// dimension.
#include "tile_gemm.h"

#include "block_prefetch.h"
#include "caches.h"
#include "few_rows.h"
#include "micro_kernel.h"
#include "pack.h"
#include "row.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

// Steps of the inner dimension in a block: a micro-panel of A takes 24 KiB with AVX-512 and 12 KiB with AVX2, at most
// three quarters of a first-level cache. The next block continues the sums in the accumulator's type, so that KC does
// not change the bits of a result.
constexpr int64_t kKCSteps = 512;

// NC, the columns of a block of B.
template <class S>
int64_t block_columns() {
  constexpr int64_t kPanelBytes = kKCSteps * kNR<S> * int64_t{sizeof(S)};
  static const int64_t columns = panels_per_block(kPanelBytes, second_level_cache_bytes()) * kNR<S>;
  return columns;
}

// Rows and columns of an outer block of B. Every row of a row-major B may be a page of its own, so that the rows are
// bounded by the entries of a second-level TLB. Measured: 2048 rows are slower at D 4096, and as fast beyond.
constexpr int64_t kOuterDepth = 4096;
constexpr int64_t kOuterColumns = 2048;

// Elements of A that are packed at a time.
constexpr int64_t kPackedA = int64_t{1} << 22;

// MAXMOE_BFLOAT16_PAIRS: pairs in plain arithmetic, for tests on processors without the instruction.
#if defined(__AVX512BF16__) || defined(MAXMOE_BFLOAT16_PAIRS)
constexpr bool kMultipliesPairs = true;
#else
constexpr bool kMultipliesPairs = false;
#endif

template <class T>
using ElementOf = std::conditional_t<kMultipliesPairs && std::is_same_v<T, BFloat16>, BFloat16Pair, Accumulator<T>>;

// Blocks of A and B, and the sums that a block of the inner dimension goes on with: NR wide columns of C, one after the
// other, in the order of VectorX2.
template <class T, class Element>
struct Block {
  const Element* a;
  const GemmOperand<T>& b;
  Range depth;
  Range columns;
  Element* panels_of_b;
  bool packs_b;  // with the first rows of micro-tiles
  Accumulator<T>* sums;
  int64_t sums_rows;
  bool has_sums;  // from the block before

  int64_t num_steps() const { return steps_of_depth<Element>(depth.size()); }
};

// The micro-tile at row ir and column jr of the block.
template <class Out, class T, class Element>
MAXMOE_INLINE void multiply_micro_tile_at(const Block<T, Element>& block, int64_t ir, int64_t jr, MatrixView<Out> c,
                                          BlockPrefetch& next, int64_t num_lines) {
  using S = Accumulator<T>;
  const int64_t num_steps = block.num_steps();
  const S* const sums = block.has_sums ? block.sums + jr * block.sums_rows + ir * kNR<S> : nullptr;
  const Element* const a = block.a + ir / kMR * panel_size_of_a<Element>(num_steps);
  Element* const panel_of_b = block.panels_of_b + jr * num_steps;
  if (block.packs_b && ir == 0 && c.columns == kNR<S>) {
    const MicroTile<Out, Element> tile{a, num_steps, sums, c.data, c.row_stride, next, num_lines};
    return micro_kernel_packing_b(tile, block.b, block.depth, block.columns.begin + jr, panel_of_b);
  }
  micro_kernel_of_rows<Out, Element>(c.rows)(a, panel_of_b, num_steps, sums, c.data, c.row_stride, next, num_lines);
}

// c = a * b for one block: the loops ir and jr. The last block of the inner dimension rounds to the result's type; a
// micro-tile that is not full is computed in a buffer then, and copied.
template <class T, class Element>
void multiply_block(const Block<T, Element>& block, MatrixView<T> c, bool is_last, BlockPrefetch next) {
  using S = Accumulator<T>;
  constexpr int64_t kWidth = kNR<S>;
  const int64_t num_tiles = (c.rows + kMR - 1) / kMR * ((c.columns + kWidth - 1) / kWidth);
  const int64_t num_lines = (next.num_lines() + num_tiles - 1) / num_tiles;
  for (int64_t ir = 0; ir < c.rows; ir += kMR) {
    const int64_t rows = at_most(kMR, c.rows - ir);
    for (int64_t jr = 0; jr < c.columns; jr += kWidth) {
      const int64_t columns = at_most(kWidth, c.columns - jr);
      const auto multiply = [&]<class Out>(Out* out, int64_t stride) {
        multiply_micro_tile_at(block, ir, jr, MatrixView<Out>{out, rows, columns, stride}, next, num_lines);
      };
      T* const c_tile = c.row(ir) + jr;
      if (!is_last) {
        multiply(block.sums + jr * block.sums_rows + ir * kWidth, kWidth);
      } else if (columns == kWidth) {
        multiply(c_tile, c.row_stride);
      } else {
        T tile[kMR * kWidth];
        multiply(static_cast<T*>(tile), kWidth);
        for (int64_t r = 0; r < rows; ++r) copy_row(tile + r * kWidth, c.row(ir + r) + jr, columns);
      }
    }
  }
}

// The sums that the first block goes on with.
template <class T>
void load_sums(ConstMatrixView<T> c, int64_t sums_rows, Accumulator<T>* sums) {
  using S = Accumulator<T>;
  constexpr int64_t kWidth = kNR<S>;
  for (int64_t jr = 0; jr < c.columns; jr += kWidth) {
    for (int64_t r = 0; r < c.rows; ++r) {
      T part[kWidth];
      std::memset(static_cast<void*>(part), 0, sizeof(part));
      copy_row(c.row(r) + jr, part, at_most(kWidth, c.columns - jr));
      store_narrowed_x2<S>(sums + jr * sums_rows + r * kWidth, load_x2(part));
    }
  }
}

// The micro-panels of A, block by block of the inner dimension. Each is packed when it is first needed, and kept.
template <class T>
class PackedA {
 public:
  using Element = ElementOf<T>;
  static constexpr int64_t kKC = kKCSteps * kDepthPerStep<Element>;

  explicit PackedA(const GemmOperand<T>& a)
      : a_(a),
        block_size_((a.rows() + kMR - 1) / kMR *
                    panel_size_of_a<Element>(steps_of_depth<Element>(at_most(a.columns(), kKC)))),
        blocks_(scratch<Element>(kPackedAScratch, (a.columns() + kKC - 1) / kKC * block_size_)) {}

  const Element* block(Range depth) {
    Element* const panels = blocks_ + depth.begin / kKC * block_size_;
    if (depth.end > packed_depth_) pack_a(a_, depth, panels);
    packed_depth_ = depth.end > packed_depth_ ? depth.end : packed_depth_;
    return panels;
  }

 private:
  GemmOperand<T> a_;
  int64_t block_size_;
  Element* blocks_;
  int64_t packed_depth_ = 0;
};

// Where a block lies in B, or an outer one.
struct BlockOfB {
  Range depth;
  Range columns;
};

template <class T>
BlockOfB outer_block(const GemmOperand<T>& b, int64_t depth, int64_t column) {
  return {range_from(depth / kOuterDepth * kOuterDepth, kOuterDepth, b.rows()),
          range_from(column / kOuterColumns * kOuterColumns, kOuterColumns, b.columns())};
}

// The block that begins at a place in an outer one.
template <class T>
BlockOfB block_at(const BlockOfB& outer, int64_t depth, int64_t column) {
  return {range_from(depth, PackedA<T>::kKC, outer.depth.end),
          range_from(column, block_columns<Accumulator<T>>(), outer.columns.end)};
}

// The block of B after this one, which may be that of the next product.
template <class T>
BlockPrefetch next_block(const Product<T>& p, const BlockOfB& outer, const BlockOfB& block) {
  const auto prefetch = [](const GemmOperand<T>& b, int64_t depth, int64_t column) -> BlockPrefetch {
    const BlockOfB next = block_at<T>(outer_block(b, depth, column), depth, column);
    return {b, next.depth, next.columns};
  };
  if (block.depth.end < outer.depth.end) return prefetch(p.b, block.depth.end, block.columns.begin);
  if (block.columns.end < outer.columns.end) return prefetch(p.b, outer.depth.begin, block.columns.end);
  if (outer.depth.end < p.b.rows()) return prefetch(p.b, outer.depth.end, outer.columns.begin);
  if (outer.columns.end < p.b.columns()) return prefetch(p.b, 0, outer.columns.end);
  return prefetch(p.next_b, 0, 0);
}

// The loops jc and pc. pc runs once even if the inner dimension is 0: c must become 0. The sums of a block of columns
// are at sums + (its first column in the outer block) * sums_per_column.
template <class T>
void multiply_outer_block(PackedA<T>& a, const Product<T>& p, const BlockOfB& outer, Accumulator<T>* sums,
                          int64_t sums_per_column) {
  using S = Accumulator<T>;
  using Element = ElementOf<T>;
  const int64_t padded_rows = (p.c.rows + kMR - 1) / kMR * kMR;
  Element* const panels_of_b = scratch<Element>(kPackedBScratch, block_columns<S>() * kKCSteps);
  const bool packs_b = !p.b.is_transposed && p.c.rows >= kMR;
  for (int64_t jc = outer.columns.begin; jc < outer.columns.end;) {
    const Range columns = block_at<T>(outer, 0, jc).columns;
    const MatrixView<T> c = p.c.column_range(columns.begin, columns.end);
    S* const block_sums = sums + (jc - outer.columns.begin) * sums_per_column;
    if (p.accumulate && outer.depth.begin == 0) load_sums(c.as_const(), padded_rows, block_sums);
    for (int64_t pc = outer.depth.begin; pc < outer.depth.end || pc == 0; pc += PackedA<T>::kKC) {
      const BlockOfB place = block_at<T>(outer, pc, jc);
      const Block<T, Element> block{a.block(place.depth),  p.b,     place.depth, columns,
                                    panels_of_b,           packs_b, block_sums,  padded_rows,
                                    p.accumulate || pc > 0};
      const int64_t packed = packs_b ? columns.size() / kNR<S> * kNR<S> : 0;
      if (packed < columns.size()) {
        pack_b(p.b, place.depth, {columns.begin + packed, columns.end}, panels_of_b + packed * block.num_steps());
      }
      multiply_block(block, c, place.depth.end == p.b.rows(), next_block(p, outer, place));
    }
    jc = columns.end;
  }
}

// The loops jo and po. po runs once even if the inner dimension is 0. Where it runs more often, the sums of an outer
// block of columns are kept from one outer block of the inner dimension to the next.
template <class T>
void multiply(PackedA<T>& a, const Product<T>& p) {
  using S = Accumulator<T>;
  const int64_t padded_rows = (p.c.rows + kMR - 1) / kMR * kMR;
  const bool keeps_sums = p.b.rows() > kOuterDepth;
  const int64_t padded_columns = (at_most(p.c.columns, kOuterColumns) + kNR<S> - 1) / kNR<S> * kNR<S>;
  S* const sums = scratch<S>(kSumsScratch, padded_rows * (keeps_sums ? padded_columns : block_columns<S>()));
  for (int64_t jo = 0; jo < p.c.columns; jo += kOuterColumns) {
    for (int64_t po = 0; po < p.b.rows() || po == 0; po += kOuterDepth) {
      multiply_outer_block(a, p, outer_block(p.b, po, jo), sums, keeps_sums ? padded_rows : 0);
    }
  }
}

// Columns of a product.
template <class T>
Product<T> column_range(Product<T> p, int64_t begin, int64_t end) {
  p.b.memory = p.b.is_transposed ? p.b.memory.row_range(begin, end) : p.b.memory.column_range(begin, end);
  p.c = p.c.column_range(begin, end);
  return p;
}

// Few rows of A: the columns that fill micro-panels are computed with B in place.
template <class T>
void multiply_few_rows_of(const GemmOperand<T>& a, PackedA<T>& packed_a, const Product<T>& p) {
  const int64_t whole = p.c.columns / kNR<Accumulator<T>> * kNR<Accumulator<T>>;
  if (whole > 0) multiply_few_rows<ElementOf<T>>(a, column_range(p, 0, whole));
  if (whole < p.c.columns) multiply(packed_a, column_range(p, whole, p.c.columns));
}

// All products of rows [begin, end).
template <class T>
void multiply_rows(const TileGemm<T>& p, int64_t begin, int64_t end) {
  const GemmOperand<T> a = p.a.row_range(begin, end);
  PackedA<T> packed_a(a);
  for (int64_t i = 0; i < p.count; ++i) {
    Product<T> product = p.products[i];
    product.c = product.c.row_range(begin, end);
    const int64_t rows = product.c.rows;
    const bool is_few_rows = 0 < rows && rows <= kMaxFewRows && a.columns() > 0 && product.b.index == nullptr;
    if (is_few_rows) {
      multiply_few_rows_of(a, packed_a, product);
    } else {
      multiply(packed_a, product);
    }
  }
}

}  // namespace

template <class T>
void tile_gemm(const TileGemm<T>& p, const Executor& /*executor*/) {
  const int64_t depth = p.a.columns() < 1 ? 1 : p.a.columns();
  const int64_t height = (kPackedA / depth / kMR + 1) * kMR;
  for (int64_t ic = 0; ic < p.a.rows(); ic += height) multiply_rows(p, ic, at_most(ic + height, p.a.rows()));
}

MAXMOE_INSTANTIATE(tile_gemm, TileGemm)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
