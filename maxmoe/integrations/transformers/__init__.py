"""Experts of the models of transformers, computed by the operators of maxmoe.

    import maxmoe.integrations.transformers

    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="maxmoe")
    model.set_experts_implementation("maxmoe")  # or later
    replace_moe_blocks(model)  # or layers of maxmoe in the place of the sparse blocks

Importing this module registers the experts implementation "maxmoe". Parameters, checkpoints and routers of the models
are unchanged. From transformers 5.21 on, it also registers the expert parallelism "maxmoe_ring_of_experts",
"maxmoe_ragged_all_to_all" and "maxmoe_least_loaded". docs/families.md lists the families of models.
"""

import importlib.util

from maxmoe.integrations.transformers import _version as _version  # refuses an old one; first
from maxmoe.integrations.transformers import experts, patched_families, routing_block
from maxmoe.integrations.transformers.experts import experts_forward
from maxmoe.integrations.transformers.load_callback import LoadCallback
from maxmoe.integrations.transformers.moe_block import TransformersMoE
from maxmoe.integrations.transformers.replace_blocks import ReplacedBlock, replace_moe_blocks
from maxmoe.integrations.transformers.served_adapters import export_adapter

__all__ = [
    "LoadCallback",
    "ReplacedBlock",
    "TransformersMoE",
    "experts_forward",
    "export_adapter",
    "replace_moe_blocks",
]

experts.register()
patched_families.register()
routing_block.register()
if importlib.util.find_spec("transformers.distributed.expert_parallel"):
    from maxmoe.integrations.transformers import expert_parallel

    expert_parallel.register()
