"""Models built on `maxmoe.MoE`."""

from maxmoe.models.decoder import Decoder, DecoderConfig, DecoderOutput

__all__ = ["Decoder", "DecoderConfig", "DecoderOutput"]
