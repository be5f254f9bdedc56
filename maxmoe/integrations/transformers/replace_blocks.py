"""Replacement of the sparse blocks of a model of transformers."""

from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from maxmoe.checks.fields import nearest
from maxmoe.convert.blocks import TRAINING_FIELDS
from maxmoe.integrations.transformers._transformers import is_expert_parallel, is_experts
from maxmoe.integrations.transformers.checkpoint_names import load_checkpoint_names
from maxmoe.integrations.transformers.moe_block import TransformersMoE
from maxmoe.integrations.transformers.patched_families import is_sparse_block
from maxmoe.integrations.transformers.token_masks import hand_over_masks
from maxmoe.nn import MoELayer


class ReplacedBlock(NamedTuple):
    """A sparse block that `replace_moe_blocks` has replaced.

    Attributes:
        path: path of the block in the model.
        family: `model_type` of its config, such as "mixtral".
        block: name of the class of transformers.
        num_experts: E, routed experts.
        top_k: K, experts per token.
    """

    path: str
    family: str
    block: str
    num_experts: int
    top_k: int


def replace_moe_blocks(model: nn.Module, **training: Any) -> tuple[ReplacedBlock, ...]:
    """Replace all sparse blocks of a model of transformers by layers of maxmoe, which do as `MoEFeedForward`.

    The layers take over the modules of the blocks, so that names, shapes and layouts of all parameters stay:
    `save_pretrained`, `Trainer` and PEFT write what transformers reads without this library. The attention mask of the
    model reaches them as `token_mask`. With ``output_router_logits=True`` the model returns the router logits and the
    balance loss of transformers; by default there is no auxiliary loss::

        replace_moe_blocks(model)
        replace_moe_blocks(model, load_balance_loss_weight=0.01)  # the loss of maxmoe, in each layer

    Args:
        model: model, or a module that contains one, before `get_peft_model`, `parallelize` and `fully_shard`.
        training: fields of `maxmoe.MoEConfig` about losses and correction biases, `buffer_factor` and `overflow`. The
            weights of losses are 0 by default; correction biases move as the preset of the family says.

    Returns:
        What was replaced, in the order of the model.

    Raises:
        TypeError: for another field.
        ValueError: for a model without sparse blocks, and for a block that cannot be replaced, such as one of a family
            without a preset or one that is sharded. No block has been replaced then.
    """
    for name in training:
        if name not in TRAINING_FIELDS:
            raise TypeError(
                f"replace_moe_blocks has no field {name!r}, only {', '.join(TRAINING_FIELDS)}"
                f"{nearest(name, TRAINING_FIELDS)}"
            )
    options = {"load_balance_loss_weight": 0.0, "router_z_loss_weight": 0.0, **training}
    layers: dict[str, TransformersMoE] = {}
    for path, block in _blocks(model).items():
        try:
            layers[path] = TransformersMoE.from_transformers(block, **options)
        except ValueError as error:
            raise ValueError(f"{path} ({type(block).__name__}) cannot be replaced: {error}") from error
    return tuple(_put(model, path, layer) for path, layer in layers.items())


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the sparse blocks of a model by path; raises if there are none, or they are computed by several ranks."""
    found = {}
    for path, module in model.named_modules():
        if is_sparse_block(module) and not isinstance(module, MoELayer):
            experts = dict(module.named_children()).get("experts")
            if is_experts(experts) and is_expert_parallel(experts):
                raise ValueError(f"{path} must be whole, got experts under the expert parallelism of transformers")
            owner: Any = model.get_submodule(_owner(model, path))
            if not any(hasattr(part, "config") for part in module.modules()):
                module.config = owner.config
            found[path] = module
    if not found:
        raise ValueError(f"{type(model).__name__} must have sparse blocks of transformers, got none")
    return found


def _owner(model: nn.Module, path: str) -> str:
    """Return the path of the innermost model of transformers around a block."""
    while path:
        path = path.rpartition(".")[0]
        if isinstance(model.get_submodule(path), PreTrainedModel):
            return path
    raise ValueError(f"replace_moe_blocks needs a model of transformers, got {type(model).__name__}")


def _put(model: nn.Module, path: str, layer: TransformersMoE) -> ReplacedBlock:
    """Put a layer in the place of a block, and let the model around it hand over its masks."""
    owner: Any = model.get_submodule(_owner(model, path))
    parent, _, name = path.rpartition(".")
    block = type(model.get_submodule(path)).__name__
    setattr(model.get_submodule(parent), name, layer)
    load_checkpoint_names(model.get_submodule(parent))
    if is_experts(layer.part("experts")):
        owner.set_experts_implementation("maxmoe")
    if not layer.family.has_capacity:  # there, padding takes capacity
        hand_over_masks(owner, model.get_submodule(parent.rpartition(".")[0]).children())
    return ReplacedBlock(path, owner.config.model_type, block, layer.config.num_experts, layer.config.top_k)
