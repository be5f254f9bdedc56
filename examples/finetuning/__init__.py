"""Modules of `finetune_transformers.py`, `finetune_quantized.py` and `upcycle.py`: models and training."""

# Registers "maxmoe" as experts implementation; raises an error if transformers is missing or too old.
import maxmoe.integrations.transformers as _integration  # noqa: F401
