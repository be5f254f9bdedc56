"""The parts of `examples/pretrain.py`: the text, the baselines, the checkpoints and the figures."""


class InputError(Exception):
    """Something that the user can mend; the message is one line, whatever is in the names of files."""

    def __init__(self, message: str) -> None:
        super().__init__("".join(char if char.isprintable() else repr(char)[1:-1] for char in message))
