"""The command line `python -m maxmoe`."""
