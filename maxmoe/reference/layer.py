"""Specification of `maxmoe.MoE`, as a function of config and state dict."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from maxmoe.config import LoadBalanceScope, MoEConfig, ScoreFunction
from maxmoe.config.components import Scored, ZeroComputation
from maxmoe.reference.operators import (
    Projection,
    RaggedPlan,
    expert_ffn,
    feed_forward,
    ragged_plan,
    ragged_sort,
    ragged_unsort,
)
from maxmoe.reference.routing import route, scores, selected_by_scores, stack, wide

PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "gate_bias", "up_bias", "down_bias")


def load_balance_loss(
    logits: Sequence[Tensor], experts: Sequence[Tensor], *, score_function: ScoreFunction, scope: LoadBalanceScope
) -> Tensor:
    """Compute sum_e f_e P_e, 1 if balanced, given logits [S, E] and experts [S, K] of each of B sequences.

    f_e = E / (K S) * (slots routed to e), P_e = mean over the tokens of score[e] / sum(score). For "identity", the
    scores are the softmax of the logits. "sequence" is the mean over sequences, "batch"
    treats all tokens as one, and so does "step" for a step of one micro-batch.
    """
    if scope != "sequence":
        logits, experts = [torch.cat([*logits])], [torch.cat([*experts])]
    total, num_sequences = wide(logits[0].new_zeros(())), 0
    for sequence_logits, sequence_experts in zip(logits, experts, strict=True):
        if sequence_experts.numel() == 0:
            continue
        num_sequences, num_experts = num_sequences + 1, sequence_logits.shape[-1]
        score = scores(sequence_logits, "softmax" if score_function == "identity" else score_function)
        probability = score / (score.sum(-1, keepdim=True) + 1e-20)
        for e in range(num_experts):
            frequency = num_experts / sequence_experts.numel() * (sequence_experts == e).sum().item()
            total = total + frequency * probability[:, e].mean()
    return total / max(num_sequences, 1)


def router_z_loss(logits: Tensor) -> Tensor:
    """Compute the mean of logsumexp(logits)^2 over the tokens."""
    square = torch.logsumexp(wide(logits), -1) ** 2
    return square.sum() / max(square.numel(), 1)


def apply_capacity(experts: Tensor, num_experts: int, capacity_factor: float) -> Tensor:
    """Return experts [S, K] of one sequence, with -1 for slots past the capacity of their expert."""
    capacity = int(max(math.ceil(experts.numel() / num_experts) * capacity_factor, capacity_factor))
    slots, used = experts.flatten().tolist(), [0] * num_experts
    for slot, expert in enumerate(slots):
        used[expert] += 1
        if used[expert] > capacity:
            slots[slot] = -1
    return torch.tensor(slots, dtype=torch.int64).reshape(experts.shape)


def reference_rms_norm(rows: Tensor, eps: float) -> Tensor:
    """Return row / sqrt(mean(row^2) + eps) for each row."""
    return stack([row / torch.sqrt(wide(row).square().mean() + eps) for row in rows], rows, rows.shape[1])


def routing(
    tokens: Tensor,
    config: MoEConfig,
    parameters: Mapping[str, Tensor],
    previous: Tensor | None = None,
    ids: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return logits [T, E], weights and experts [T, K], and weights [T, n] of shared experts that the router scores."""
    rule, bias = config.router_rule, parameters.get("router.bias")
    logits = wide(rule.reference_rows(tokens, parameters, previous)) @ wide(parameters["router.weight"]).T
    logits = rule.reference_logits(logits if bias is None else logits + wide(bias))
    logits, of_shared = logits[:, : config.num_selectable_experts], logits[:, config.num_selectable_experts :]
    bias = parameters.get("router.score_correction_bias")
    if ids is None:
        selected = rule.reference_select(config, logits, bias)
    else:
        parts = zip(sequences(logits, [*map(len, ids)]), ids, strict=True)
        selected = torch.cat([rule.reference_select_by_ids(config, *part, parameters) for part in parts])
    weights, experts, _ = route(
        logits,
        config.top_k,
        score_function=config.score_function,
        normalization="none" if rule.normalizes else config.normalization,
        scale=config.routed_scaling_factor,
        experts=selected_by_scores(config, logits, bias, rule.group_score) if selected is None else selected,
    )
    weights, shared_weights = rule.reference_weights(config, Scored(weights, experts, of_shared), parameters)
    return logits, weights, experts, shared_weights


def routed_experts(
    tokens: Tensor, weights: Tensor, plan: RaggedPlan, config: MoEConfig, parameters: dict[str, Tensor]
) -> Tensor:
    """Return the outputs of the routed experts; the routing weights scale the outputs or the inputs of the experts."""

    def projection(name: str) -> Projection:
        return Projection(parameters[f"experts.{name}_proj"], parameters.get(f"experts.{name}_bias"))

    gate = projection("gate") if config.gated else None
    projections = (gate, projection("up"), projection("down"))

    def experts(x: Tensor, weights: Tensor | None, plan: RaggedPlan) -> Tensor:
        return expert_ffn(x, weights, plan, *projections, **config.activation_arguments)

    scales_input, norms = config.apply_weights_to == "input", config.norms
    if not scales_input and not norms.output:
        return experts(tokens, weights, plan)
    rows = ragged_sort(tokens, plan, weights if scales_input else None)
    itself = torch.arange(len(rows))
    in_place = plan._replace(slots=itself, rows=itself, top_k=1)
    rows = experts(rows, None, in_place)
    if norms.output:
        rows = reference_rms_norm(rows * (1 + parameters["experts.norm.weight"]), norms.output_eps)
    return ragged_unsort(rows, plan, None if scales_input else weights)


def zero_computation_experts(
    tokens: Tensor, weights: Tensor, experts: Tensor, config: MoEConfig, parameters: dict[str, Tensor]
) -> Tensor:
    """Return the weighted sum of the zero, copy and constant experts of each token.

    zero(x) = 0, copy(x) = x, constant_j(x) = a x + b vectors[j] with (a, b) = softmax(mixing[j] @ x).
    """
    kinds = config.zero_computation or ZeroComputation()
    first_copy = config.num_experts + kinds.zero
    first_constant = first_copy + kinds.copy
    rows = []
    for t, token in enumerate(tokens):
        row = wide(torch.zeros_like(token))
        for weight, expert in zip(weights[t], experts[t].tolist(), strict=True):
            if first_copy <= expert < first_constant:
                row = row + weight * wide(token)
            elif expert >= first_constant:
                j = expert - first_constant
                vector, mixing = (
                    wide(parameters[f"zero_computation_experts.{name}"][j]) for name in ("vectors", "mixing")
                )
                a, b = torch.softmax(mixing @ wide(token), 0)
                row = row + weight * (a * wide(token) + b * vector)
        rows.append(row)
    return stack(rows, tokens, tokens.shape[1])


def project(rows: Tensor, weight: Tensor) -> Tensor:
    """Return the rows times a weight [in, out]."""
    return stack([wide(row) @ wide(weight) for row in rows], rows, weight.shape[1])


def shared_experts(
    tokens: Tensor, config: MoEConfig, parameters: dict[str, Tensor], weights: Tensor | None = None
) -> Tensor:
    """Return the outputs of the shared expert, scaled by sigmoid(x . output_gate) if it has that gate.

    With a router that scores n shared experts, the sum of their outputs times their weights [T, n]; with other weights
    [T, 1], the outputs times these.
    """
    matrices = [parameters.get(f"shared_experts.{name}") for name in PROJECTIONS]
    if weights is not None and config.router_rule.scores_shared_experts:
        rows = []
        for token, of_experts in zip(tokens, weights, strict=True):
            row = wide(torch.zeros_like(token))
            for j, weight in enumerate(of_experts):
                expert = [None if each is None else each[j] for each in matrices]
                row = row + weight * feed_forward(token, expert, **config.shared_activation_arguments)
            rows.append(row)
        return stack(rows, tokens, tokens.shape[1])
    out = [feed_forward(token, matrices, **config.shared_activation_arguments) for token in tokens]
    if config.shared_expert_gate:
        gate = wide(parameters["shared_experts.output_gate"])
        out = [torch.sigmoid(wide(token) @ gate) * y for token, y in zip(tokens, out, strict=True)]
    if weights is not None:
        out = [weight * y for weight, y in zip(weights, out, strict=True)]
    return stack(out, tokens, tokens.shape[1])


def auxiliary_loss(logits: Sequence[Tensor], experts: Sequence[Tensor], config: MoEConfig) -> Tensor:
    """Return the sum of the weighted losses, given logits [S, E] and experts [S, K] of each of B sequences."""
    loss = wide(logits[0].new_zeros(()))
    if config.load_balance_loss_weight:
        balance = load_balance_loss(
            logits, experts, score_function=config.score_function, scope=config.load_balance_scope
        )
        loss = loss + config.load_balance_loss_weight * balance
    if config.router_z_loss_weight:
        loss = loss + config.router_z_loss_weight * router_z_loss(torch.cat([*logits]))
    return loss


def sequences(rows: Tensor, lengths: list[int]) -> list[Tensor]:
    """Split rows into sequences of these lengths; one empty sequence if there is none."""
    ends = torch.tensor([0, *(lengths or [0])]).cumsum(0).tolist()
    return [rows[begin:end] for begin, end in pairwise(ends)]


def moe(
    x: Tensor,
    config: MoEConfig,
    parameters: dict[str, Tensor],
    token_mask: Tensor | None = None,
    previous: Tensor | None = None,
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the layer: returns hidden_states, aux_loss, tokens_per_expert, dropped.

    x is [..., S, D], sequences of S tokens. token_mask is [..., S], False for padding, which is not routed and
    has zero output. `parameters` has the names of the layer's state dict. `previous` is the state [..., S, R] of the
    router of the layer before, `ids` [..., S] are ids of tokens or documents for a router that takes them.
    """
    if config.router == "random":
        raise ValueError("router must be 'learned' for the reference, got 'random'")
    is_valid = torch.ones(x.shape[:-1], dtype=torch.bool) if token_mask is None else token_mask
    tokens = x[is_valid]
    lengths = [int(sequence.sum()) for sequence in is_valid.reshape(math.prod(x.shape[:-2]), x.shape[-2])]

    before = None if previous is None else previous[is_valid]
    of_sequences = None if ids is None else sequences(ids[is_valid], lengths)
    logits, weights, experts, shared_weights = routing(tokens, config, parameters, before, of_sequences)
    kept = experts
    if config.capacity_factor is not None:
        factor = config.capacity_factor
        num_experts = config.num_selectable_experts
        kept = torch.cat([apply_capacity(part, num_experts, factor) for part in sequences(experts, lengths)])
        kept = torch.where(experts < config.num_experts, kept, experts)  # other experts have no capacity
    num_rows = config.num_balanced_rows(is_valid.numel() * config.top_k)
    bound = config.buffer_factor if config.overflow == "drop" else None
    max_rows = None if bound is None else int(num_rows * bound)
    plan = ragged_plan(kept, config.num_selectable_experts, num_local_experts=config.num_experts, max_rows=max_rows)

    rows, norms = tokens, config.norms
    if norms.input:
        rows = reference_rms_norm(rows, norms.eps) * parameters["input_norm.weight"]
    if config.latent_size is not None:
        rows = project(rows, parameters["latent_in.weight"])
    if norms.latent_in:
        rows = reference_rms_norm(rows, norms.eps) * (1 + parameters["latent_in.norm.weight"])
    outputs = routed_experts(rows, weights, plan, config, parameters)
    if norms.latent_out:
        outputs = reference_rms_norm(outputs, norms.eps) * (1 + parameters["latent_out.norm.weight"])
    if config.latent_size is not None:
        outputs = project(outputs, parameters["latent_out.weight"])
    if config.has_zero_computation_outputs:
        outputs = outputs + zero_computation_experts(tokens, weights, experts, config, parameters)
    if config.num_shared_experts:
        outputs = outputs + shared_experts(tokens, config, parameters, shared_weights)
    if norms.sum:
        outputs = reference_rms_norm(outputs, norms.eps) * parameters["sum_norm.weight"]
    hidden_states = torch.zeros_like(x)
    hidden_states[is_valid] = outputs
    return (
        hidden_states,
        auxiliary_loss(sequences(logits, lengths), sequences(experts, lengths), config),
        torch.tensor([int((experts == e).sum()) for e in range(config.num_selectable_experts)]),
        (kept < 0).sum() + plan.dropped,
    )
