"""Recomputation in the backward pass: by name, by selective activation checkpointing, and of freed storages."""
