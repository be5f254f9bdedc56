"""Check of the shards with which modules compute: each must consist of whole blocks of a quantized stack."""

from maxmoe.parallel.plan.parameter_sharding import ParameterSharding
from maxmoe.sharding.named_sharding import NamedSharding


def check_blocks(name: str, parameter: ParameterSharding, used: NamedSharding) -> None:
    """Raise if ranks compute with parts of the blocks that share a scale.

    Codes and scales that are gathered before they are used may be sharded anywhere.

    Args:
        name: path of the parameter.
        parameter: sharding of the parameter, of any kind.
        used: sharding in which modules compute with it.

    Raises:
        ValueError: for a shard of rows or columns that ends inside of a block, unless all of them share one scale.
    """
    part = parameter.stack_part
    if part is None or part.part != "codes":
        return
    _, *axes_of = used.spec
    dims = zip(("rows", "columns"), axes_of, part.sizes, part.block, part.num_scales, strict=True)
    for kind, axes, size, block, num_scales in dims:
        count = used.mesh.size(*axes)
        if count > 1 and num_scales > 1 and size % (count * block):
            raise ValueError(
                f"{name.rpartition('.')[0]} is quantized as {part.format}, in blocks of {block} {kind}: the axes "
                f"{axes} must give each rank a multiple of {block} of its {size} {kind}, got {size / count:g}. Choose "
                "rules that do not shard them over these axes, or another format"
            )
