#include "kernels/experts/expert_ffn.h"

#include "kernels/experts/activation.simd.h"
#include "kernels/experts/expert_rows.simd.h"
#include "kernels/experts/expert_tasks.simd.h"
#include "kernels/matrix/row.simd.h"
#include "kernels/rows/ragged_unsort.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

// The scratch slots of a tile: A, Z, and the reduced rows.
constexpr int kActivatedScratch = 1;
constexpr int kPreactivationsScratch = 2;
constexpr int kReducedScratch = 3;

// F, the number of rows of down.
template <class T>
int64_t intermediate_size(const ExpertWeights<T>& experts) {
  return experts.down.rows();
}

// Number of columns of the preactivations Z.
template <class T>
int64_t preactivation_width(const ExpertWeights<T>& experts) {
  return experts.gate.columns() + experts.up.columns();
}

// The product out = a * b + bias for some a. The bias is copied to `out`, and the product is added to it.
template <class T>
Product<T> product_with_bias(const GemmOperand<T>& b, const T* bias, MatrixView<T> out, const GemmOperand<T>& next_b) {
  for (int64_t r = 0; r < out.rows && bias != nullptr; ++r) copy_row(bias, out.row(r), out.columns);
  return {b, out, bias != nullptr, /*is_nontemporal=*/false, next_b};
}

// The bias of one expert; null without biases.
template <class T>
const T* bias_row(ConstMatrixView<T> bias, int64_t group) {
  return bias.data == nullptr ? nullptr : bias.row(group);
}

// A = activation(Z), in blocks of columns that stay in the first-level cache.
template <class T>
void activate_rows(const ActivationKind& kind, ConstMatrixView<T> preactivations, MatrixView<T> activated) {
  for (int64_t r = 0; r < activated.rows; ++r) {
    for (int64_t begin = 0; begin < activated.columns; begin += kColumnBlock) {
      const int64_t size = at_most(activated.columns - begin, kColumnBlock);
      const auto block = activate_block<T, false>(kind, preactivations.row(r), activated.columns, begin, size);
      narrow_row<T>(block.activated.data(), activated.row(r) + begin, size);
    }
  }
}

// Whether only Z is computed: the backward pass recomputes it if it was not kept.
template <class T>
bool wants_only_preactivations(const ExpertFfn<T>& a) {
  return a.out.data == nullptr;
}

// Z of a tile, which is stored for the backward pass, or in scratch memory if the caller does not keep it.
template <class T>
MatrixView<T> preactivations_of(const ExpertFfn<T>& a, const GroupTile& tile) {
  if (a.preactivations.data != nullptr) return a.preactivations.row_range(tile.begin, tile.end);
  const int64_t height = tile.end - tile.begin;
  const int64_t columns = preactivation_width(a.experts);
  return {scratch<T>(kPreactivationsScratch, height * columns), height, columns, columns};
}

// The reduced rows of a tile, stored or in scratch memory like Z.
template <class T>
ReducedRows<T> reduced_rows_of(const ExpertFfn<T>& a, const GroupTile& tile) {
  if (!a.reduced.empty()) return a.reduced.row_range(tile.begin, tile.end);
  const int64_t gate = a.experts.gate_factors.rank();
  const int64_t up = a.experts.up_factors.rank();
  const int64_t columns = gate + up + a.experts.down_factors.rank();
  const int64_t height = tile.end - tile.begin;
  const MatrixView<T> all{scratch<T>(kReducedScratch, height * columns), height, columns, columns};
  return {all.column_range(0, gate), all.column_range(gate, gate + up), all.column_range(gate + up, columns)};
}

// The products of one operand, which packs it once: at most gate and up, each after the product with its factor.
template <class T>
struct Products {
  Product<T> list[4];
  int64_t count = 0;

  MAXMOE_INLINE void add(const Product<T>& product) { list[count++] = product; }
  // Computes the reduced rows of a matrix with factors.
  MAXMOE_INLINE void add_reduced(const LowRankFactors<T>& factors, int64_t group, MatrixView<T> reduced) {
    if (!factors.empty()) add({factors.reduce[group], reduced, false});
  }
  // Adds a product with a matrix, and the term of its factors.
  MAXMOE_INLINE void add_projected(Product<T> product, const LowRankFactors<T>& factors, int64_t group,
                                   MatrixView<T> reduced) {
    if (!factors.empty()) {
      product.reduced = reduced.as_const();
      product.expand = factors.expand[group];
    }
    add(product);
  }
};

// Computes Z of a tile, and the reduced rows of gate and up. `next` is the matrix that is prefetched at the end.
template <class T>
void project_tokens(const ExpertFfn<T>& a, const GroupTile& tile, MatrixView<T> preactivations,
                    const ReducedRows<T>& reduced, const GemmOperand<T>& next) {
  const ExpertWeights<T>& experts = a.experts;
  const int64_t group = tile.group;
  const int64_t gate_width = experts.gate.columns();
  const GemmOperand<T> up = experts.up[group];
  // gate and up are products of the same tokens, which are packed once.
  Products<T> products;
  products.add_reduced(experts.gate_factors, group, reduced.gate);
  products.add_reduced(experts.up_factors, group, reduced.up);
  if (a.kind.gate == GateLayout::separate) {
    products.add_projected(product_with_bias(experts.gate[group], bias_row(experts.gate_bias, group),
                                             gate_columns(preactivations, gate_width), up),
                           experts.gate_factors, group, reduced.gate);
  }
  products.add_projected(
      product_with_bias(up, bias_row(experts.up_bias, group), up_columns(preactivations, gate_width), next),
      experts.up_factors, group, reduced.up);
  a.gemm->multiply(tokens_of(a.x, a.routed, tile.begin, tile.end), products.list, products.count);
}

// Computes one tile: preactivations, activation and the output rows. The tile stays in a cache from one product to the
// next. `next_group` is the group that this thread will probably compute next; its first matrix is prefetched at the
// end.
template <class T>
void forward_tile(const ExpertFfn<T>& a, const GroupTile& tile, int64_t next_group) {
  const ExpertWeights<T>& experts = a.experts;
  const int64_t height = tile.end - tile.begin;
  const int64_t width = intermediate_size(experts);
  const MatrixView<T> preactivations = preactivations_of(a, tile);
  const ReducedRows<T> reduced = reduced_rows_of(a, tile);
  const GemmOperand<T> down = experts.down[tile.group];
  const GemmOperand<T> of_next_tile = experts.gate.empty() ? experts.up[next_group] : experts.gate[next_group];
  project_tokens(a, tile, preactivations, reduced, wants_only_preactivations(a) ? of_next_tile : down);
  if (wants_only_preactivations(a) && experts.down_factors.empty()) return;

  const MatrixView<T> activated{scratch<T>(kActivatedScratch, height * width), height, width, width};
  activate_rows(a.kind, preactivations.as_const(), activated);
  Products<T> products;
  products.add_reduced(experts.down_factors, tile.group, reduced.down);
  if (!wants_only_preactivations(a)) {
    products.add_projected(product_with_bias(down, bias_row(experts.down_bias, tile.group),
                                             a.rows.row_range(tile.begin, tile.end), of_next_tile),
                           experts.down_factors, tile.group, reduced.down);
  }
  a.gemm->multiply(activated.as_const(), products.list, products.count);
}

}  // namespace

// The rows of a token are summed in a second pass, in the order of its slots. Adding them inside the tasks would need
// atomics, and the order of the sum would depend on the threads.
template <class T>
void expert_ffn(const ExpertFfn<T>& a, const Executor& executor) {
  const int64_t width = intermediate_size(a.experts);
  const int64_t multiply_adds = a.x.columns * (preactivation_width(a.experts) + width);
  const int64_t depth = a.x.columns < width ? width : a.x.columns;
  const int64_t num_rows = wants_only_preactivations(a) ? a.preactivations.rows : a.rows.rows;
  run_tiles(a, num_rows, depth, multiply_adds, executor,
            [&](const GroupTile& tile, int64_t next_group) { forward_tile(a, tile, next_group); });
  if (wants_only_preactivations(a)) return;
  ragged_unsort(RaggedUnsort<T>{a.rows.as_const(), a.routed.row_of_slot, a.routed.top_k, a.weights, a.out}, executor);
}

MAXMOE_INSTANTIATE(expert_ffn, ExpertFfn)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
