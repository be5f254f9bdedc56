"""The parts of `examples/pretrain.py`: the text, the baselines, the checkpoints and the figures."""


class InputError(Exception):
    """Something that the user can mend; the message is one line."""
