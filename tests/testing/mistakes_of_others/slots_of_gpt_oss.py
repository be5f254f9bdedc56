"""transformers 5.24: eager gpt-oss cannot skip slots of other ranks, which `AllReduceEP` gives the id num_experts."""

import torch
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

sizes = {"hidden_size": 8, "intermediate_size": 8, "num_local_experts": 4, "attn_implementation": "eager"}
hidden_states, weights = torch.ones(1, 8), torch.tensor([[1.0, 0.0]])
experts_of_slots = torch.tensor([[2, 4]])  # the second one is on another rank
for experts in (MixtralExperts(MixtralConfig(**sizes)), GptOssExperts(GptOssConfig(**sizes))):
    experts.config._experts_implementation = "eager"
    try:
        experts(hidden_states, experts_of_slots, weights)
        print(type(experts).__name__, "right")
    except RuntimeError as error:
        print(type(experts).__name__, error)
