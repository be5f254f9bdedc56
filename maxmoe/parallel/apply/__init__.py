"""What applies a plan to a module: parameters, hooks, FSDP2, tokens."""
