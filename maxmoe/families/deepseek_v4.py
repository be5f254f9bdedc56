from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from maxmoe.checks.fields import check_int
from maxmoe.config import MoEConfig
from maxmoe.config.components import RouterIds, RouterRule, component
from maxmoe.families.family import FIELDS, Family, Field, LayerField, loss_weight, sizes, value_at
from maxmoe.families.layouts import SHARED, W123, Entry, Layout, router, shared, stacked
from maxmoe.nn.random_numbers import uniform_of
from maxmoe.nn.router import Router
from maxmoe.reference.routing import stack


@component
class HashRouting(RouterRule):
    """Router that selects by a fixed table of K experts for each token id; the weights are from the scores.

    The ids of the tokens are the argument `router_inputs` of the layer.

    Args:
        num_ids: number of token ids, the size of the vocabulary.

    Source: DeepSeek-V4 in transformers; Hash Layers (arXiv:2106.04426).
    """

    num_ids: int

    takes_ids: ClassVar[RouterIds | None] = "tokens"

    def __post_init__(self) -> None:
        check_int("num_ids", self.num_ids, at_least=1)

    def check(self, config: MoEConfig) -> None:
        """Raise for other rules of selection."""
        config.require(str(self), num_groups=1, score_correction_bias=False)

    def make(self, config: MoEConfig, **options: Any) -> Router:
        """Create the router with its table."""
        return HashRouter(config, **options)

    def reference_select_by_ids(
        self, config: MoEConfig, _logits: Tensor, ids: Tensor, parameters: Mapping[str, Tensor]
    ) -> Tensor:
        """Look the experts of a sequence up, token by token."""
        rows = [parameters["router.table"][each] for each in ids.tolist()]
        return stack(rows, torch.empty(0, dtype=torch.int64), config.top_k)


class HashRouter(Router):
    """`Router` with `HashRouting`, whose buffer `table` ``(V, K)``, int64, has K different experts for each id.

    A new table has random experts, the same in all layers and on all ranks.
    """

    rule: HashRouting
    table: Tensor

    def add_parts(self, **options: Any) -> None:
        """Add the table."""
        size = (self.rule.num_ids, self.config.top_k)
        self.register_buffer("table", torch.empty(size, dtype=torch.int64, device=self.weight.device))

    def reset_parameters(self) -> None:
        """Initialize the table too."""
        super().reset_parameters()
        key, ids = torch.zeros((), dtype=torch.int64), torch.arange(len(self.table), device=self.table.device)
        uniform = uniform_of(key, ids, self.config.num_selectable_experts, torch.float32)
        self.table.copy_(uniform.topk(self.config.top_k, dim=1).indices)

    def select_by_ids(self, _logits: Tensor, ids: Tensor, _token_mask: Tensor | None) -> Tensor:
        """Return the experts of the ids."""
        return self.table[ids.flatten()]


def _router_of_config(config: Any, layer: int) -> RouterRule | str:
    is_hash = value_at(config, "mlp_layer_types")[layer] == "hash_moe"
    return HashRouting(num_ids=value_at(config, "vocab_size", 1)) if is_hash else "learned"


def _router_of_block(_config: Any, block: Any) -> RouterRule | str:
    return HashRouting(num_ids=len(block.gate.tid2eid)) if block.is_hash else "learned"


def _gate(correction_bias: str) -> tuple[Entry, ...]:
    """Return the entries of both kinds of routers; each layer has a table or a correction bias."""
    weight, bias = router("gate", correction_bias)
    return weight, replace(bias, is_optional=True), Entry("gate.tid2eid", ("router.table",), is_optional=True)


@Family(
    fields=FIELDS
    | {
        "intermediate_size": "moe_intermediate_size",
        "num_experts": "n_routed_experts",
        "routed_scaling_factor": "routed_scaling_factor",
        "activation_limit": "swiglu_limit",
        "load_balance_loss_weight": Field("router_aux_loss_coef", loss_weight),
    },
    layer_fields={
        "router": LayerField(_router_of_config, _router_of_block),
        "score_correction_bias": LayerField(
            lambda config, layer: _router_of_config(config, layer) == "learned",
            lambda _, block: not block.is_hash,
        ),
    },
    required={"scoring_func": ["sqrtsoftplus"], "n_shared_experts": [1], "norm_topk_prob": [True], "mlp_bias": [False]},
    block=Layout("mlp", _gate("gate.e_score_correction_bias") + stacked() + SHARED),
    stored=Layout("ffn", _gate("gate.bias") + W123 + shared("shared_experts", "w1", "w3", "w2")),
)
def deepseek_v4() -> MoEConfig:
    """DeepSeek-V4-Flash: scores sqrt(softplus(logits)), six of 256 experts, a shared expert, clipped SwiGLU.

    The first three layers select by token ids, ``router=HashRouting(num_ids=129280), score_correction_bias=False``.

    Source: DeepSeek-AI 2026, DeepseekV4Config of transformers 5.24; the update rate of the bias is not published.
    """
    return MoEConfig(
        **sizes(4096, 2048, 256, 6),
        score_function="sqrtsoftplus",
        score_correction_bias=True,
        routed_scaling_factor=1.5,
        num_shared_experts=1,
        activation_limit=10.0,
        load_balance_loss_weight=0.006,
    )
