"""Modules of `examples/strategies.py` and `examples/muon_sharding.py`."""
