"""Processes that work together: collectives by name, the group that shares tokens, failures, processes of tests."""
