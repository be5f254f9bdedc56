"""Models built on `maxmoe.MoE`."""

from maxmoe.models.config import DecoderConfig
from maxmoe.models.decoder import Decoder, DecoderOutput

__all__ = ["Decoder", "DecoderConfig", "DecoderOutput"]
