#include "kernels/experts/expert_ffn.h"

#include "kernels/experts/activation.simd.h"
#include "kernels/experts/expert_tasks.simd.h"
#include "kernels/matrix/row.simd.h"
#include "kernels/rows/ragged_gather_reduce.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

// The scratch slots of a tile: A, Z, and the reduced rows.
constexpr int kActivatedScratch = 1;
constexpr int kPreactivationsScratch = 2;
constexpr int kReducedScratch = 3;

// Number of columns of the preactivations Z.
template <class T>
int64_t preactivation_width(const ExpertProjections<T>& experts) {
  return experts.gate.columns() + experts.up.columns();
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
  const int64_t gate = a.experts.gate.factors.rank();
  const int64_t up = a.experts.up.factors.rank();
  const int64_t columns = gate + up + a.experts.down.factors.rank();
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
  // Computes the reduced rows of a projection with factors.
  MAXMOE_INLINE void add_reduced(const Projection<T>& projection, int64_t group, MatrixView<T> reduced) {
    if (!projection.factors.empty()) add({projection.factors.a[group], reduced, false});
  }
  // Computes the rows of a projection. The bias is copied to `out`, and the product is added to it. `next_b` is the
  // matrix of the next product.
  MAXMOE_INLINE void add_projected(const Projection<T>& projection, int64_t group, MatrixView<T> reduced,
                                   MatrixView<T> out, const GemmOperand<T>& next_b) {
    const bool has_bias = projection.has_bias();
    for (int64_t r = 0; r < out.rows && has_bias; ++r) copy_row(projection.bias.row(group), out.row(r), out.columns);
    Product<T> product{projection.weights[group], out, has_bias, /*is_nontemporal=*/false, next_b};
    if (!projection.factors.empty()) {
      product.reduced = reduced.as_const();
      product.expand = projection.factors.b[group];
    }
    add(product);
  }
};

// Computes Z of a tile, and the reduced rows of gate and up. `next` is the matrix that is prefetched at the end.
template <class T>
void project_tokens(const ExpertFfn<T>& a, const GroupTile& tile, MatrixView<T> preactivations,
                    const ReducedRows<T>& reduced, const GemmOperand<T>& next) {
  const ExpertProjections<T>& experts = a.experts;
  const int64_t group = tile.group;
  const int64_t gate_width = experts.gate.columns();
  // gate and up are products of the same tokens, which are packed once.
  Products<T> products;
  products.add_reduced(experts.gate, group, reduced.gate);
  products.add_reduced(experts.up, group, reduced.up);
  if (a.kind.gate == GateLayout::separate) {
    products.add_projected(experts.gate, group, reduced.gate, gate_columns(preactivations, gate_width),
                           experts.up.weights[group]);
  }
  products.add_projected(experts.up, group, reduced.up, up_columns(preactivations, gate_width), next);
  a.gemm->multiply(tokens_of(a.x, a.routed, tile.begin, tile.end), products.list, products.count);
}

// Computes one tile: preactivations, activation and the output rows. The tile stays in a cache from one product to the
// next. `next_group` is the group that this thread will probably compute next; its first matrix is prefetched at the
// end.
template <class T>
void forward_tile(const ExpertFfn<T>& a, const GroupTile& tile, int64_t next_group) {
  const ExpertProjections<T>& experts = a.experts;
  const int64_t height = tile.end - tile.begin;
  const int64_t width = experts.down.rows();
  const MatrixView<T> preactivations = preactivations_of(a, tile);
  const ReducedRows<T> reduced = reduced_rows_of(a, tile);
  const Projection<T>& first = experts.gate.empty() ? experts.up : experts.gate;
  const GemmOperand<T> of_next_tile = first.weights[next_group];
  project_tokens(a, tile, preactivations, reduced,
                 wants_only_preactivations(a) ? of_next_tile : experts.down.weights[tile.group]);
  if (wants_only_preactivations(a) && experts.down.factors.empty()) return;

  const MatrixView<T> activated{scratch<T>(kActivatedScratch, height * width), height, width, width};
  activate_rows(a.kind, preactivations.as_const(), activated);
  Products<T> products;
  products.add_reduced(experts.down, tile.group, reduced.down);
  if (!wants_only_preactivations(a)) {
    products.add_projected(experts.down, tile.group, reduced.down, a.rows.row_range(tile.begin, tile.end),
                           of_next_tile);
  }
  a.gemm->multiply(activated.as_const(), products.list, products.count);
}

}  // namespace

// The rows of a token are summed in a second pass, in the order of its slots. Adding them inside the tasks would need
// atomics, and the order of the sum would depend on the threads.
template <class T>
void expert_ffn(const ExpertFfn<T>& a, const Executor& executor) {
  const int64_t width = a.experts.down.rows();
  const int64_t multiply_adds = a.x.columns * (preactivation_width(a.experts) + width);
  const int64_t depth = a.x.columns < width ? width : a.x.columns;
  const int64_t num_rows = wants_only_preactivations(a) ? a.preactivations.rows : a.rows.rows;
  run_tiles(a, num_rows, depth, multiply_adds, executor,
            [&](const GroupTile& tile, int64_t next_group) { forward_tile(a, tile, next_group); });
  if (wants_only_preactivations(a)) return;
  ragged_gather_reduce(
      RaggedGatherReduce<T>{a.rows.as_const(), a.routed.row_of_slot, a.routed.top_k, a.weights, nullptr, a.out},
      executor);
}

MAXMOE_INSTANTIATE(expert_ffn, ExpertFfn)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
