"""The parts of examples/balancing.py."""
