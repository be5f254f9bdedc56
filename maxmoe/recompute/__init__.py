"""Recomputation in the backward pass: of named modules, by selective activation checkpointing, of freed storages."""
