"""The command that makes text: from runs and from decoders on disk, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from routing_lab import generate as command
from routing_lab.config import load
from routing_lab.data.text.tokenizers import END, ByteEncoding, train_bpe
from routing_lab.training.opening import open_run
from routing_lab.training.run import run_cell

QUIET = ["train.epochs=0", "tracking=none", "runtime.progress=none"]


def a_run(folder: Path, *overrides: str) -> Path:
    loaded = load([*QUIET, *overrides, f"paths.runs={folder}"])
    result = run_cell(loaded.config, loaded.resolved)
    assert result["error"] is None
    return Path(result["folder"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    small = [
        "backbone.width=16",
        "backbone.depth=3",
        "backbone.heads=2",
        "backbone.kv_heads=1",
        "backbone.mlp_width=16",
    ]
    return a_run(tmp_path_factory.mktemp("runs"), "task=language", *small, "method=dtrnet", "data.eval_windows=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder and its tokenizer as transformers saves them."""
    place = tmp_path_factory.mktemp("decoder")
    tokenizer = train_bpe([b"to be or not to be, that is the question " * 20], 280)
    size: Any = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=280, num_key_value_heads=1, **size)).save_pretrained(place)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(place)
    return place


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        command.main(words)
    found = capsys.readouterr()
    assert isinstance(left.value.code, int)
    return left.value.code, found.out, found.err


def test_a_run_goes_on_with_a_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(run), "To be=", "max_new_tokens=12", "temperature=0"]
    code, text, _ = said(words, capsys)
    assert code == 0
    ids = torch.tensor([list(b"To be=")])
    made = open_run(run).model.generate(ids, 12)[0].tolist()
    assert text == ByteEncoding().decode([*b"To be=", *made]) + "\n"
    assert said(words, capsys)[1] == text
    drawn = [said([*words[:3], f"seed={seed}", "top_p=1"], capsys)[1] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_decoder_on_disk_is_routed_by_further_words(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, dense, _ = said([str(folder), "to be or", "max_new_tokens=8", "temperature=0", "method=dense"], capsys)
    assert code == 0
    whole = [str(folder), "to be or", "max_new_tokens=8", "temperature=0", "method=random_lm", "capacity.threshold=0"]
    assert said(whole, capsys)[1] == dense  # every token attends
    assert dense.startswith("to be or")
    code, _, error = said([str(folder), "to be or", "method=amod_lm"], capsys)
    assert code == 1
    assert "this model reads whole texts" in error
    code, _, error = said([str(folder), "to be or", "method=amodd"], capsys)
    assert code == 2
    assert "amodd" in error


def test_words_are_refused_together(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, error = said([str(tmp_path), "", "top_p=0", "max_new_tokens=few", "faster"], capsys)
    assert (code, text) == (2, "")
    for part in ("run.json", "a text to go on with", "top_p = 0", "max_new_tokens = few", "faster"):
        assert part in error
    code, _, error = said([str(run), "To", "method=dense"], capsys)
    assert code == 2
    assert "a run is routed already" in error


def test_a_run_on_images_makes_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path, "backbone.width=16", "backbone.depth=2", "backbone.heads=2")
    code, _, error = said([str(run), "To be"], capsys)
    assert code == 2
    assert "reads images" in error
