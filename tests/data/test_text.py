"""Texts: splits, encodings, windows, documents that do not see each other, planted sequences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from routing_lab.data.layout import SPLITS, DataProblem
from routing_lab.data.text import IGNORED, corpus
from routing_lab.data.text.corpus import carve, read_corpus, shakespeare
from routing_lab.data.text.inspect import inspect_text
from routing_lab.data.text.module import TextData, build_text
from routing_lab.data.text.tokenizers import build_encoding

Build = Callable[..., TextData]


@pytest.fixture
def build(node: Callable[..., Any], recipe: Callable[..., Any], tmp_path: Path) -> Build:
    def make(name: str = "text_files", seed: int = 0, batch_size: int = 4, **values: Any) -> TextData:
        if name == "text_files":
            values = {"path": str(letters(tmp_path / "letters")), **values}
        if name != "induction":
            values = {"root": str(tmp_path / "cache"), **values}
        return build_text(node(name, **values), recipe(batch_size=batch_size, eval_batch_size=8), seed)

    return make


def letters(folder: Path, number: int = 5, length: int = 700) -> Path:
    """Documents of one letter each, with splits of their own."""
    for split, count in (("train", number), ("val", 1), ("test", 1)):
        for index in range(count):
            place = folder / split / f"{index}.txt"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(f"{chr(97 + index)} " * (length // 2))
    return folder


def test_shakespeare_is_whole_and_carved_at_its_end(node: Callable[..., Any]) -> None:
    text = shakespeare()
    assert len(text) == 1_115_394
    assert text.startswith(b"First Citizen:\nBefore we proceed")
    found = read_corpus(node("shakespeare"))
    assert b"".join(part for split in SPLITS for part in found.documents[split]) == text
    assert found.sizes["val"] / len(text) == pytest.approx(0.05, rel=0.01)
    assert all(found.documents[split][0].endswith(b"\n") for split in SPLITS)


@pytest.mark.parametrize("text", ["no end of line " * 400, "\u00e9" * 3000, "short lines\n" * 500])
def test_a_cut_loses_nothing_and_splits_no_character(node: Callable[..., Any], text: str) -> None:
    found = carve([text.encode()], node("shakespeare"))
    parts = [found.documents[split][0] for split in SPLITS]
    assert b"".join(parts) == text.encode()
    for part in parts:
        part.decode()


def test_files_have_their_own_splits_or_are_carved(node: Callable[..., Any], tmp_path: Path) -> None:
    found = read_corpus(node("text_files", path=str(letters(tmp_path / "a"))))
    assert [len(found.documents[split]) for split in SPLITS] == [5, 1, 1]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_text("line\n" * 400)
    carved = read_corpus(node("text_files", path=str(tmp_path / "b")))
    assert sum(carved.sizes.values()) == 2000
    assert min(carved.sizes.values()) >= 80


def test_problems_name_key_and_value(node: Callable[..., Any], build: Build, tmp_path: Path) -> None:
    (found,) = inspect_text(node("text_files", path=str(tmp_path / "nowhere")))
    assert found[0] == "data.path"
    (tmp_path / "empty").mkdir()
    assert "no .txt file" in inspect_text(node("text_files", path=str(tmp_path / "empty")))[0][2]
    with pytest.raises(DataProblem, match=r"data\.context=5000: the \w+ split has \d+ tokens"):
        build(context=5000)
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataProblem, match=r"data\.path=.*bad\.txt: cannot be read as UTF-8"):
        build(path=str(tmp_path / "bad.txt"))
    with pytest.raises(ValueError, match=r"data\.tokenizer_folder=null"):
        node("shakespeare", tokenizer="pretrained")


def test_every_token_of_a_split_is_predicted_once(build: Build) -> None:
    data = build(documents="joined")
    seen = 0
    for ids, targets, _, num_bytes, segments in data.loader("val"):
        assert segments is None
        assert torch.equal(num_bytes, (targets != -100).sum(dim=1))
        assert ids.shape[1] == data.context
        counted = targets != IGNORED
        assert torch.equal(ids[:, 1:][counted[:, :-1]], targets[:, :-1][counted[:, :-1]])
        seen += int(counted.sum())
    assert seen == 700 - 1


def test_windows_are_functions_of_seed_epoch_and_index(build: Build) -> None:
    data, again, other = build("shakespeare", seed=1), build("shakespeare", seed=1), build("shakespeare", seed=2)

    def first(module: TextData, epoch: int) -> torch.Tensor:
        module.set_epoch(epoch)
        return next(iter(module.train_dataloader())).ids

    assert torch.equal(first(data, 3), first(again, 3))
    assert not torch.equal(first(data, 3), first(data, 4))
    assert not torch.equal(first(data, 3), first(other, 3))
    assert data.fingerprint == other.fingerprint
    assert data.fingerprint != build("shakespeare", context=32).fingerprint
    assert data.sizes["train"] == (len(read_corpus_tokens(data)) - 64) // 64


def read_corpus_tokens(data: TextData) -> np.ndarray:
    return data._train.streams[0].tokens  # type: ignore[attr-defined]


def test_an_epoch_may_be_shorter_and_evaluation_sparser(build: Build) -> None:
    data = build("shakespeare", epoch_windows=40, eval_windows=6)
    assert data.steps_per_epoch == 10
    assert len(list(data.train_dataloader())) == 10
    assert data.sizes["val"] == data.sizes["test"] == 6
    assert torch.equal(torch.cat([batch.indices for batch in data.loader("val")]).sort().values, data.split["val"])


def test_documents_are_told_apart(build: Build) -> None:
    data = build(documents="separate")
    crossing = 0
    for ids, targets, _, _, segments in data.train_dataloader():
        assert segments is not None
        for row in range(len(ids)):
            letters_of = {
                chr(token) for token in ids[row][segments[row] == segments[row, 0]].tolist() if token != ord(" ")
            }
            assert len(letters_of) == 1
        inside = segments[:, 1:] == segments[:, :-1]
        crossing += int((~inside).sum())
        assert (targets[:, :-1][~inside] == IGNORED).all()
        assert (targets[:, :-1][inside] != IGNORED).all()
    assert crossing > 0


def test_a_byte_pair_encoding_is_learned_once_and_counts_bytes(build: Build, tmp_path: Path) -> None:
    data = build("shakespeare", tokenizer="bpe", vocab_size=400)
    encoding = data.encoding
    text = b"First Citizen: speak, \xc3\xa9 speak!\n"
    tokens = encoding.encode(text)
    assert len(tokens) < len(text)
    assert encoding.decode(tokens.tolist()) == text.decode()
    assert data.token_bytes[torch.from_numpy(tokens)].sum() == len(text)
    assert encoding.end == 0
    assert data.token_bytes[0] == 0
    cached = list((tmp_path / "cache").glob("tokenizers/bpe400-*.json"))
    assert len(cached) == 1
    before = cached[0].stat().st_mtime_ns
    again = build("shakespeare", tokenizer="bpe", vocab_size=400)
    assert cached[0].stat().st_mtime_ns == before
    assert again.fingerprint == data.fingerprint


def test_a_pretrained_encoding_is_read_from_its_folder(node: Callable[..., Any], build: Build, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    from routing_lab.data.text.tokenizers import END, train_bpe

    folder = tmp_path / "model"
    trained = train_bpe([shakespeare()[:20000]], 300)
    PreTrainedTokenizerFast(tokenizer_object=trained, eos_token=END).save_pretrained(folder)
    options = {"tokenizer": "pretrained", "tokenizer_folder": str(folder)}
    encoding = build_encoding(node("shakespeare", vocab_size=400, **options), [])
    assert encoding.decode(encoding.encode(b"Speak, speak.").tolist()) == "Speak, speak."
    assert encoding.end == trained.token_to_id(END)
    with pytest.raises(DataProblem, match=r"data\.vocab_size=256: the encoding has 300 tokens"):
        build_encoding(node("shakespeare", vocab_size=256, **options), [])
    with pytest.raises(DataProblem, match=r"data\.tokenizer_folder=.*nowhere"):
        build_encoding(node("shakespeare", tokenizer="pretrained", tokenizer_folder=str(tmp_path / "nowhere")), [])


def test_documents_of_the_hub_are_streamed_once(
    node: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def streamed(data: Any) -> list[bytes]:
        calls.append(data.path)
        return [b"one line\n" * 30, "z\u00e9ro\n".encode() * 30]

    monkeypatch.setattr(corpus, "_streamed", streamed)
    data = node("hub_text", path="owner/name", root=str(tmp_path), val_fraction=0.2, test_fraction=0.2)
    first, second = read_corpus(data), read_corpus(data)
    assert calls == ["owner/name"]
    assert first == second
    assert first.sizes["train"] == pytest.approx(0.6 * 450, abs=10)


def test_planted_pairs_hold_the_answers(build: Build) -> None:
    data = build("induction", num_train=32, num_val=8, num_test=8, num_pairs=5, num_queries=3)
    assert data.masks is not None
    for ids, targets, indices, *_ in data.loader("val"):
        for row, index in enumerate(indices.tolist()):
            asked = (targets[row] != IGNORED).nonzero().flatten().tolist()
            assert len(asked) == 3
            needed = set(data.masks[index].nonzero().flatten().tolist())
            for position in asked:
                key, value = int(ids[row, position]), int(targets[row, position])
                (place,) = (ids[row, : len(ids[row]) // 2] == key).nonzero().flatten().tolist()
                assert int(ids[row, place + 1]) == value
                assert {place, place + 1, position} <= needed
            assert len(needed) == 9
    again = build("induction", num_train=32, num_val=8, num_test=8, num_pairs=5, num_queries=3, seed=9)
    assert again.fingerprint == data.fingerprint
