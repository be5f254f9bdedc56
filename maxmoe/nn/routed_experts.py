"""Router and routed experts of a layer in one operator, in less time for few tokens than in their modules."""

import functools

import torch
from torch import Tensor, nn

from maxmoe._torch import is_called_plainly, is_traced
from maxmoe.config import MoEConfig
from maxmoe.nn.dispatcher import ExpertRunner
from maxmoe.nn.experts import Experts
from maxmoe.nn.local_dispatcher import LocalDispatcher, LocalExperts
from maxmoe.nn.module_path import module_path
from maxmoe.nn.router import Router
from maxmoe.nn.routing import Routing
from maxmoe.quantization import QuantizedWeight


def fits_one_operator(
    config: MoEConfig,
    runner: ExpertRunner,
    router: nn.Module,
    experts: nn.Module,
    token_mask: Tensor | None,
    given: Tensor | None,
) -> bool:
    """Return whether `in_one_operator` computes all that the modules of a layer would compute in a call."""
    return (
        not is_traced()
        # The operator routes all tokens by their scores,
        and token_mask is None
        and given is None
        and config.router == "learned"
        and config.selection == "scores"
        and not config.scores_other_groups
        and not config.router_scale
        and config.router_hidden_size is None
        and config.logit_scale == 1
        and not config.expert_norm
        and not config.shared_expert_scores
        # makes one plan for experts that are all in this process and get the tokens themselves,
        and runner == _runner_of_one_process(config.num_experts)
        and config.latent_size is None
        # and calls no module: a call of one must be no more than its forward, without hooks, adapters or subclasses.
        and type(router) is Router
        and is_called_plainly(router)
        and type(experts) is Experts
        and is_called_plainly(experts)
        # It has no argument for quantized matrices and functions.
        and isinstance(experts.activation, str)
        and QuantizedWeight not in map(type, (experts.gate_proj, experts.up_proj, experts.down_proj))
    )


@functools.cache
def _runner_of_one_process(num_experts: int) -> ExpertRunner:
    """Return the runner that makes a plan with a row for each slot, and does nothing else."""
    return ExpertRunner(LocalDispatcher(LocalExperts(0, num_experts, num_experts, num_experts)))


def in_one_operator(x: Tensor, router: nn.Module, experts: Experts) -> tuple[Routing, Tensor, Tensor]:
    """Return the routing of tokens ``(T, D)``, the outputs of their experts and the number ``()`` of dropped slots."""
    assert isinstance(router, Router)
    config = router.config
    try:
        routed, logits, weights, ids, probabilities, dropped = torch.ops.maxmoe.routed_experts(
            x,
            router.weight,
            router.bias,
            config.top_k,
            config.score_function,
            router.score_correction_bias,
            config.num_groups,
            config.top_k_groups,
            config.group_score,
            config.normalization,
            config.routed_scaling_factor,
            experts.gate_proj,
            experts.up_proj,
            experts.down_proj,
            experts.gate_bias,
            experts.up_bias,
            experts.down_bias,
            *experts.activation_arguments.values(),
            "experts" in experts.recompute,
        )
    except ValueError as error:
        part = experts if str(error).startswith("maxmoe::expert_ffn") else router
        raise ValueError(f"{module_path(part)}: {error}") from error
    return Routing(logits, probabilities, weights, ids), routed, dropped
