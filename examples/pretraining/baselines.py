"""Baselines for the model: bits per byte of two simple compressors on the held-out text."""

import zlib

import torch
from torch import Tensor


def bigram_bits_per_byte(training: Tensor, pieces: Tensor) -> float:
    """Bits per byte of a bigram model: counts of byte pairs in the training text, plus one.

    Args:
        training: ``(N,)`` uint8, training text.
        pieces: ``(P, 1 + L)`` uint8, held-out text. The last L bytes of each piece are predicted.

    Returns:
        Mean of -log2 p(byte | byte before) over the P * L bytes.
    """
    counts = torch.ones(256 * 256, dtype=torch.float64)
    for part in training.split(1 << 24):  # limits the memory of the int64 copies
        counts += torch.bincount(256 * part[:-1].long() + part[1:].long(), minlength=256 * 256)
    table = counts.view(256, 256)
    bits = (table.sum(1, keepdim=True) / table).log2()
    return float(bits[pieces[:, :-1].long(), pieces[:, 1:].long()].mean())


def zlib_bits_per_byte(pieces: Tensor) -> float:
    """Bits per byte of zlib at level 9 on the last L bytes of each piece, compressed as one stream."""
    text = pieces[:, 1:].contiguous().numpy().tobytes()
    return 8 * len(zlib.compress(text, 9)) / len(text)
