"""Random numbers of tokens: their distribution, and that a recomputation and compiled code repeat them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from maxmoe import MoE, MoEConfig
from maxmoe.nn import LocalTokens, rand_of_tokens
from support.documented import noisy

CONFIG = MoEConfig(hidden_size=8, intermediate_size=6, num_experts=6, top_k=2)
MASK = 2**64 - 1


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return rand_of_tokens(torch.empty(shape, dtype=dtype), LocalTokens())


def split_mix(state: int) -> int:
    """The hash of SplitMix64, in integers without bounds."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
    return state ^ (state >> 31)


@pytest.mark.parametrize(("dtype", "num_bits"), [(torch.float64, 52), (torch.float32, 23), (torch.bfloat16, 23)])
def test_numbers_are_hashes_of_key_token_and_place(dtype: torch.dtype, num_bits: int) -> None:
    assert split_mix(1234567 + 0x9E3779B97F4A7C15) == 6457827717110365317  # the published test vector
    torch.manual_seed(3)
    key, gamma = int(torch.randint(-(2**63), 2**63 - 1, ())), 0x9E3779B97F4A7C15
    numbers = [sequence * 2**32 + position for sequence in range(3) for position in range(5)]
    of_tokens = [split_mix((number * gamma + key) & MASK) for number in numbers]
    hashes = [[split_mix((of_token + n * gamma) & MASK) >> (64 - num_bits) for n in (1, 2)] for of_token in of_tokens]
    expected = (torch.tensor(hashes, dtype=torch.float64) + 0.5) / 2**num_bits
    torch.manual_seed(3)
    got = draw(3, 5, 2, dtype=dtype)
    assert got.dtype == torch.promote_types(dtype, torch.float32) and got.min() > 0 and got.max() < 1
    assert got.double().equal(expected.view(3, 5, 2))
    assert not draw(3, 5, 2).equal(got)


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^like must have shape \(B, S, N\), got \(3, 4\)$"):
        draw(3, 4)


def layer_with(make_router: Callable[[MoEConfig], nn.Module]) -> tuple[MoE, Tensor]:
    torch.manual_seed(0)
    return MoE(CONFIG, router=make_router(CONFIG)).double(), torch.randn(2, 9, 8, dtype=torch.float64)


def test_compiled_code_draws_the_same() -> None:
    layer, x = layer_with(noisy)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    outputs = []
    for call in (compiled, layer):
        torch.manual_seed(1)
        with torch.no_grad():
            outputs.append(call(x).hidden_states)
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-14)


def test_no_noise_in_eval_mode() -> None:
    layer, x = layer_with(noisy)
    assert not layer(x).hidden_states.equal(layer(x).hidden_states)
    assert layer.eval()(x).hidden_states.equal(layer(x).hidden_states)
