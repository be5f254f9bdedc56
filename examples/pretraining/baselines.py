"""What a model must beat: bits per byte of two simple compressors on the held-out bytes."""

import zlib

import torch
from torch import Tensor


def bigram_bits_per_byte(training: Tensor, pieces: Tensor) -> float:
    """Cross entropy of a byte given the byte before it, from counts over the training text plus one.

    Args:
        training: ``(N,)`` uint8.
        pieces: ``(P, 1 + L)`` uint8; the first byte of each is given, the others are predicted.

    Returns:
        Mean of -log2 p(byte | byte before) over the P * L bytes.
    """
    counts = torch.ones(256 * 256, dtype=torch.float64)
    for part in training.split(1 << 24):  # bounds the int64 copies
        counts += torch.bincount(256 * part[:-1].long() + part[1:].long(), minlength=256 * 256)
    table = counts.view(256, 256)
    bits = (table.sum(1, keepdim=True) / table).log2()
    return float(bits[pieces[:, :-1].long(), pieces[:, 1:].long()].mean())


def zlib_bits_per_byte(pieces: Tensor) -> float:
    """Size of the same P * L bytes after zlib at level 9, as one stream."""
    text = pieces[:, 1:].contiguous().numpy().tobytes()
    return 8 * len(zlib.compress(text, 9)) / len(text)
