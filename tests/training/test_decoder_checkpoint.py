"""The recipe of docs/language.md: a decoder as transformers saves it is loaded strictly, its routers alone are trained,
and it goes on with a text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from routing_lab import generate
from routing_lab.assembly import build_model
from routing_lab.config import load
from routing_lab.data.text.tokenizers import END, train_bpe
from routing_lab.training.opening import open_run
from routing_lab.training.run import run_cell


@pytest.mark.parametrize("tied", [True, False])
def test_routers_alone_are_trained_on_a_decoder_from_disk(
    tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "decoder"
    text = b"to be or not to be, that is the question. " * 40
    (tmp_path / "plays.txt").write_bytes(text)
    size: Any = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=280, num_key_value_heads=1, rms_norm_eps=1e-5, tie_word_embeddings=tied, **size)
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=train_bpe([text], 280), eos_token=END).save_pretrained(folder)
    published = load_file(folder / "model.safetensors")
    assert ("lm_head.weight" in published) != tied

    shape = ["vocab_size=280", "context=8", "width=16", "depth=4", "heads=2", "kv_heads=1", "mlp_width=32"]
    shape += ["norm_eps=1e-5", f"tie_embeddings={str(tied).lower()}"]
    data = ["data=text_files", f"data.path={tmp_path / 'plays.txt'}", "data.tokenizer=pretrained"]
    overrides = [
        *["task=language", "method=dtrnet", *(f"backbone.{key}" for key in shape)],
        *[*data, f"data.tokenizer_folder={folder}", "data.val_fraction=0.2", "data.test_fraction=0.2"],
        *["init=checkpoint", f"init.path={folder / 'model.safetensors'}", "train.frozen=[model,lm_head]"],
        *["train.epochs=1", "train.warmup_epochs=0", "train.batch_size=4", "tracking=none", "runtime.progress=none"],
        *[f"paths.runs={tmp_path / 'runs'}", f"paths.data={tmp_path}"],
    ]
    loaded = load(overrides)
    result = run_cell(loaded.config, loaded.resolved)
    assert result["error"] is None
    (taken,) = (line for line in result["record"]["warnings"] if "tensors taken" in line)
    assert f"{len(published) + tied} tensors taken, 4 missing (router.1.fc1.bias" in taken

    run = open_run(result["folder"])
    assert run.model.routed_layers == [1]
    backbone: Any = run.model.backbone
    assert all(torch.equal(backbone.state_dict()[name], value) for name, value in published.items())
    fresh = build_model(loaded.config, 280).layers.state_dict()
    assert all(not torch.equal(value, fresh[name]) for name, value in run.model.layers.state_dict().items())
    assert (backbone.lm_head.weight is backbone.model.embed_tokens.weight) == tied
    with pytest.raises(SystemExit) as left:
        generate.main([str(result["folder"]), "to be or", "max_new_tokens=6"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("to be or")
