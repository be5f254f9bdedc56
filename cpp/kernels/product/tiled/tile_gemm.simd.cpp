// The product as a loop nest around a micro-kernel, in the words of BLIS (Van Zee and van de Geijn, 2015). Its loops,
// outermost first:
//
//   ic  blocks of rows of A and C                           tile_gemm
//   jo  outer blocks of the columns of B and C              multiply
//   po  outer blocks of the inner dimension                 multiply
//   jc  blocks of NC columns of B and C                     multiply_outer_block
//   pc  blocks of KC of the inner dimension: packs A, and   multiply_column_block
//       B where micro-kernels do not
//   ir  micro-tiles of C, of MR rows: the first ones pack   multiply_block
//       B (micro_kernel_packs)
//   jr  micro-panels of B, of NR columns                    multiply_block
//   k   steps of the inner dimension                        micro_kernel
//
// Each loop keeps an operand in one level of the memory hierarchy. A micro-tile of C stays in registers during k. A
// micro-panel of A stays in the first-level cache during jr, and the block of B, KC x NC, in the second-level cache
// during ir. The panels of A that an outer block reads stay in the third-level cache during jc, and its pages of B in
// the TLB. ic runs once, unless packed A would be too much scratch memory.
//
// ir is outside of jr, unlike in BLIS: a micro-panel of A is reused for all columns of the block, and the first row of
// micro-tiles reads each panel of B once, so that it can pack it.
//
// Every element of A and B is packed once per product. A is packed while the first block of columns is computed, and
// kept for the others. While a block of B is multiplied, the next one is prefetched.
//
// With few rows of A each element of packed B would be used so rarely that packing costs more than it saves. Then B is
// read in place (skinny_product.simd.h). Its kernels, and packing of a quantized B, are in separate files, so that
// they are compiled in parallel. Blocks of a quantized B are decoded first, unless its quantized values are decoded
// while they are packed.
//
// With AVX512-BF16 packed blocks of bfloat16 matrices hold BFloat16Pairs, and a step is two elements of the inner
// dimension.
//
// The term of low-rank factors is one more block of the loop pc, with the reduced rows as A and the factor as B.
//
// Blocks change no bit of a result: a sum that continues in the next block is kept in the accumulator's type, and its
// terms are added in the order of the inner dimension.
#include "kernels/product/tiled/tile_gemm.h"

#include <utility>

#include "kernels/matrix/row.simd.h"
#include "kernels/product/skinny/skinny_product.simd.h"
#include "kernels/product/tiled/blocking.simd.h"
#include "kernels/product/tiled/micro_kernel.simd.h"
#include "kernels/product/tiled/pack.simd.h"
#include "kernels/product/tiled/pack_quantized.simd.h"
#include "kernels/quantized/decode_rows.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

// Maximum number of elements of A that are packed at a time, which limits the scratch memory.
constexpr int64_t kMaxPackedA = int64_t{1} << 22;

// A block of A and B, and the partial sums of C if there is more than one block of the inner dimension. The sums are
// stored in strips of NR columns, one strip after the other, in the order of VectorX2.
template <class T, class Element>
struct Block {
  const Element* a;
  const GemmOperand<T>& b;
  Range depth;
  Range columns;
  Element* panels_of_b;
  bool packs_b;  // whether the first row of micro-tiles packs b
  Accumulator<T>* sums;
  int64_t sums_rows;
  bool has_sums;        // whether the block before has left sums
  bool is_nontemporal;  // whether the result is written with non-temporal stores

  int64_t num_steps() const { return steps_of_depth<Element>(depth.size()); }
};

// Computes the micro-tile at row ir and column jr of the block.
template <class Out, class T, class Element>
MAXMOE_INLINE void multiply_micro_tile_at(const Block<T, Element>& block, int64_t ir, int64_t jr, MatrixView<Out> c,
                                          BlockPrefetch& next, int64_t num_lines, bool is_nontemporal) {
  using S = Accumulator<T>;
  const int64_t num_steps = block.num_steps();
  const S* const sums = block.has_sums ? block.sums + jr * block.sums_rows + ir * kNR<S> : nullptr;
  const Element* const a = block.a + ir / kMR * panel_size_of_a<Element>(num_steps);
  Element* const panel_of_b = block.panels_of_b + jr * num_steps;
  // pack_b has padded a panel with fewer than NR columns.
  if (block.packs_b && ir == 0 && c.columns == kNR<S>) {
    const MicroTile<Out, Element> tile{a, num_steps, sums, c.data, c.row_stride, next, num_lines, is_nontemporal};
    return micro_kernel_packing(tile, block.b, block.depth, block.columns.begin + jr, panel_of_b);
  }
  micro_kernel_of_rows<Out, Element>(c.rows)(a, panel_of_b, num_steps, sums, c.data, c.row_stride, next, num_lines,
                                             is_nontemporal);
}

// Computes c = a * b for one block: the loops ir and jr. The last block of the inner dimension rounds the sums to the
// type of the result. A micro-tile with fewer than NR columns is then computed in a buffer and copied.
template <class T, class Element>
void multiply_block(const Block<T, Element>& block, MatrixView<T> c, bool is_last, BlockPrefetch next) {
  using S = Accumulator<T>;
  constexpr int64_t kWidth = kNR<S>;
  const int64_t num_tiles = (c.rows + kMR - 1) / kMR * ((c.columns + kWidth - 1) / kWidth);
  // The prefetches are distributed evenly over the micro-tiles.
  const int64_t num_lines = (next.num_lines() + num_tiles - 1) / num_tiles;
  for (int64_t ir = 0; ir < c.rows; ir += kMR) {
    const int64_t rows = at_most(kMR, c.rows - ir);
    for (int64_t jr = 0; jr < c.columns; jr += kWidth) {
      const int64_t columns = at_most(kWidth, c.columns - jr);
      const auto multiply = [&]<class Out>(Out* out, int64_t stride, bool is_nontemporal = false) {
        multiply_micro_tile_at(block, ir, jr, MatrixView<Out>{out, rows, columns, stride}, next, num_lines,
                               is_nontemporal);
      };
      T* const c_tile = c.row(ir) + jr;
      if (!is_last) {
        multiply(block.sums + jr * block.sums_rows + ir * kWidth, kWidth);
      } else if (columns == kWidth) {
        multiply(c_tile, c.row_stride, block.is_nontemporal);
      } else {
        T tile[kMR * kWidth];
        multiply(static_cast<T*>(tile), kWidth);
        for (int64_t r = 0; r < rows; ++r) copy_row(tile + r * kWidth, c.row(ir + r) + jr, columns);
      }
    }
  }
}

// Loads the initial sums of a product that is added to c.
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

// The operand that a block of B is packed from: b, or the decoded block if packing does not decode quantized values.
// The decoded block is a separate operand, in which `block` begins at 0.
template <class Element, class T>
GemmOperand<T> operand_of_block(const GemmOperand<T>& b, BlockOfB& block) {
  if (!b.is_quantized() || kDecodesPairs<Element>) return b;
  const BlockOfB of_b = std::exchange(block, {{0, block.depth.size()}, {0, block.columns.size()}});
  return decoded_block(b, of_b.depth, of_b.columns);
}

// A block of columns of C and its partial sums.
template <class T>
struct ColumnBlock {
  Range columns;
  MatrixView<T> c;
  Accumulator<T>* sums;
  int64_t sums_rows;
  bool is_nontemporal;
};

// The loop pc over `depth`, a range of the inner dimension of a * b. It runs once even if the inner dimension is 0,
// because c must become 0. The sums continue the sums of the previous block if `has_sums`; they are rounded to c by the
// last block, unless `is_continued`. next_block(depth) is prefetched.
template <class T, class NextBlock>
void multiply_column_block(PackedA<T>& a, const GemmOperand<T>& b, Range depth, const ColumnBlock<T>& block,
                           bool has_sums, bool is_continued, const NextBlock& next_block) {
  using S = Accumulator<T>;
  using Element = ElementOf<T>;
  Element* const panels_of_b = scratch<Element>(kPackedBScratch, block_columns<S>() * kKCSteps);
  for (int64_t pc = depth.begin; pc < depth.end || pc == 0; pc += PackedA<T>::kKC) {
    const Range part = range_from(pc, PackedA<T>::kKC, depth.end);
    BlockOfB of_b{part, block.columns};
    const GemmOperand<T> source = operand_of_block<Element>(b, of_b);
    // Only the micro-kernel of MR rows packs B.
    const bool packs_b = block.c.rows >= kMR && micro_kernel_packs<Element>(source);
    const Block<T, Element> of_part{a.block(part),       source,          of_b.depth,
                                    of_b.columns,        panels_of_b,     packs_b,
                                    block.sums,          block.sums_rows, has_sums || pc > depth.begin,
                                    block.is_nontemporal};
    // The columns that micro-kernels pack. The others are packed here: all columns of a B that micro-kernels do not
    // pack, and a panel of fewer than NR columns.
    const int64_t packed = packs_b ? of_b.columns.size() / kNR<S> * kNR<S> : 0;
    if (packed < of_b.columns.size()) {
      const Range rest{of_b.columns.begin + packed, of_b.columns.end};
      pack_columns_of_b(source, of_b.depth, rest, panels_of_b + packed * of_part.num_steps());
    }
    multiply_block(of_part, block.c, part.end == b.rows() && !is_continued, next_block(part));
  }
}

// The loop jc. The sums of a block of columns are at sums + (its first column in the outer block) * sums_per_column.
// The low-rank term ends the sums: its steps follow the last outer block of the inner dimension.
template <class T>
void multiply_outer_block(PackedA<T>& a, PackedA<T>& reduced, const Product<T>& p, const BlockOfB& outer,
                          Accumulator<T>* sums, int64_t sums_per_column) {
  const int64_t padded_rows = (p.c.rows + kMR - 1) / kMR * kMR;
  const bool is_first = outer.depth.begin == 0;
  const bool has_term = p.has_low_rank_term() && outer.depth.end == p.b.rows();
  for (int64_t jc = outer.columns.begin; jc < outer.columns.end;) {
    const Range columns = block_at<T>(outer, 0, jc).columns;
    const ColumnBlock<T> block{columns, p.c.column_range(columns.begin, columns.end),
                               sums + (jc - outer.columns.begin) * sums_per_column, padded_rows, p.is_nontemporal};
    if (p.accumulate && is_first) load_sums(block.c.as_const(), padded_rows, block.sums);
    multiply_column_block(a, p.b, outer.depth, block, p.accumulate || !is_first, has_term,
                          [&](Range depth) { return next_block(p, outer, {depth, columns}); });
    if (has_term) {
      multiply_column_block(reduced, GemmOperand<T>(p.expand), {0, p.expand.rows}, block, true, false,
                            [](Range /*depth*/) { return BlockPrefetch(); });
    }
    jc = columns.end;
  }
}

// The loops jo and po. po runs once even if the inner dimension is 0. If it runs more often, the sums of an outer block
// of columns are kept from one outer block of the inner dimension to the next. Otherwise a block of columns is finished
// before the next one begins, and their sums share memory.
template <class T>
void multiply(PackedA<T>& a, const Product<T>& p) {
  using S = Accumulator<T>;
  PackedA<T> reduced(p.reduced, kPackedReducedScratch);
  const int64_t padded_rows = (p.c.rows + kMR - 1) / kMR * kMR;
  const bool keeps_sums = p.b.rows() > kOuterDepth;
  const int64_t padded_columns = (at_most(p.c.columns, kOuterColumns) + kNR<S> - 1) / kNR<S> * kNR<S>;
  S* const sums = scratch<S>(kSumsScratch, padded_rows * (keeps_sums ? padded_columns : block_columns<S>()));
  for (int64_t jo = 0; jo < p.c.columns; jo += kOuterColumns) {
    for (int64_t po = 0; po < p.b.rows() || po == 0; po += kOuterDepth) {
      multiply_outer_block(a, reduced, p, outer_block(p.b, po, jo), sums, keeps_sums ? padded_rows : 0);
    }
  }
}

// The product restricted to columns [begin, end).
template <class T>
Product<T> column_range(Product<T> p, int64_t begin, int64_t end) {
  p.b = p.b.column_range(begin, end);
  p.c = p.c.column_range(begin, end);
  if (p.has_low_rank_term()) p.expand = p.expand.column_range(begin, end);
  return p;
}

// A product with few rows of A. The columns that fill micro-panels are computed with B in place, the last ones with
// packed B.
//
// `stored_group` is the size of the groups in which the previous product has stored the rows of a
// (skinny_product.simd.h), 0 for none. It becomes the size for this product: 0 if the low-rank term or packed B has
// overwritten the rows.
template <class T>
void multiply_skinny_of(const GemmOperand<T>& a, int64_t& stored_group, PackedA<T>& packed_a, const Product<T>& p) {
  using Element = ElementOf<T>;
  const int64_t whole = p.c.columns / kNR<Accumulator<T>> * kNR<Accumulator<T>>;
  if (whole > 0) multiply_skinny<Element>(a, stored_group, column_range(p, 0, whole));
  if (whole < p.c.columns) multiply(packed_a, column_range(p, whole, p.c.columns));
  const bool keeps_rows = whole > 0 && whole == p.c.columns && !p.has_low_rank_term();
  stored_group = keeps_rows ? max_group_of<Element>(p.b, p.c.rows) : 0;
}

// Computes all products for rows [begin, end) of A.
template <class T>
void multiply_rows(const TileGemm<T>& p, int64_t begin, int64_t end) {
  const GemmOperand<T> a = p.a.row_range(begin, end);
  PackedA<T> packed_a(a, kPackedAScratch);
  int64_t stored_group = 0;
  for (int64_t i = 0; i < p.count; ++i) {
    Product<T> product = p.products[i];
    product.b = with_scales_read<ElementOf<T>>(product.b);
    product.c = product.c.row_range(begin, end);
    product.reduced = product.reduced.row_range(begin, end);
    product.is_nontemporal = product.is_nontemporal && begins_on_cache_lines(product.c);
    const int64_t rows = product.c.rows;
    const bool is_skinny =
        0 < rows && rows <= max_rows_in_place<ElementOf<T>>(product.b) && a.columns() > 0 && product.b.index == nullptr;
    if (is_skinny) {
      multiply_skinny_of(a, stored_group, packed_a, product);
    } else {
      stored_group = 0;
      multiply(packed_a, product);
    }
    // Another thread may read c as soon as this call has returned.
    if (product.is_nontemporal) fence_nontemporal_stores();
  }
}

}  // namespace

template <class T>
void tile_gemm(const TileGemm<T>& p, const Executor& /*executor*/) {
  const int64_t depth = p.a.columns() < 1 ? 1 : p.a.columns();
  // A multiple of MR, so that only the last block of rows has a micro-tile of fewer rows.
  const int64_t height = (kMaxPackedA / depth / kMR + 1) * kMR;
  for (int64_t ic = 0; ic < p.a.rows(); ic += height) multiply_rows(p, ic, at_most(ic + height, p.a.rows()));
}

MAXMOE_INSTANTIATE(tile_gemm, TileGemm)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
