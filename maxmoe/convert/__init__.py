"""Weights in and out of a layer: published families, blocks of transformers, dense blocks, checkpoints, surgery."""
