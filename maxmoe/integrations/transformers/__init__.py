"""The experts of the models of transformers, through the operators of maxmoe.

    import maxmoe.integrations.transformers

    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="maxmoe")
    model.set_experts_implementation("maxmoe")  # or later

Importing this module registers "maxmoe" beside the implementations that transformers has. Parameters, checkpoints and
routers stay those of transformers. Where it lets choose how tokens reach experts of other ranks, from 5.21 on, ours are
among the choices: see `expert_parallel`. docs/families.md lists the families of models.
"""

import importlib.util

from maxmoe.integrations.transformers import _version as _version  # refuses an old one; first
from maxmoe.integrations.transformers import experts, llama4
from maxmoe.integrations.transformers.experts import experts_forward

__all__ = ["experts_forward"]

experts.register()
llama4.register()
if importlib.util.find_spec("transformers.distributed.expert_parallel"):
    from maxmoe.integrations.transformers import expert_parallel

    expert_parallel.register()
