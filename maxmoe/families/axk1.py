from dataclasses import replace
from typing import Any

from maxmoe.config import MoEConfig
from maxmoe.config.components import ExpertNorms
from maxmoe.families.deepseek_v3 import DEEPSEEK_V3, deepseek_v3
from maxmoe.families.family import DEEPSEEK_V3_FIELDS, Field, number_at
from maxmoe.families.layouts import GATE_BIASED, PROJ, SHARED, Entry, Layout, stacked, within


def _norm(config: Any, path: str) -> ExpertNorms:
    return ExpertNorms(sum=True, eps=number_at(config, path, above=0))


_NORM = Entry("post_mlp_layernorm.weight", ("sum_norm.weight",))


@replace(
    DEEPSEEK_V3,
    model_types=("axk1",),
    fields=DEEPSEEK_V3_FIELDS | {"expert_norms": Field("rms_norm_eps", _norm)},
    block=Layout("mlp", (*GATE_BIASED, *stacked(), *SHARED, _NORM)),
    stored=Layout("", (*within("mlp", GATE_BIASED + PROJ + SHARED), _NORM)),
)
def axk1() -> MoEConfig:
    """A.X-K1: as `deepseek_v3` with fewer experts, and a norm of the sum of routed and shared experts.

    The released files have no correction bias, which is zero then, and a norm of dense layers that nothing uses.

    Source: defaults of AXK1Config in transformers 5.24, which names skt/A.X-K1.
    """
    return deepseek_v3(num_experts=192, expert_norms=ExpertNorms(sum=True, eps=1e-6))
