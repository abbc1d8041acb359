"""Structure of attention maps: against hand cases, against the maps themselves, in every family and layer."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from tests.backbones.families import FAMILIES, inputs_of
from tests.routing.tiny import DEPTH, HEADS, PATCHES, images, llama, routed, token_ids, vit
from torch import Tensor

from routing_lab.attention import AttentionMap, StatisticsRequest
from routing_lab.probes import structure
from routing_lab.probes.base import Examples, traced
from routing_lab.probes.runner import Sample, Subject, run_probe
from routing_lab.probes.structure import AttentionStructure, MapStructure, map_structure
from routing_lab.routing.maps import Entering
from routing_lab.routing.tokens import Positioned


def of_rows(rows: Tensor, **options: object) -> MapStructure:
    """The structure of a map with one sample and head, [N, N] rows that sum to one."""
    tokens = len(rows)
    eye = torch.eye(tokens)[None, None]
    side = Positioned(torch.zeros(1, tokens, 1))
    found = map_structure(AttentionMap(eye * 0, eye, 1.0, rows.log()[None, None]), side, side, **options)  # type: ignore[arg-type]
    assert found is not None
    return found


def value(found: MapStructure, name: str) -> float:
    return float(found.of_map[name][0, 0])


def test_an_even_map_has_entropy_log_n_and_nothing_stands_out() -> None:
    found = of_rows(torch.full((20, 20), 1 / 20), prefix=1)
    for name in ("row_entropy", "column_entropy"):
        assert value(found, name) == pytest.approx(math.log(20))
    assert value(found, "gini") == pytest.approx(0, abs=1e-7)
    assert value(found, "largest_share") == pytest.approx(1 / 20)
    assert value(found, "top_share") == pytest.approx(2 / 20)
    assert value(found, "first_share") == pytest.approx(1 / 20)
    assert value(found, "prefix_sinks") == value(found, "patch_sinks") == 0
    for name, values in found.of_even.items():
        assert values == pytest.approx(found.of_map[name], abs=1e-7), name


def test_a_map_on_one_key_has_entropy_zero_and_that_key_is_the_sink() -> None:
    rows = torch.zeros(20, 20)
    rows[:, 0] = 1
    found = of_rows(rows, prefix=1)
    assert (value(found, "row_entropy"), value(found, "column_entropy")) == pytest.approx((0, 0))
    assert value(found, "gini") == pytest.approx(19 / 20)
    for name in ("largest_share", "top_share", "prefix_share", "first_share", "prefix_sinks"):
        assert value(found, name) == pytest.approx(1)
    assert value(found, "patch_sinks") == 0
    assert math.isnan(value(found, "distance"))  # no patch looks at a patch
    rows = rows.roll(3, dims=1)
    assert value(of_rows(rows, prefix=1), "patch_sinks") == 1
    assert value(of_rows(rows, prefix=1), "prefix_share") == 0


def test_distance_is_that_of_patches_on_their_grid_and_on_a_line() -> None:
    own = torch.eye(9)
    assert value(of_rows(own, grid=(3, 3)), "distance") == 0
    ahead = own.roll(1, dims=1)  # patch 0 looks at 1, ..., 8 at 0
    assert value(of_rows(ahead), "distance") == pytest.approx((8 * 1 + 8) / 9)
    expected = (6 * 1 + 2 * math.hypot(1, 2) + math.hypot(2, 2)) / 9
    assert value(of_rows(ahead, grid=(3, 3)), "distance") == pytest.approx(expected)
    half = 0.5 * own + 0.5 * ahead
    assert value(of_rows(half, grid=(3, 3)), "distance") == pytest.approx(expected / 2)
    assert value(of_rows(half), "row_entropy") == pytest.approx(math.log(2))


def test_variance_over_heads() -> None:
    received = np.array([[[2.0, 0.0], [0.0, 2.0]], [[1.0, np.nan], [1.0, np.nan]]])
    assert structure.head_variance(received).tolist() == [1.0, 0.0]


def watched(model, examples: Examples) -> tuple[Tensor, dict[tuple[int, int], tuple[AttentionMap, Positioned]]]:  # type: ignore[no-untyped-def]
    maps = {}

    def watch(layer: int, part: int, attention: AttentionMap, queries: Positioned, keys: Positioned) -> None:
        maps[layer, part] = (attention, queries)

    with torch.no_grad():
        output, _ = traced(model, examples, watch)
    return output, maps


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_shows_the_maps_it_attends_by_and_computes_the_same(name: str) -> None:
    model = routed(["router=constant"], FAMILIES[name]())
    x = inputs_of(name)
    output, maps = watched(model, Examples(x, torch.zeros(len(x), dtype=torch.int64), torch.arange(len(x))))
    with torch.no_grad():
        torch.testing.assert_close(output, model(x), atol=2e-5, rtol=1e-4)
    assert {layer for layer, _ in maps} == set(range(model.adapter.depth))
    for attention, _ in maps.values():
        rows = attention.rows()
        torch.testing.assert_close(rows.sum(dim=-1), torch.ones(rows.shape[:3]))


@pytest.mark.parametrize("visibility", ["kept", "all"])
def test_the_map_shown_is_the_one_whose_statistics_are_known(visibility: str) -> None:
    model = routed(["router=amod", f"visibility={visibility}"])
    x = images()
    _, maps = watched(model, Examples(x, torch.zeros(3, dtype=torch.int64), torch.arange(3)))
    tokens, context = model.embed(x)
    seen: list[Entering] = []
    with torch.no_grad():
        model.forward_from(Entering(0, tokens), context, model.run_state(tokens), seen=seen)
        found = model.adapter.block(0).statistics(seen[0].tokens.side(), context, StatisticsRequest(received=True))
    torch.testing.assert_close(maps[0, 0][0].rows().mean(dim=2), found.received)
    kept, keys = maps[1, 0][0].query.shape[2], maps[1, 0][0].key.shape[2]
    assert (kept, keys) == (8, 17 if visibility == "all" else 8)


def summary(model, examples: Examples, **options: float) -> dict[str, float]:  # type: ignore[no-untyped-def]
    probe = AttentionStructure(**options)
    with torch.no_grad():
        findings = probe.summarise(probe.measure(model, examples))
    found = {finding.key: finding.value for finding in findings}
    assert len(found) == len(findings)
    return found


def some(batch: int = 6, masks: bool = True) -> Examples:
    generator = torch.Generator().manual_seed(3)
    inside = torch.rand(batch, PATCHES, generator=generator) < 0.3
    targets = torch.randint(0, 5, (batch,), generator=generator)
    return Examples(images(batch), targets, torch.arange(batch), inside if masks else None)


@pytest.mark.parametrize(
    "overrides",
    [
        ["router=amod"],
        ["method=evit", "placement=list", "placement.layers=[1]"],
        ["router=linear", "capacity=threshold"],
    ],
)
def test_rows_do_not_depend_on_the_batch_or_the_slab(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, probe, whole = routed(overrides), AttentionStructure(), some()
    with torch.no_grad():
        expected = probe.measure(model, whole)
        monkeypatch.setattr(structure, "SLAB", 3 * HEADS * 17)
        part = probe.measure(model, Examples(*(getattr(whole, name)[2:3] for name in ("inputs", "targets", "index"))))
    for name, values in part.items():
        np.testing.assert_allclose(values, expected[name][2:3], atol=1e-5, err_msg=name)


def test_findings_by_layer_and_head_with_chance_and_what_they_are_joined_with() -> None:
    found = summary(routed(["router=amod"]), some(12))
    for layer in range(DEPTH):
        heads = [found[f"row_entropy/layer{layer}/head{head}"] for head in range(HEADS)]
        assert found[f"row_entropy/layer{layer}"] == pytest.approx(np.mean(heads))
        assert 0 < found[f"row_entropy/layer{layer}"] < math.log(17 if layer % 2 == 0 else 8)
        assert -1 <= found[f"row_entropy_and_loss/layer{layer}"] <= 1
    assert "largest_share_and_recall/layer1" in found
    assert "largest_share_and_recall/layer0" not in found
    assert not any(key.startswith("largest_share_and_recall") for key in summary(routed([]), some(masks=False)))


def test_what_patches_receive_follows_them_through_the_layers() -> None:
    with torch.no_grad():
        arrays = AttentionStructure(top=0.25).measure(routed(["router=amod"]), some(4))
    there = np.isfinite(arrays["received"])
    assert there[:, 0].all()
    assert (there[:, 1].sum(axis=1) == 7).all()  # eight of seventeen tokens are kept, the class token among them
    found = {finding.key: finding for finding in AttentionStructure(top=0.25).summarise(arrays)}
    by_hand = []
    for first, second in ((0, 1), (1, 2), (2, 3)):
        pairs = [there[row, first] & there[row, second] for row in range(4)]
        rows = zip(arrays["received"], pairs, strict=True)
        by_hand.append([stats.spearmanr(row[first][both], row[second][both]).statistic for row, both in rows])
    assert found["received_rank_1"].value == pytest.approx(np.mean(by_hand))
    assert f"received_rank_{DEPTH}" not in found
    assert found["head_overlap/layer0"].chance == pytest.approx(1 / 7)
    assert 0 <= found["head_overlap/layer0"].value <= 1


def test_a_decoder_is_measured_over_what_each_token_sees() -> None:
    ids = token_ids(4, 12)
    found = summary(routed([], llama()), Examples(ids, ids.roll(-1, dims=1), torch.arange(4)))
    even = np.mean([math.log(seen) for seen in range(1, 13)])
    probe = AttentionStructure()
    with torch.no_grad():
        arrays = probe.measure(routed(["router=dense"], llama()), Examples(ids, ids.roll(-1, dims=1), torch.arange(4)))
    assert arrays["even.row_entropy"] == pytest.approx(np.full((4, DEPTH), even))
    assert found["row_entropy/layer0"] < even
    apart = torch.tensor([[0] * 6 + [1] * 6]).expand(4, -1)
    with torch.no_grad():
        arrays = probe.measure(
            routed(["router=dense"], llama()), Examples(ids, ids.roll(-1, dims=1), torch.arange(4), segments=apart)
        )
    even = np.mean([math.log(seen) for seen in range(1, 7)])
    assert arrays["even.row_entropy"] == pytest.approx(np.full((4, DEPTH), even))


def test_the_figure_stands_beside_the_findings(tmp_path: Path) -> None:
    whole = some(4)

    def examples(index: Tensor) -> Examples:
        return Examples(whole.inputs[index], whole.targets[index], index)

    subject = Subject("run", "a", tmp_path, routed(["router=amod"]), examples, torch.arange(4))
    run_probe("structure", AttentionStructure(), {}, subject, Sample(4, 0, 2))
    assert (tmp_path / "probes" / "structure.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="sink = 0: a share"):
        AttentionStructure(sink=0)


def test_an_untrained_model_can_be_measured_in_python() -> None:
    assert 0 < summary(routed([], vit()), some(2))["gini/layer0"] < 1
