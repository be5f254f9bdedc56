"""Search for the fastest plan of a model on a number of ranks, without a cluster."""
