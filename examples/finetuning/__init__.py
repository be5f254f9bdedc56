"""The parts of `examples/finetune_transformers.py`: small models of any family, their training and the figure."""

# Registers "maxmoe", and says which transformers to install where there is none or an old one.
import maxmoe.integrations.transformers as _integration  # noqa: F401
