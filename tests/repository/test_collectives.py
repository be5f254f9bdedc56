"""The condition of each collective of the package, which is equal on all ranks by construction.

A condition must not depend on one rank's memory, time, garbage collector, hash seed or errors. A new collective is
entered with its condition.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Functions that communicate, or that call one that does on the ranks of a group.
COMMUNICATE = {
    *("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"),
    *("all_gather_single", "reduce_scatter_single", "all_to_all_single", "all_gather_object", "barrier"),
    *("isend", "recv", "redistribute", "full_tensor", "distribute_tensor", "unshard"),
    *("new_group", "new_subgroups_by_enumeration"),
    *("check_ranks_agree", "redistribute_local", "redistribute_parameters", "start_collective", "all_gather_counts"),
    *("all_reduce_sequence", "all_reduce_batch"),
}
CALLER = "every call: the caller runs on all ranks of the group"
PLAN = "the plan of the module"
CONFIG = "the config of the layer"
COUNTS = "the counts of all ranks, which have been all-gathered"
DECIDED_BY = {
    "ranks/agreement.py check_ranks_agree": "every call; the texts are gathered if the reduced hashes differ",
    "parallel/dispatch/collectives.py AllGather.start": COUNTS,
    "parallel/dispatch/collectives.py ReduceScatter.start": COUNTS,
    "parallel/dispatch/collectives.py AllToAll.start": COUNTS,
    "parallel/dispatch/collectives.py all_gather_rows": CALLER,
    "parallel/dispatch/collectives.py reduce_scatter_rows": CALLER,
    "parallel/dispatch/collectives.py ragged_all_to_all": CALLER,
    "parallel/dispatch/partial_sums.py PartialSums.enter": PLAN,
    "parallel/dispatch/partial_sums.py PartialSums.copy_to_experts": PLAN,
    "parallel/dispatch/partial_sums.py PartialSums.reduce_from_experts": PLAN,
    "parallel/dispatch/partial_sums.py PartialSums.leave": PLAN,
    "parallel/dispatch/partial_sums.py PartialSums.all_reduce_dropped": PLAN,
    "parallel/dispatch/partial_sums.py _Assign.backward": PLAN,
    "parallel/dispatch/ragged_dispatcher.py RaggedAllToAll.exchange_counts": PLAN,
    "parallel/dispatch/ring_of_experts.py RingOfExperts.exchange_counts": PLAN,
    "parallel/dispatch/collectives.py all_gather_counts": CALLER,
    "expert_load/stats_accumulator.py StatsAccumulator._sums_over_ranks": "the layers, configs, whether on a mesh",
    "expert_load/stats_accumulator.py StatsAccumulator.update": CALLER,
    "expert_load/step_counts.py StepCounts.all_reduce": "whether torch.distributed is initialized",
    "ranks/named_collectives.py all_gather": CALLER,
    "ranks/named_collectives.py all_reduce": CALLER,
    "ranks/named_collectives.py all_to_all": CALLER,
    "ranks/named_collectives.py broadcast": CALLER,
    "ranks/named_collectives.py reduce_scatter": CALLER,
    "ranks/named_collectives.py _announce": "an environment variable, which all ranks have or none",
    "nn/losses.py load_balance_loss": CONFIG,
    "nn/step_balance.py step_balance_loss": CONFIG,
    "nn/losses.py router_z_loss": CONFIG,
    "nn/losses.py mean_over_tokens": "whether the caller gives num_tokens",
    "nn/losses.py count_tokens": CALLER,
    "nn/losses.py RoutingLosses.__call__": "the config of the layer, and whether a backward may follow",
    "optim/distributed_newton_schulz.py DistributedNewtonSchulz._all_to_all": "shapes and placements of all parameters",
    "optim/distributed_newton_schulz.py _group_of": "shapes and placements of all parameters",
    "optim/muon.py _local_gradient": "placements of parameter and gradient, which are in the plan",
    "adapters/stacked.py adapter_state_dict": "the parameters of the model",
    "parallel/clip_grad_norm.py _all_reduce": "the meshes of the parameters, and checksums that have been reduced",
    "parallel/clip_grad_norm.py _reduced": "placements of gradients that all ranks have, as reduced checksums say",
    "parallel/grad_scaler.py GradScaler._found": "whether torch.distributed is initialized",
    "parallel/apply/initialization.py _DrawnWhole.__torch_dispatch__": "the parameters that a module initializes",
    "parallel/apply/input_gradients.py InputGradientCheck.enter": "the mesh, and whether inputs are floating-point",
    "parallel/parallelize.py check_settings": CALLER,
    "parallel/apply/parameter_hooks.py ParameterHooks.gather": PLAN,
    "parallel/apply/parameter_hooks.py ParameterHooks.free.refill": PLAN,
    "parallel/apply/parameter_hooks.py Place.gather": PLAN,
    "parallel/apply/shard_parameters.py _broadcast": "the parameters of the model",
    "parallel/plan/sharded_tokens.py ShardedTokens.all_gather_sequence": PLAN,
    "parallel/plan/sharded_tokens.py ShardedTokens._all_reduce": PLAN,
    "parallel/plan/tensor_parallel_hooks.py TensorParallelHooks._mark_input": PLAN,
    "parallel/plan/tensor_parallel_hooks.py TensorParallelHooks.leave": PLAN,
    "parallel/plan/tensor_parallel_hooks.py ResidualReaderHook.enter": PLAN,
    "pipelining/pipeline.py Pipeline.clip_grad_norm_": "the number of stages",
    "pipelining/pipeline.py Pipeline._execute": CALLER,
    "pipelining/scheduled_run.py ScheduledRun.__init__": CALLER,
    "pipelining/scheduled_run.py ScheduledRun._evaluate": "the schedule and the number of micro-batches",
    "pipelining/scheduled_run.py ScheduledRun._receive": "the schedule and the number of micro-batches",
    "pipelining/pipeline.py Pipeline._output": "the number of stages",
    "pipelining/layer_losses.py LayersOfStages.all_reduce": "the number of stages",
    "sharding/mesh.py Mesh.__init__": CALLER,
    "sharding/mesh.py _device_mesh": "the sizes of the mesh, which have been compared",
    "sharding/mesh.py _joint_group": "axes of the plan",
    "sharding/redistribute.py redistribute": "both shardings",
    "sharding/redistribute.py _all_gather": "both shardings",
    "sharding/redistribute.py _reduce_scatter": "both shardings",
    "sharding/redistribute.py _run": "both shardings",
    "testing/layout.py Entries.of": "placements of the tensor",
    "ranks/rank_processes.py _main": "every process that has not failed; a failure ends all of them",
    "ranks/token_group.py FlattenedBatch.all_reduce_sequence": CALLER,
}


def communicating(path: Path) -> Iterator[str]:
    """Functions of a file that call one of `COMMUNICATE`, by their qualified names."""

    def visit(node: ast.AST, inside: tuple[str, ...]) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            is_scope = isinstance(child, ast.FunctionDef | ast.ClassDef)
            if isinstance(child, ast.Call) and _name(child.func) in COMMUNICATE:
                yield ".".join(inside)
            yield from visit(child, (*inside, child.name) if is_scope else inside)

    return visit(ast.parse(path.read_text()), ())


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def test_what_decides_every_collective_is_known() -> None:
    package = ROOT / "maxmoe"
    found = {
        f"{path.relative_to(package).as_posix()} {function}"
        for path in package.rglob("*.py")
        for function in communicating(path)
    }
    assert found - DECIDED_BY.keys() == set(), "say in DECIDED_BY what decides these, equally on all ranks"
    assert DECIDED_BY.keys() - found == set(), "these do not communicate any more"


def test_a_collective_of_torch_is_found(tmp_path: Path) -> None:
    source = "class A:\n    def f(self, x):\n        if x:\n            return [dist.all_reduce(x)]\n"
    (tmp_path / "a.py").write_text(source)
    assert [*communicating(tmp_path / "a.py")] == ["A.f"]
