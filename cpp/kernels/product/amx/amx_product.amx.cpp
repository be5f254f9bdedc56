// The product of bfloat16 matrices on the tiles of AMX.
//
// A tile register holds 16 rows of 64 bytes. An instruction multiplies a tile of A, 16 rows and 32 numbers of the inner
// dimension, with a tile of B, 16 pairs of the inner dimension and 16 columns, and adds the result to a tile of C. A
// micro-tile of C is 32 x 32 numbers in four tiles.
//
// Packed B has the layout that the kernels of AVX512-BF16 read: micro-panels of 32 columns, pairs of the inner
// dimension, in each step the even columns before the odd ones. A tile of B is every other cache line of a panel.
// Panels are padded with zeros to whole tiles.
//
// The loops, outermost first:
//
//   ic  blocks of rows of A and C                                          multiply_with_tiles
//   jc  blocks of columns of B and C                                       PanelsOfB
//   pc  blocks of the inner dimension: pack A the first time               PanelsOfB
//   jr  micro-panels of B: each is packed beside the one before            Multiplication
//   ir  micro-tiles of C                                                   Multiplication
//   k   steps of the inner dimension                                       multiply_micro_tile
//
// A micro-panel of B, at most 32 KiB, stays in the first-level cache during ir, and A streams from the second-level
// cache. Vector instructions pack B, round C and prefetch beside the products, which another unit of the processor
// computes.
//
// With few rows a product is bound by reading B from memory. Then blocks have the shape that memory gives fastest: a
// few long rows of a row-major B, whole columns of a transposed one.
//
// A number of C is the sum of blocks of 32 numbers of the inner dimension, in their order; the processor computes a
// block as two chains of 16 fused multiply-adds, which are added to each other and then to the sum. So the bits of a
// row depend neither on the rows beside it nor on the tiling.
#include "kernels/product/amx/amx_product.h"

#include <array>

#include "kernels/product/amx/few_rows.amx.h"
#include "kernels/product/amx/micro_kernel.amx.h"
#include "kernels/product/tiled/pack_quantized.simd.h"
#include "kernels/quantized/decode_rows.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

// Maximum number of elements of A that are packed at a time, which limits the scratch memory.
constexpr int64_t kMaxPackedA = int64_t{1} << 22;
// Largest number of tiles of rows for which a product is bound by reading B.
constexpr int64_t kFewRowTiles = 2;

// A block of B: its lines are prefetched while the block before is multiplied.
struct BlockSize {
  int64_t depth;
  int64_t columns;
};

BlockSize block_size(const GemmOperand<BFloat16>& b, const RowTiles& rows) {
  if (rows.count > kFewRowTiles) return {256, 128};
  return b.is_transposed ? BlockSize{4096, kPanelColumns} : BlockSize{64, 1024};
}

// A micro-panel of B in the order of the loops.
struct Position {
  int64_t product = 0;
  int64_t part = 0;  // 1 for the low-rank term
  Range columns{};   // of the block
  Range block{};     // the inner dimension of the block
  Range depth{};     // of the panel
  int64_t column = 0;
};

// All products of one A.
class Multiplication {
 public:
  Multiplication(const GemmOperand<BFloat16>& a, const Product<BFloat16>* products, int64_t count)
      : rows_(a.rows()),
        tiles_of_a_(a, kPackedAScratch),
        reduced_(GemmOperand<BFloat16>(), kPackedReducedScratch),
        products_(products),
        count_(count),
        panels_(scratch<BFloat16Pair>(kPackedBScratch, 2 * kPanelSize)) {
    beside_.prefetches_panel = rows_.count > kFewRowTiles;
  }

  void multiply() {
    const ConfiguredTiles tiles(configuration_for(rows_.height));
    Position at{-1};
    if (!begin_product(at, 0)) return;
    finish_packing(begin_packing(at, 0));
    bool exists = true;
    for (int64_t which = 0; exists; which = 1 - which) {
      Position next = at;
      exists = advance(next);
      if (at.product != current_) enter_product(at);
      if (at.column == at.columns.begin && at.depth.begin == at.block.begin) enter_block(at);
      const Packing packing = exists ? begin_packing(next, 1 - which) : Packing::at_once;
      beside_.units_per_tile = (beside_.panel.units() + num_row_panels() - 1) / num_row_panels();
      multiply_panel(at, panels_ + which * kPanelSize, packing);
      finish_packing(packing);
      at = next;
    }
    leave_product();
  }

 private:
  static constexpr int64_t kPanelSize = kPanelColumns * kPanelDepth / 2;

  int64_t num_row_panels() const { return (rows_.count + 1) / 2; }
  const Product<BFloat16>& product(int64_t index) const { return products_[index]; }
  GemmOperand<BFloat16> b_of(const Position& at) const {
    const Product<BFloat16>& of = product(at.product);
    return at.part == 0 ? of.b : GemmOperand<BFloat16>(of.expand);
  }

  // A block of a part, from (depth, column) on.
  void begin_block_at(Position& at, int64_t depth, int64_t column) const {
    const GemmOperand<BFloat16> b = b_of(at);
    const BlockSize size = block_size(b, rows_);
    // The low-rank term has the columns of its product's block.
    if (at.part == 0) at.columns = range_from(column, size.columns, b.columns());
    at.block = range_from(depth, size.depth, b.rows());
    at.depth = range_from(depth, kPanelDepth, at.block.end);
    at.column = at.columns.begin;
  }

  // The first panel of the next product that computes something.
  bool begin_product(Position& at, int64_t first) const {
    for (at.product = first; at.product < count_; ++at.product) {
      const Product<BFloat16>& of = product(at.product);
      const bool adds_nothing = of.accumulate && of.b.rows() == 0 && !of.has_low_rank_term();
      if (of.c.columns == 0 || adds_nothing) continue;
      at.part = 0;
      begin_block_at(at, 0, 0);
      return true;
    }
    return false;
  }

  bool advance(Position& at) const {
    at.column += kPanelColumns;
    if (at.column < at.columns.end) return true;
    at.column = at.columns.begin;
    if (at.depth.end < at.block.end) {
      at.depth = range_from(at.depth.end, kPanelDepth, at.block.end);
      return true;
    }
    const Product<BFloat16>& of = product(at.product);
    if (at.block.end < b_of(at).rows()) {
      begin_block_at(at, at.block.end, at.columns.begin);
    } else if (at.part == 0 && of.has_low_rank_term()) {
      at.part = 1;
      begin_block_at(at, 0, at.columns.begin);
    } else if (at.columns.end < of.c.columns) {
      at.part = 0;
      begin_block_at(at, 0, at.columns.end);
    } else {
      return begin_product(at, at.product + 1);
    }
    return true;
  }

  void enter_product(const Position& at) {
    leave_product();
    current_ = at.product;
    const Product<BFloat16>& of = product(at.product);
    // The reduced rows may be the result of the product before.
    reduced_ = TilesOfA(of.reduced, kPackedReducedScratch);
    const int64_t columns = round_up(at_most(block_size(of.b, rows_).columns, of.c.columns), kPanelColumns);
    const int64_t micro_tile = 2 * rows_.height * kPanelColumns;
    rounded_ = scratch<float>(kSumsScratch, rows_.padded_rows() * columns + 2 * micro_tile);
    sums_ = rounded_ + 2 * micro_tile;
  }

  // Another thread may read c afterwards.
  void leave_product() {
    beside_.finished.store();
    if (current_ >= 0 && product(current_).is_nontemporal) fence_nontemporal_stores();
  }

  // Prepares the sums of a block, and prefetches the block after it beside its products.
  void enter_block(const Position& at) {
    const Product<BFloat16>& of = product(at.product);
    Position last = at;
    last.column = at.columns.end;
    last.depth = {at.block.end, at.block.end};
    beside_.lines =
        advance(last) ? BlockPrefetch(b_of(last), last.block, last.columns) : lines_of_first_block(of.next_b);
    const int64_t panels = (at.columns.size() + kPanelColumns - 1) / kPanelColumns;
    const int64_t steps = num_row_panels() * steps_of(at.block) * panels;
    beside_.lines_per_step = steps == 0 ? 0 : (beside_.lines.num_lines() + steps - 1) / steps;
    const bool is_first = at.part == 0 && at.block.begin == 0;
    if (is_first && of.accumulate) begin_with(of.c.column_range(at.columns.begin, at.columns.end).as_const());
  }

  // Of a product that another call computes.
  BlockPrefetch lines_of_first_block(const GemmOperand<BFloat16>& next_b) const {
    const BlockSize size = block_size(next_b, rows_);
    return {next_b, range_from(0, size.depth, next_b.rows()), range_from(0, size.columns, next_b.columns())};
  }

  float* sums_of(const Position& at) const { return sums_ + (at.column - at.columns.begin) * rows_.padded_rows(); }

  // The sums of a product that is added to c begin with c.
  void begin_with(ConstMatrixView<BFloat16> c) {
    for (int64_t column = 0; column < c.columns; column += kPanelColumns) {
      float* const sums = sums_ + column * rows_.padded_rows();
      for (int64_t r = 0; r < c.rows; ++r) load_sums(c.row(r) + column, c.columns - column, sums + r * kPanelColumns);
    }
  }

  // Packs a panel, or says how it is packed in units.
  Packing begin_packing(const Position& at, int64_t which) {
    const GemmOperand<BFloat16> b = b_of(at);
    BFloat16Pair* const target = panels_ + which * kPanelSize;
    const Range columns = range_from(at.column, kPanelColumns, at.columns.end);
    beside_.panel = {};
    const bool is_whole = at.depth.size() % kTileDepth == 0;
    if (b.is_quantized() || columns.size() < kPanelColumns || (b.is_transposed && !(is_whole && b.index == nullptr))) {
      pack_panel(b, at.depth, columns, target);
      return Packing::at_once;
    }
    if (b.is_transposed) {
      const ConstMatrixView<BFloat16> memory = b.memory.row_range(columns.begin, columns.end);
      beside_.panel = {memory.column_range(at.depth.begin, at.depth.end), target};
      return Packing::transposed;
    }
    beside_.panel = {b, at.depth, at.column, steps_of(at.depth) * kTileDepth, target};
    return Packing::row_major;
  }

  void finish_packing(Packing packing) {
    if (packing == Packing::row_major) beside_.panel.advance<Packing::row_major>(beside_.panel.units(), beside_.lines);
    if (packing == Packing::transposed)
      beside_.panel.advance<Packing::transposed>(beside_.panel.units(), beside_.lines);
  }

  static void pack_panel(const GemmOperand<BFloat16>& b, Range depth, Range columns, BFloat16Pair* target) {
    const int64_t steps = steps_of_depth<BFloat16Pair>(depth.size());
    if (steps == 0) return;
    if (b.is_quantized() && !kDecodesPairs<BFloat16Pair>) {
      pack_b(decoded_block(b, depth, columns), {0, depth.size()}, {0, columns.size()}, target);
    } else {
      pack_columns_of_b(b, depth, columns, target);
    }
    zero_row(target + steps * kPanelColumns, (steps_of(depth) * kTileDepth / 2 - steps) * kPanelColumns);
  }

  template <int kRowTiles>
  static auto micro_kernel_of(Packing packing) {
    if (packing == Packing::row_major) return multiply_micro_tile<kRowTiles, Packing::row_major>;
    if (packing == Packing::transposed) return multiply_micro_tile<kRowTiles, Packing::transposed>;
    return multiply_micro_tile<kRowTiles, Packing::at_once>;
  }

  void multiply_panel(const Position& at, const BFloat16Pair* panel, Packing packing) {
    const Product<BFloat16>& of = product(at.product);
    const bool has_sums = at.part == 1 || at.depth.begin > 0 || of.accumulate;
    const bool is_last = at.depth.end == b_of(at).rows() && (at.part == 1 || !of.has_low_rank_term());
    TilesOfA& a = at.part == 0 ? tiles_of_a_ : reduced_;
    a.prepare(at.depth.end);
    beside_.c_stride = of.c.row_stride;
    for (int64_t tile = 0; tile < rows_.count; tile += 2) {
      const int64_t row = tile * rows_.height;
      const int64_t num_rows = at_most(2 * rows_.height, of.c.rows - row);
      float* const sums = sums_of(at) + row * kPanelColumns;
      float* const out = is_last ? rounded_ + which_ * 2 * rows_.height * kPanelColumns : sums;
      BFloat16* const c = of.c.row(row) + at.column;
      beside_.c = is_last && !of.is_nontemporal ? c : nullptr;
      const bool has_two = tile + 1 < rows_.count;
      (has_two ? micro_kernel_of<2>(packing) : micro_kernel_of<1>(packing))(a.panel(at.depth.begin, tile), rows_.height,
                                                                            panel, steps_of(at.depth),
                                                                            has_sums ? sums : nullptr, out, beside_);
      if (!is_last) continue;
      beside_.finished = {
          out, c, of.c.row_stride, num_rows, at_most(kPanelColumns, at.columns.end - at.column), of.is_nontemporal};
      which_ = 1 - which_;
    }
  }

  RowTiles rows_;
  TilesOfA tiles_of_a_;
  TilesOfA reduced_;  // of the product that is computed
  const Product<BFloat16>* products_;
  int64_t count_;
  int64_t current_ = -1;  // the product that is computed
  BFloat16Pair* panels_;  // two: one is multiplied while the next one is packed
  float* sums_ = nullptr;
  float* rounded_ = nullptr;  // two micro-tiles: one is computed while the other is rounded
  int64_t which_ = 0;
  Beside beside_;
};

// At most gate and up, each after the product with its factor.
constexpr int64_t kMaxProducts = 4;

// Computes at most kMaxProducts products for rows [begin, end) of A, in order: one may read the result of another.
// Neighbouring products on tiles are computed together.
void multiply_rows(const TileGemm<BFloat16>& p, int64_t begin, int64_t end) {
  const GemmOperand<BFloat16> a = p.a.row_range(begin, end);
  std::array<Product<BFloat16>, kMaxProducts> on_tiles;
  int64_t count = 0;
  const auto multiply_on_tiles = [&] {
    if (count > 0) Multiplication(a, on_tiles.data(), count).multiply();
    count = 0;
  };
  for (int64_t i = 0; i < p.count; ++i) {
    Product<BFloat16> product = p.products[i];
    product.c = product.c.row_range(begin, end);
    product.reduced = product.reduced.row_range(begin, end);
    product.is_nontemporal = product.is_nontemporal && begins_on_cache_lines(product.c);
    if (!multiplies_few_rows(a.rows(), product)) {
      product.b = with_scales_read<BFloat16Pair>(product.b);
      on_tiles[static_cast<size_t>(count++)] = product;
      continue;
    }
    multiply_on_tiles();
    const FlushedSubnormals flushed;
    multiply_few_rows(a, product);
    if (product.is_nontemporal) fence_nontemporal_stores();
  }
  multiply_on_tiles();
}

}  // namespace

void multiply_with_tiles(const TileGemm<BFloat16>& p) {
  const int64_t depth = p.a.columns() < 1 ? 1 : p.a.columns();
  const int64_t height = (kMaxPackedA / depth / (2 * kMaxTileRows) + 1) * 2 * kMaxTileRows;
  for (int64_t first = 0; first < p.count; first += kMaxProducts) {
    const TileGemm<BFloat16> part{p.a, p.products + first, at_most(kMaxProducts, p.count - first)};
    for (int64_t ic = 0; ic < p.a.rows(); ic += height) multiply_rows(part, ic, at_most(ic + height, p.a.rows()));
  }
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
