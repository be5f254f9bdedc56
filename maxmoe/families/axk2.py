from dataclasses import replace
from typing import Any

from maxmoe.config import MoEConfig
from maxmoe.families.deepseek_v3 import DEEPSEEK_V3, deepseek_v3
from maxmoe.families.family import DEEPSEEK_V3_FIELDS, Field, attribute_at, sizes
from maxmoe.nn.selection import Selection


def _num_groups(config: Any, path: str) -> Any:
    value = attribute_at(config, path)
    return 1 if value is None else value


@replace(
    DEEPSEEK_V3,
    model_types=("axk2",),
    fields=DEEPSEEK_V3_FIELDS
    | {"num_groups": Field("n_group", _num_groups), "top_k_groups": Field("topk_group", _num_groups)},
)
def axk2() -> MoEConfig:
    """A.X-K2-Light: as `deepseek_v3` without groups. Larger models have groups, and a score of zero in all others.

    Source: SK Telecom 2026, AXK2Config of transformers 5.24.
    """
    return deepseek_v3(**sizes(2048, 512, 128, 8), num_groups=1, top_k_groups=1, router=Selection(other_groups="zero"))
