from dataclasses import replace

from maxmoe.config import MoEConfig
from maxmoe.families.deepseek_v3 import DEEPSEEK_V3, deepseek_v3
from maxmoe.families.family import LATENT, PublishedModel


@PublishedModel("Kimi-K2", layers=61, heads=(64,), vocab_size=163840, dense=(1, 18432), differs=LATENT)
@replace(DEEPSEEK_V3, model_types=("kimi_k2",))
def kimi_k2() -> MoEConfig:
    """Kimi-K2: as `deepseek_v3`, with more experts and no groups; the update rate of the bias is not published.

    Source: Kimi Team 2025 (arXiv:2507.20534); config of moonshotai/Kimi-K2-Instruct, including the loss weight.
    """
    return deepseek_v3(
        num_experts=384, num_groups=1, top_k_groups=1, routed_scaling_factor=2.827, load_balance_loss_weight=0.001
    )
