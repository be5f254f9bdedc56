"""Time of a training step on a device: products, memory traffic and collectives."""

from maxmoe.planning.time_model.device import Device, Link, device_names

__all__ = ["Device", "Link", "device_names"]
