"""From text to tokens: bytes, a byte-pair encoding trained on the training split, or that of a pretrained model.

Every encoding is byte-level or says how many bytes each token stands for, so that losses per token can be stated in
bits per byte, which compare between encodings.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routing_lab.data.layout import DataProblem

END = "<|endoftext|>"
"""The token that a trained encoding puts behind every document."""


class Encoding(ABC):
    """Tokens of a text and back.

    Attributes:
        size: number of tokens.
        end: the token behind every document; None: there is none.
        fingerprint: what identifies the encoding.
    """

    size: int
    end: int | None
    fingerprint: str

    @abstractmethod
    def encode(self, text: bytes) -> NDArray[np.int64]:
        """The tokens of a UTF-8 text, without the one behind a document."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; bytes that are no UTF-8 become replacement characters."""

    @abstractmethod
    def lengths(self) -> NDArray[np.int64]:
        """[size] bytes of text that each token stands for; the end of a document stands for none."""


class ByteEncoding(Encoding):
    """One token a byte."""

    size = 256
    end = None
    fingerprint = "byte"

    def encode(self, text: bytes) -> NDArray[np.int64]:
        return np.frombuffer(text, dtype=np.uint8).astype(np.int64)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def lengths(self) -> NDArray[np.int64]:
        return np.ones(256, dtype=np.int64)


class LibraryEncoding(Encoding):
    """An encoding of the `tokenizers` library.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.
        end: the token behind every document.
    """

    def __init__(self, tokenizer: Any, end: int | None) -> None:
        self._tokenizer = tokenizer
        self.size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.end = end
        self.fingerprint = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()

    def encode(self, text: bytes) -> NDArray[np.int64]:
        encoded = self._tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False)
        return np.array(encoded.ids, dtype=np.int64)

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens))
        return text

    def lengths(self) -> NDArray[np.int64]:
        special = {token for token, added in self._tokenizer.get_added_tokens_decoder().items() if added.special}
        pieces = [self._tokenizer.id_to_token(token) or "" for token in range(self.size)]
        # Byte-level vocabularies spell every byte by one character; others spell a space by "\u2581".
        spelled = set("".join(pieces)) <= set(_byte_characters()) | set("".join(pieces[token] for token in special))
        return np.array(
            [
                0 if token in special else len(piece) if spelled else len(piece.replace("\u2581", " ").encode())
                for token, piece in enumerate(pieces)
            ],
            dtype=np.int64,
        )


def build_encoding(data: Any, training: Sequence[bytes]) -> Encoding:
    """The encoding that a `data` node names; a trained one is learned from the `training` documents and cached.

    Raises:
        DataProblem: it cannot be had, or has more tokens than `data.vocab_size`.
    """
    if data.tokenizer == "byte":
        return ByteEncoding()
    encoding = (
        pretrained_encoding(data.tokenizer_folder) if data.tokenizer == "pretrained" else _trained(data, training)
    )
    if encoding.size > data.vocab_size:
        raise DataProblem(
            "data.vocab_size",
            data.vocab_size,
            f"the encoding has {encoding.size} tokens; expected at least that number",
        )
    return encoding


def pretrained_encoding(folder: str) -> Encoding:
    """The encoding of a pretrained model, from a folder or by its name on the hub.

    Raises:
        DataProblem: there is no fast tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        backend = tokenizer.backend_tokenizer
    except Exception as error:
        raise DataProblem("data.tokenizer_folder", folder, f"no fast tokenizer can be loaded ({error})") from error
    return LibraryEncoding(backend, tokenizer.eos_token_id)


def train_bpe(documents: Sequence[bytes], vocab_size: int) -> Any:
    """A byte-level byte-pair encoding of `vocab_size` tokens, the first of them the end of a document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # In pieces of lines: the library trains on strings, and merges never cross a word.
    lines = (line for document in documents for line in document.decode(errors="replace").splitlines(keepends=True))
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def _trained(data: Any, training: Sequence[bytes]) -> Encoding:
    from tokenizers import Tokenizer

    if data.vocab_size < 257:
        raise DataProblem(
            "data.vocab_size",
            data.vocab_size,
            "data.tokenizer=bpe learns 256 bytes, an end of documents and merges; expected at least 257",
        )
    digest = hashlib.sha256(str(data.vocab_size).encode())
    for document in training:
        digest.update(hashlib.sha256(document).digest())
    path = Path(data.root).expanduser() / "tokenizers" / f"bpe{data.vocab_size}-{digest.hexdigest()[:16]}.json"
    if path.is_file():
        tokenizer = Tokenizer.from_file(str(path))
    else:
        tokenizer = train_bpe(training, data.vocab_size)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(tokenizer.to_str(), encoding="utf-8")
        os.replace(temporary, path)
    return LibraryEncoding(tokenizer, tokenizer.token_to_id(END))


def _byte_characters() -> str:
    from tokenizers import pre_tokenizers

    return "".join(pre_tokenizers.ByteLevel.alphabet())
