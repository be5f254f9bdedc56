"""The parts of `examples/strategies.py`."""
