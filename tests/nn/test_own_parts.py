"""Custom activations and balance losses, and contradictions to the config."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import maxmoe
from maxmoe import MoE, MoEConfig, SiTU, ops, reference
from maxmoe.nn import load_balance_loss

E, D, F = 6, 8, 10


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize(
    "options", [{}, {"gated": False}, {"implementation": "dense"}, {"num_shared_experts": 2}], ids=str
)
@pytest.mark.parametrize("recompute", [False, True])
def test_an_activation_is_that_of_the_config(options: dict[str, Any], recompute: bool) -> None:
    """silu written out equals the name in all results and gradients."""

    def silu(gate: Tensor | None, up: Tensor) -> Tensor:
        return up * torch.sigmoid(up) if gate is None else gate * torch.sigmoid(gate) * up

    fields = {"hidden_size": D, "intermediate_size": F, "num_experts": E, "top_k": 2, "expert_bias": True, **options}
    named, own = (MoE(MoEConfig(**fields), dtype=torch.float64, activation=choice) for choice in (None, silu))
    own.load_state_dict(named.state_dict())
    maxmoe.set_recompute(
        own, ["experts", *(["shared_experts"] if options.get("num_shared_experts") else [])] * recompute
    )
    mask = torch.rand(3, 7, generator=torch.Generator().manual_seed(3)) < 0.8
    results = []
    for layer in (named, own):
        x = tokens(3, 7).requires_grad_()
        output = layer(x, mask)
        (output.hidden_states * tokens(3, 7).flip(0)).sum().backward()
        results.append([output.hidden_states, x.grad, *(parameter.grad for parameter in layer.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("fused_gate", [None, "concatenated", "interleaved"])
def test_an_activation_of_the_operator(fused_gate: str | None) -> None:
    x, plan = tokens(9), ops.ragged_plan(torch.randint(E, (9, 2)), E)
    gate, up, down = torch.randn(E, D, F).double(), torch.randn(E, D, F).double(), torch.randn(E, F, D).double()
    expected = reference.expert_ffn(x, None, plan, gate, up, down, activation="gelu")
    given: tuple[Any, Any] = (gate, up)
    if fused_gate == "concatenated":
        given = (None, torch.cat([gate, up], 2))
    elif fused_gate == "interleaved":
        given = (None, torch.stack([gate, up], 3).flatten(2))
    got = ops.expert_ffn(
        x, None, plan, *given, down, activation=lambda g, u: functional.gelu(g) * u, fused_gate=fused_gate
    )
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("activation", "error", "message"),
    [
        (lambda gate, up: 1.0, TypeError, "activation must return a tensor, got float"),
        (
            lambda gate, up: up[:, 1:],
            ValueError,
            r"of shape \(\d+, 10\), as it gets, got torch.float64 of shape \(\d+, 9\)",
        ),
        (lambda gate, up: up.float(), ValueError, r"must return torch.float64 .*, got torch.float32"),
    ],
)
def test_a_wrong_activation_is_refused(activation: Any, error: type[Exception], message: str) -> None:
    config = MoEConfig(hidden_size=D, intermediate_size=F, num_experts=E, top_k=2)
    with pytest.raises(error, match=message):
        MoE(config, activation=activation, dtype=torch.float64)(tokens(2, 3))
    for name in ("limit", "gate_softcap", "up_softcap"):
        with pytest.raises(ValueError, match=rf"{name} must be None with a function as activation.*, got 7.0"):
            ops.expert_ffn(
                tokens(2),
                None,
                ops.ragged_plan(torch.zeros(2, 1).long(), 1),
                None,
                torch.randn(1, D, F).double(),
                torch.randn(1, F, D).double(),
                activation=activation,
                **{name: 7.0},
            )


@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_a_balance_loss(scope: str) -> None:
    """The arguments of a balance loss, and the use of its result."""
    seen: list[Any] = []

    def loss(probabilities: Tensor, tokens_per_expert: Tensor, top_k: int, **options: Any) -> Tensor:
        seen.append((probabilities, tokens_per_expert, top_k, options["lengths"]))
        return 2 * load_balance_loss(probabilities, tokens_per_expert, top_k, **options)

    fields: dict[str, Any] = {"load_balance_loss_weight": 0.3, "load_balance_scope": scope}
    config = MoEConfig(hidden_size=D, intermediate_size=F, num_experts=E, top_k=2, **fields)
    plain, own = MoE(config, dtype=torch.float64), MoE(config, balance_loss=loss, dtype=torch.float64)
    own.load_state_dict(plain.state_dict())
    x, mask = tokens(3, 7), torch.arange(7) < torch.tensor([[7], [4], [2]])
    torch.testing.assert_close(own(x, mask).aux_loss, 2 * plain(x, mask).aux_loss)
    ((probabilities, counts, top_k, lengths),) = seen
    rows = 3 if scope == "sequence" else 1
    assert probabilities.shape == (rows, 21 // rows, E) and counts.shape == (rows, E) and top_k == 2
    assert lengths.tolist() == ([7, 4, 2] if rows == 3 else [13]) and int(counts.sum()) == 26


@pytest.mark.parametrize(("result", "message"), [(torch.ones(3), r"got one of shape \(3,\)"), (0.5, "got float")])
def test_a_balance_loss_is_a_scalar(result: Any, message: str) -> None:
    config = MoEConfig(hidden_size=D, intermediate_size=F, num_experts=E, top_k=2, load_balance_loss_weight=0.3)
    layer = MoE(config, balance_loss=lambda *_arguments, **_options: result, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"balance_loss must return a tensor .*{message}"):
        layer(tokens(2, 3))


@pytest.mark.parametrize(
    ("fields", "replaced", "error", "message"),
    [
        ({}, {"router": torch.softmax}, TypeError, "router must be a torch.nn.Module, got builtin_function_or_method"),
        ({"router_bias": True}, {"router": nn.Identity()}, ValueError, "router_bias must be False .*, got True"),
        ({"score_correction_bias": True}, {"router": nn.Identity()}, ValueError, "score_correction_bias must be False"),
        ({}, {"activation": "silu"}, TypeError, "activation must be a function of gate and up, got 'silu'"),
        ({"activation_limit": 7.0}, {"activation": min}, ValueError, "activation_limit must be None .*, got 7.0"),
        (
            {"activation": SiTU(gate_softcap=1.5, up_softcap=0.8)},
            {"activation": min},
            ValueError,
            r"must be a name with a custom activation, got SiTU\(",
        ),
        ({}, {"balance_loss": load_balance_loss}, ValueError, "needs load_balance_loss_weight > 0, got 0"),
        ({"load_balance_loss_weight": 0.1}, {"balance_loss": 0.1}, TypeError, "must be a function .*, got 0.1"),
        (
            {"load_balance_loss_weight": 0.1, "load_balance_scope": "step"},
            {"balance_loss": load_balance_loss},
            ValueError,
            "'sequence' or 'batch', got 'step'",
        ),
    ],
)
def test_contradictions_are_refused(
    fields: dict[str, Any], replaced: dict[str, Any], error: type[Exception], message: str
) -> None:
    config = MoEConfig(hidden_size=D, intermediate_size=F, num_experts=E, top_k=2, **fields)
    with pytest.raises(error, match=message):
        MoE(config, **replaced)
