"""Running a module on a mesh: every rank its own tokens, parameters gathered for as long as they are used."""

from torch import nn

from maxmoe.sharding.assign import assign
from maxmoe.sharding.fsdp import fully_shard_blocks
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.named_sharding import NamedSharding
from maxmoe.sharding.plan import Plan
from maxmoe.sharding.rules import LogicalRules
from maxmoe.sharding.shard_parameters import distribute_parameters
from maxmoe.sharding.unit import ParallelUnit


def parallelize(
    module: nn.Module, mesh: Mesh, rules: LogicalRules | str = "ep-as-dp", *, strict: bool = False
) -> nn.Module:
    """Shard the parameters of a module, and let it run on every rank's own tokens.

    Afterwards the module takes and returns plain tensors: the sequences that the axes of `activation_batch` give this
    rank, or the parts that those of `activation_length` give it. Ranks that differ on other axes hold the same tokens.
    Parameters and their gradients are DTensors. Each rank calls backward on the sum of its token losses plus the
    auxiliary loss, which is global: the gradients are those of the sum over all tokens plus the auxiliary loss, once.

    Parameters are gathered before the forward of their module, dropped after it, gathered again in the backward, and
    their gradients scattered. Where it can, FSDP2 does that for the `fsdp` axis, block by block; see `left_to_fsdp`.
    A loss must come from what modules return: a tensor that a hook has taken from inside leads the backward to
    parameters that are not there.

    A module with an attribute `parallel_dims` gathers the parameters of its children along with its own. The keys are
    logical names of dims inside of it, with the number of parts that may be told apart (heads, say). Where weights and
    activations of all of them lie on one axis, that axis is not gathered: the ranks along it compute a part of those
    dims each, and the sum of their outputs is taken. The outputs must be linear in the last of these dims.

    Args:
        module: with logical names, see `logical_names`.
        mesh: of the ranks.
        rules: the table, or the name of a preset.
        strict: see `assign`.

    Returns:
        The module.

    Raises:
        ValueError: for what `shard_parameters` refuses, and if the rules cut sequences that a layer needs whole.
    """
    rules = LogicalRules.load(rules)
    plan = Plan(module, mesh, rules, assign(module, mesh, rules, strict=strict))
    tokens = plan.tokens
    for path, child in plan.modules.items():
        if tokens.length_axes and getattr(child, "needs_whole_sequences", False):
            raise ValueError(
                f"{path or type(child).__name__} needs whole sequences, cut here over {tokens.length_axes}"
            )
    found = {name: parameter.moves.value.source.spec for name, parameter in plan.parameters.items()}
    distribute_parameters(module, {name: NamedSharding(mesh, spec) for name, spec in found.items()})
    for child in plan.modules.values():
        if hasattr(child, "token_layout"):
            child.token_layout = tokens
    for unit, names in plan.units.items():
        moves = {path: plan.parameters[name].moves for path, name in names.items()}
        ParallelUnit(mesh, plan.kept[unit], moves).attach(unit)
    fully_shard_blocks(module, mesh, plan.by_fsdp)
    return module
