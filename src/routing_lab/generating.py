"""From the folder of a run or of a decoder to text that is written as it is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from routing_lab.assembly import route
from routing_lab.config import ConfigError
from routing_lab.config.problems import Problem
from routing_lab.data.text.tokenizers import Encoding, pretrained_encoding
from routing_lab.routing.generation import stream
from routing_lab.routing.model import RoutedModel
from routing_lab.training.opening import open_run

UNFINISHED = "\ufffd"
"""What stands at the end of a text whose last character is not complete."""


def opened(folder: Path, overrides: Sequence[str]) -> tuple[RoutedModel, Encoding]:
    """A routed decoder in evaluation mode, and its encoding.

    Raises:
        ConfigError: a run that reads no text, or overrides that are refused.
        RecordError, ValueError: see `open_run`; a model or tokenizer that cannot be loaded.
    """
    if (folder / "run.json").is_file():
        run = open_run(folder)
        modality = run.config.data.modality
        if modality != "text":
            raise ConfigError([Problem("RUN", str(folder), f"reads {modality}; a run of task=language makes text")])
        return run.model, run.data.encoding
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever the library meets in a damaged folder
        raise ValueError(f"transformers cannot load a decoder from it ({error})") from error
    return route(model, overrides).eval(), pretrained_encoding(str(folder))


def pieces(model: RoutedModel, encoding: Encoding, prompt: str, max_new_tokens: int, **sampling: Any) -> Iterator[str]:
    """What each new token adds to the text; characters of several tokens come with their last.

    sampling: temperature, top_p and seed of `routing.generation.stream`.

    Raises:
        ValueError: see `RoutedModel.new_cache`.
    """
    before = encoding.encode(prompt.encode()).tolist()
    ids = torch.tensor([before], dtype=torch.int64, device=next(model.parameters()).device)
    made: list[int] = []
    shown = len(encoding.decode(before))
    for token in stream(model, ids, max_new_tokens, end=encoding.end, **sampling):
        made += token.tolist()
        text = encoding.decode([*before, *made])
        if not text.endswith(UNFINISHED) or len(made) == max_new_tokens:
            yield text[shown:]
            shown = len(text)
