from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from routing_lab.assembly import build_model
from routing_lab.backbones.decoder import stretched
from routing_lab.config import ConfigError, load
from routing_lab.config.backbones import Rope
from routing_lab.cost.measure import WorkMeter, decoder_shape
from routing_lab.data.layout import DataProblem
from routing_lab.data.text import IGNORED
from routing_lab.data.text.windows import TextBatch
from routing_lab.evidence.sections import sweep_section
from routing_lab.evidence.tables import Table
from routing_lab.runs.metrics import QUANTITIES, is_declared, metric
from routing_lab.runs.records import read_record
from routing_lab.tasks.language import Language, token_losses
from routing_lab.training.run import run_cell

SMALL = ["task=language", "backbone.width=16", "backbone.depth=3", "backbone.heads=2", "backbone.kv_heads=1"]


@pytest.fixture
def task() -> Any:
    config = load([*SMALL, "backbone.mlp_width=16", "method=dtrnet_vit"]).config
    return Language(build_model(config, 256), config.train, 0, 256, None, config.losses)


def a_batch(windows: int = 3, tokens: int = 8) -> TextBatch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 256, (windows, tokens + 1), generator=generator)
    targets = ids[:, 1:].clone()
    targets[0, :3] = IGNORED
    return TextBatch(ids[:, :-1], targets, torch.arange(windows), (targets != IGNORED).sum(dim=1) * 2)


def test_the_default_cell_is_a_language_model_and_the_command_line_wins(tmp_path: Path) -> None:
    config = load(["task=language"]).config
    assert (config.backbone.name, config.data.name, config.train.name) == ("llama_micro", "shakespeare", "language")
    other = load(["data=induction", "task=language", "recipe=quick", "train.augment=none"]).config
    assert (other.data.name, other.train.name) == ("induction", "quick")


def test_metrics_are_means_over_the_predicted_tokens(task: Any) -> None:
    batch = a_batch()
    arrays, _ = task.eval().examples(batch)
    logits = task.model(batch.ids)
    nats = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED, reduction="sum").item()
    found = task.metrics_of({name: value.item() for name, value in task.totals(arrays).items()})
    assert set(found) == set(task.quantities) <= set(QUANTITIES)
    assert found["loss"] == pytest.approx(nats / 21)
    assert found["ppl"] == pytest.approx(math.exp(nats / 21))
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / 42)
    assert arrays["tokens"].tolist() == [5, 8, 8]
    assert not QUANTITIES[task.selects].higher_is_better


def test_the_objective_has_the_auxiliary_losses_and_every_parameter_learns(
    task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    task.auxiliary._losses["load"] = task.auxiliary._losses["load"].model_copy(update={"weight": 0.5})
    task.train()
    batch = a_batch()
    monkeypatch.setattr(Language, "progress", 0.0)
    monkeypatch.setattr(Language, "global_step", 0)
    loss, totals, terms = task.objective(batch)
    assert totals["examples"] == 21
    plain = token_losses(task.model(batch.ids), batch.targets).sum() / 21
    torch.testing.assert_close(loss, plain + 0.5 * terms["load"])
    loss.backward()
    assert all(parameter.grad is not None for parameter in task.model.parameters())


@pytest.mark.parametrize("method", ["dense", "dtrnet_vit", "mod"])
def test_documents_in_one_window_do_not_see_each_other(method: str) -> None:
    extra = ["capacity=threshold", "capacity.threshold=0.0"] if method == "mod" else []
    model = build_model(load([*SMALL, f"method={method}", *extra]).config, 256).eval()
    ids = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(1))
    segments = torch.tensor([[0] * 5 + [1] * 7, [3] * 12])
    packed = model(ids, segments=segments)
    changed = ids.clone()
    changed[0, :5] = (changed[0, :5] + 1) % 256
    torch.testing.assert_close(model(changed, segments=segments)[0, 5:], packed[0, 5:])
    assert not torch.allclose(model(changed)[0, 5:], model(ids)[0, 5:])
    torch.testing.assert_close(packed[1], model(ids[1:])[0])
    # A document alone stands at other positions, which rotary angles do not see.
    torch.testing.assert_close(model(ids[:1, 5:])[0], packed[0, 5:], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_nothing(side: str) -> None:
    model = build_model(load([*SMALL, "method=dtrnet_vit"]).config, 256).eval()
    ids = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(2))
    pad = torch.zeros(2, 3, dtype=torch.int64)
    valid = torch.ones(2, 9, dtype=torch.bool)
    parts, marks = ([pad, ids], [pad.bool(), valid]) if side == "left" else ([ids, pad], [valid, pad.bool()])
    found = model(torch.cat(parts, 1), valid=torch.cat(marks, 1))
    kept = found[:, 3:] if side == "left" else found[:, :9]
    torch.testing.assert_close(kept, model(ids), atol=1e-5, rtol=1e-4)


def test_an_encoding_that_the_backbone_does_not_know_is_refused() -> None:
    config = load(["task=language", "data.vocab_size=256", "backbone.vocab_size=200"]).config
    with pytest.raises(DataProblem, match="has 256 tokens, and backbone"):
        Language.build_data(config)


def test_images_have_no_documents() -> None:
    model = build_model(load([]).config, 10)
    with pytest.raises(ValueError, match="an image has neither padding nor documents"):
        model(torch.zeros(1, 1, 8, 8), segments=torch.zeros(1, 16, dtype=torch.int64))


SHORT = ["backbone.context=16", "data.epoch_windows=32", "data.eval_windows=8", "train.epochs=1", "train.batch_size=8"]
QUIET = ["train.warmup_epochs=0", "tracking=none", "runtime.progress=none"]


@pytest.fixture(scope="module")
def tested_at_lengths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of a method that keeps what its first tokens and a threshold say, tested at three lengths."""
    runs = f"paths.runs={tmp_path_factory.mktemp('runs')}"
    method = ["method=random_lm", "capacity.threshold=1.0", "capacity.reserve=8", "placement=every"]
    lengths = ["task.eval_lengths=[32,64]", "task.eval_rope=yarn"]
    loaded = load([*SMALL, *SHORT, *QUIET, *method, *lengths, runs])
    result = run_cell(loaded.config, loaded.resolved)
    assert result["error"] is None
    return result


def test_a_run_says_what_attends_is_cached_and_costs_at_every_length(tested_at_lengths: dict[str, Any]) -> None:
    record = read_record(tested_at_lengths["folder"])
    metrics, cost = record["metrics"], record["cost"]
    # The first 8 tokens attend and no other, in two of three layers: `every` leaves the first dense.
    for suffix, length in (("", 16), ("@32", 32), ("@64", 64)):
        assert cost[f"attended_fraction{suffix}"] == pytest.approx(8 / length)
        assert cost[f"kv_fraction{suffix}"] == pytest.approx((1 + 2 * 8 / length) / 3)
        assert cost[f"kv_bytes{suffix}"] == (length + 2 * 8) * 2 * 8 * 4
        assert 0 < cost[f"macs_fraction{suffix}"] < 1
        assert all(is_declared(f"test/{name}{suffix}") for name in Language.quantities)
        assert metrics[f"test/ppl{suffix}"] == pytest.approx(math.exp(metrics[f"test/loss{suffix}"]))
    assert cost["macs_fraction"] == pytest.approx(cost["macs_measured"] / cost["macs_dense"])
    assert metrics["test/attended_drift"] == pytest.approx(8 / 64 - 8 / 16)
    assert not metric("test/ppl@32").higher_is_better
    assert metric("cost/kv_fraction@32").label == "KV bytes of dense at 32 tokens"


def test_lengths_become_a_table_and_figures_of_the_report(tested_at_lengths: dict[str, Any]) -> None:
    record = read_record(tested_at_lengths["folder"])
    section = sweep_section("shakespeare", [record])
    table = next(part for part in section.tables if isinstance(part, Table) and part.name == "lengths")
    assert table.column("length") == [16, 32, 64]
    assert table.column("attended_fraction") == [8 / 16, 8 / 32, 8 / 64]
    assert table.column("mean") == [record["metrics"][f"test/ppl{suffix}"] for suffix in ("", "@32", "@64")]
    assert {"lengths-quality", "lengths-attended"} <= {drawing.name for drawing in section.drawings}


def test_the_whole_test_split_is_read_at_every_length() -> None:
    config = load([*SMALL, *SHORT, "data.eval_windows=null"]).config
    data = Language.build_data(config)
    streams = [torch.cat([batch.targets.flatten() for batch in data.at_length(length)]) for length in (16, 24, 700)]
    counted = [stream[stream != IGNORED].sort().values for stream in streams]
    assert torch.equal(counted[0], counted[1])
    assert torch.equal(counted[0], counted[2])
    assert torch.equal(counted[0], torch.cat([b.targets[b.targets != IGNORED] for b in data.loader("test")]).sort()[0])


@pytest.mark.parametrize("method", ["dtrnet", "dtrnet visibility=all", "mod_lm", "dllm", "random_lm", "dense"])
def test_what_is_said_of_the_cache_is_what_generation_holds(method: str) -> None:
    overrides = [*SMALL, *[word if "=" in word else f"method={word}" for word in method.split()]]
    config = load(overrides).config
    model = build_model(config, 256).eval()
    task = Language(model, config.train, 0, 256, None, config.losses)
    ids = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(4))
    cache = model.new_cache()
    with torch.no_grad():
        _, trace = model(ids, return_trace=True)
        model(ids, cache=cache)
    shape = decoder_shape(model.get_submodule("backbone").config, 24)
    meter = WorkMeter(shape.depth)
    meter.add(trace)
    said = task.efficiency({"macs_measured": 1, "macs_dense": 1}, shape, meter.mean())
    assert 3 * said["kv_bytes"] == cache.logical_bytes


@pytest.mark.parametrize("rope", ["linear", "ntk", "yarn"])
def test_stretched_angles_are_those_of_transformers_and_go_again(rope: Rope) -> None:
    model: Any = build_model(load(["task=language", "method=dense"]).config, 256).backbone.eval()
    ids = torch.randint(0, 256, (1, 300), generator=torch.Generator().manual_seed(5))
    plain = model(ids).logits
    with stretched(model, rope, 300 / 128):
        found = model(ids).logits
    assert torch.equal(model(ids).logits, plain)
    config = copy.deepcopy(model.config)
    # Of `dynamic` transformers takes the factor from the length.
    kind = {"rope_type": "dynamic", "factor": 1.0} if rope == "ntk" else {"rope_type": rope, "factor": 300 / 128}
    config.rope_parameters = {"rope_theta": 10000.0, "original_max_position_embeddings": 128, **kind}
    own = LlamaForCausalLM(config).eval()
    own.load_state_dict(model.state_dict())
    torch.testing.assert_close(found, own(ids).logits)
    assert not torch.allclose(found, plain)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["task.eval_lengths=[0,16]"], "task.eval_lengths[0] = 0: must be a whole number at least 1"),
        (["task.eval_rope=longer"], "task.eval_rope = longer: must be one of plain, linear, ntk, yarn"),
        (["+task.lengths=[16]"], "task.lengths"),
        (["data=induction", "task.eval_lengths=[64]"], "task.eval_lengths = [64]: data=induction has windows of one"),
    ],
)
def test_options_out_of_range_are_refused_with_their_key(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load([*SMALL, *words])


def test_lengths_that_the_text_does_not_have_are_refused_before_training() -> None:
    with pytest.raises(DataProblem, match="the test split has 55758 tokens"):
        Language.build_data(load([*SMALL, "task.eval_lengths=[60000]"]).config)
