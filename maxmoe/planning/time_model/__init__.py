"""Time of a training step on a device: products, memory traffic and collectives."""
