// The product as a loop nest around a micro-kernel, in the words of BLIS (Van Zee and van de Geijn, 2015). Its loops,
// outermost first:
//
//   ic  blocks of rows of A and C                           tile_gemm
//   jc  blocks of NC columns of B and C                     multiply
//   pc  blocks of KC of the inner dimension: packs A and B  multiply
//   ir  micro-tiles of C, of MR rows                        multiply_block
//   jr  micro-panels of B, of NR columns                    multiply_block
//   k   steps of the inner dimension                        micro_kernel
//
// ic runs once unless packed A would be too much scratch memory. A micro-tile of C stays in registers during k, a
// micro-panel of A in the first-level cache during jr, and the block of B, KC x NC, in the second-level cache during
// ir. Meanwhile the next block of B is prefetched. Every element of A and of B is packed once: A is packed while the
// first block of columns is computed, and kept.
//
// With few rows of A each element of packed B is used so rarely that packing costs more than it saves. Then B is read
// in place (few_rows.h).
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

// Steps of the inner dimension in a block, and columns of B. A block of B takes 256 KiB with AVX-512 and 128 KiB with
// AVX2: with the next block beside it, half of a second-level cache. The next block continues the sums in the
// accumulator's type, so that KC does not change the bits of a result.
constexpr int64_t kKCSteps = 512;
template <class S>
constexpr int64_t kNC = 4 * int64_t{kNR<S>};

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

// The cache lines of a block of B, prefetched a few at a time into the second-level cache: rows of large matrices are
// pages apart, where hardware prefetchers stop.
class BlockPrefetch {
 public:
  template <class T>
  BlockPrefetch(const GemmOperand<T>& b, Range depth, Range columns) {
    const Range rows = b.is_transposed ? columns : depth;
    const Range elements = b.is_transposed ? depth : columns;
    if (b.index != nullptr || rows.size() <= 0 || elements.size() <= 0) return;
    first_ = reinterpret_cast<const std::byte*>(b.memory.row(rows.begin) + elements.begin);
    stride_ = b.memory.row_stride * int64_t{sizeof(T)};
    row_bytes_ = elements.size() * int64_t{sizeof(T)};
    num_rows_ = rows.size();
  }

  int64_t num_lines() const { return num_rows_ * ((row_bytes_ + kCacheLineBytes - 1) / kCacheLineBytes); }

  void advance(int64_t num_lines) {
    for (; num_lines > 0 && row_ < num_rows_; --num_lines) {
      __builtin_prefetch(first_ + row_ * stride_ + offset_, /*write*/ 0, /*locality: L2*/ 2);
      offset_ += kCacheLineBytes;
      if (offset_ >= row_bytes_) {
        offset_ = 0;
        ++row_;
      }
    }
  }

 private:
  const std::byte* first_ = nullptr;
  int64_t stride_ = 0;
  int64_t row_bytes_ = 0;
  int64_t num_rows_ = 0;
  int64_t row_ = 0;
  int64_t offset_ = 0;
};

// Packed blocks of A and B, and the sums that a block of the inner dimension goes on with: NR wide columns of C, one
// after the other, in the order of VectorX2.
template <class T, class Element>
struct Block {
  const Element* a;
  const Element* b;
  int64_t num_steps;
  Accumulator<T>* sums;
  int64_t sums_rows;
  bool has_sums;  // from the block before
  bool is_last;
};

// A micro-tile that is rounded to the result's type. One that is not full is computed in a buffer and copied.
template <class T, class Element>
void multiply_last(const Element* a, const Element* b, int64_t num_steps, const Accumulator<T>* sums,
                   MatrixView<T> c_tile) {
  constexpr int64_t kWidth = kNR<Accumulator<T>>;
  const auto kernel = micro_kernel_of_rows<T, Element>(c_tile.rows);
  if (c_tile.columns == kWidth) return kernel(a, b, num_steps, sums, c_tile.data, c_tile.row_stride);
  T tile[kMR * kWidth];
  kernel(a, b, num_steps, sums, tile, kWidth);
  for (int64_t r = 0; r < c_tile.rows; ++r) copy_row(tile + r * kWidth, c_tile.row(r), c_tile.columns);
}

// c = a * b for one block: the loops ir and jr.
template <class T, class Element>
void multiply_block(const Block<T, Element>& block, MatrixView<T> c, BlockPrefetch next) {
  using S = Accumulator<T>;
  constexpr int64_t kWidth = kNR<S>;
  const int64_t num_tiles = (c.rows + kMR - 1) / kMR * ((c.columns + kWidth - 1) / kWidth);
  const int64_t lines_per_tile = (next.num_lines() + num_tiles - 1) / num_tiles;
  for (int64_t ir = 0; ir < c.rows; ir += kMR) {
    const int64_t ir_end = at_most(ir + kMR, c.rows);
    for (int64_t jr = 0; jr < c.columns; jr += kWidth) {
      const Element* a = block.a + ir / kMR * panel_size_of_a<Element>(block.num_steps);
      const Element* b = block.b + jr * block.num_steps;
      S* const sums = block.sums + jr * block.sums_rows + ir * kWidth;
      const S* const before = block.has_sums ? sums : nullptr;
      if (block.is_last) {
        multiply_last(a, b, block.num_steps, before,
                      c.row_range(ir, ir_end).column_range(jr, at_most(jr + kWidth, c.columns)));
      } else {
        micro_kernel_of_rows<S, Element>(ir_end - ir)(a, b, block.num_steps, before, sums, kWidth);
      }
      next.advance(lines_per_tile);
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

template <class T>
Range depth_block(const GemmOperand<T>& b, int64_t begin) {
  return range_from(begin, PackedA<T>::kKC, b.rows());
}

template <class T>
Range column_block(const GemmOperand<T>& b, int64_t begin) {
  return range_from(begin, kNC<Accumulator<T>>, b.columns());
}

// The block of B after this one, which may be that of the next product.
template <class T>
BlockPrefetch next_block(const Product<T>& p, Range depth, Range columns) {
  if (depth.end < p.b.rows()) return {p.b, depth_block(p.b, depth.end), columns};
  if (columns.end < p.b.columns()) return {p.b, depth_block(p.b, 0), column_block(p.b, columns.end)};
  const GemmOperand<T> next = p.next_b;
  return {next, depth_block(next, 0), column_block(next, 0)};
}

// The loops jc and pc. pc runs once even if the inner dimension is 0: c must become 0.
template <class T>
void multiply(PackedA<T>& a, const Product<T>& p) {
  using S = Accumulator<T>;
  using Element = ElementOf<T>;
  const int64_t depth = p.b.rows();
  const int64_t padded_rows = (p.c.rows + kMR - 1) / kMR * kMR;
  Element* const panels_of_b = scratch<Element>(kPackedBScratch, kNC<S> * kKCSteps);
  S* const sums = scratch<S>(kSumsScratch, padded_rows * kNC<S>);
  for (int64_t jc = 0; jc < p.c.columns; jc += kNC<S>) {
    const Range columns = column_block(p.b, jc);
    const MatrixView<T> c = p.c.column_range(columns.begin, columns.end);
    if (p.accumulate) load_sums(c.as_const(), padded_rows, sums);
    for (int64_t pc = 0; pc < depth || pc == 0; pc += PackedA<T>::kKC) {
      const Range inner = depth_block(p.b, pc);
      const Block<T, Element> block{a.block(inner),
                                    panels_of_b,
                                    steps_of_depth<Element>(inner.size()),
                                    sums,
                                    padded_rows,
                                    p.accumulate || pc > 0,
                                    /*is_last=*/inner.end == depth};
      pack_b(p.b, inner, columns, panels_of_b);
      multiply_block(block, c, next_block(p, inner, columns));
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
