"""Modules of `examples/finetune_transformers.py`: small models of any family, their training and the picture."""

# Registers "maxmoe" as experts implementation; raises an error if transformers is missing or too old.
import maxmoe.integrations.transformers as _integration  # noqa: F401
