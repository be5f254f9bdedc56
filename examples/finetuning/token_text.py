"""Text as the tokens of a model: of its tokenizer, or bytes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from pretraining import InputError
from pretraining.corpus import SEPARATOR, load_corpus


@dataclass(frozen=True)
class TokenText:
    """The text of a run.

    Args:
        tokens: ``(N,)`` integers, the training files, concatenated.
        description: number of files, source and sizes, for the user.
        fingerprint: hash of the text.
    """

    tokens: Tensor
    description: str
    fingerprint: str


def load_text(data: list[str], sequence_length: int, config: Any, folder: Path | None) -> TokenText:
    """Read the files of `--data` and tokenize them if the checkpoint has a tokenizer.json.

    Without one, each byte is a token.

    Raises:
        InputError: if a file cannot be read, the text is too short, or the vocabulary of the model too small.
    """
    corpus = load_corpus(data, sequence_length)
    tokens, kind = corpus.training, "bytes"
    path = folder / "tokenizer.json" if folder else None
    if path is not None and path.is_file():
        tokens, kind = _tokenized(bytes(corpus.training.numpy()), path, config.eos_token_id), "tokens"
    if len(tokens) <= sequence_length:
        raise InputError(f"too little text: {len(tokens)} tokens, --sequence-length {sequence_length} needs more")
    largest = int(tokens.max())
    if largest >= config.vocab_size:
        raise InputError(f"the text has token {largest}, vocab_size of the model is {config.vocab_size}")
    return TokenText(tokens, f"{corpus.description}; {len(tokens):,} {kind} to train on", corpus.fingerprint)


def _tokenized(text: bytes, path: Path, end: int | list[int] | None) -> Tensor:
    """Return the tokens of all files, each followed by the token that ends a text."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises no other type
        raise InputError(f"cannot read {path}: {error}") from error
    ends = [end] if isinstance(end, int) else []
    parts = []
    for file in text.split(SEPARATOR)[1:]:
        encoded = tokenizer.encode(file.decode(errors="replace"), add_special_tokens=False)
        parts.append(torch.tensor([*encoded.ids, *ends], dtype=torch.int32))
    return torch.cat(parts)
