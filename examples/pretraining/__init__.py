"""Modules of `examples/pretrain.py`: text, baselines, training, checkpoints and pictures."""


class InputError(Exception):
    """An error that the user can fix. The message is one line, also if names of files contain line breaks."""

    def __init__(self, message: str) -> None:
        super().__init__("".join(char if char.isprintable() else repr(char)[1:-1] for char in message))
