"""Random numbers of tokens, which do not depend on how the tokens are distributed over ranks."""

import torch
from torch import Tensor

from maxmoe.ranks.token_group import TokenGroup

# Constants of SplitMix64 (Steele et al., OOPSLA 2014), as signed integers.
GAMMA, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def rand_of_tokens(like: Tensor, tokens: TokenGroup) -> Tensor:
    """Draw uniform random numbers for each token, the same on all ranks that hold the token.

    uniform[b, s, n] = hash(key, place of the token in the batch of all ranks, n)

    The key is drawn from torch's generator for the CPU, once per call. `torch.manual_seed` repeats the numbers, and so
    does a recomputation by `torch.utils.checkpoint`, which restores the generator. On a mesh they are the numbers of
    one process if the generators of all ranks are in the same state and all have the same number of sequences. Ranks
    with the same tokens but generators in other states route them differently, for which the backward raises. A CUDA
    graph repeats the numbers of its capture.

    Args:
        like: ``(B, S, N)``, floating, N numbers for each token: the input of a custom router, or its logits.
        tokens: the `token_group` of the router, a `maxmoe.nn.TokenGroupAttribute`.

    Returns:
        ``(B, S, N)``, float32, or float64 for `like` in float64, in the open interval (0, 1), on the device of `like`.

    Raises:
        ValueError: for other than three dims.

    Source: counter-based random numbers as in Salmon et al., SC 2011; SplitMix64, Steele et al., OOPSLA 2014.

    Example:
        ``logits + torch.special.ndtri(rand_of_tokens(logits, self.token_group))`` adds Gaussian noise.
    """
    if like.dim() != 3:
        raise ValueError(f"like must have shape (B, S, N), got {tuple(like.shape)}")
    num_sequences, length, size = like.shape
    key = torch.randint(-(2**63), 2**63 - 1, (), device="cpu")
    numbers = tokens.numbers(num_sequences, length, like.device)
    uniform: Tensor = uniform_of(key, numbers, size, torch.promote_types(like.dtype, torch.float32))
    return uniform


@torch.library.custom_op("maxmoe_nn::uniform", mutates_args=())
def uniform_of(key: Tensor, numbers: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Hash a key, the numbers of tokens, and 1, 2, ..., `size` to numbers in (0, 1).

    An operator, so that `maxmoe.keep_routing`, which saves the integers of a router, saves none of its hashes.
    """
    of_tokens = _hash(numbers * GAMMA + key).unsqueeze(-1)
    bits = _hash(of_tokens + torch.arange(1, size + 1, device=numbers.device) * GAMMA)
    num_bits = 52 if dtype == torch.float64 else 23  # one less than the mantissa has, which the half needs
    return _shift(bits, 64 - num_bits, bits).to(dtype).add_(0.5).mul_(2.0**-num_bits)


@uniform_of.register_fake
def _(_key: Tensor, numbers: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    return numbers.new_empty((*numbers.shape, size), dtype=dtype)


def _hash(bits: Tensor) -> Tensor:
    """Hash 64-bit integers, which wrap around, in place: new memory for each step would take most of the time."""
    shifted = torch.empty_like(bits)
    bits.bitwise_xor_(_shift(bits, 30, shifted)).mul_(FIRST)
    bits.bitwise_xor_(_shift(bits, 27, shifted)).mul_(SECOND)
    return bits.bitwise_xor_(_shift(bits, 31, shifted))


def _shift(bits: Tensor, count: int, out: Tensor) -> Tensor:
    """Shift to the right, and fill with zeros; torch fills with copies of the sign."""
    return torch.bitwise_right_shift(bits, count, out=out).bitwise_and_(2 ** (64 - count) - 1)
