"""Probes on tiny models: what they must say where the truth is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.routing.tiny import PATCHES, images, routed, vit

from routing_lab.probes import measure
from routing_lab.probes.agreement import MaskAgreement
from routing_lab.probes.base import Examples, Finding
from routing_lab.probes.pictures import GONE, KEPT, MERGED, SKIPPED, picture, write_page, write_sheet
from routing_lab.probes.selection import CapacitySweep, SelectionBehaviour
from routing_lab.routing.model import RoutedModel
from routing_lab.routing.routers import ConstantRouter

BATCH = 12


def examples(with_masks: bool = True, batch: int = BATCH) -> Examples:
    generator = torch.Generator().manual_seed(3)
    masks = torch.zeros(batch, PATCHES, dtype=torch.bool)
    for row in masks:
        row[torch.randperm(PATCHES, generator=generator)[:4]] = True
    x = torch.randn(batch, 3, 8, 8, generator=generator)
    targets = torch.randint(0, 5, (batch,), generator=generator)
    return Examples(x, targets, torch.arange(batch), masks if with_masks else None)


def by_key(findings: list[Finding]) -> dict[str, Finding]:
    found = {finding.key: finding for finding in findings}
    assert len(found) == len(findings)
    return found


def knowing(model: RoutedModel, masks: torch.Tensor) -> RoutedModel:
    """The model with routers that score the masks."""
    scores = torch.nn.functional.pad(masks.float(), (1, 0), value=2.0)

    class Knows(ConstantRouter):
        def score(self, inputs):  # type: ignore[no-untyped-def]
            return scores[inputs.state.noise.sample_ids]

    for layer in model.layers.values():
        layer.router = Knows(layer.router.spec)
    return model


def test_the_scores_of_the_mask_itself_are_perfect_and_random_ones_are_at_chance() -> None:
    some = examples()
    assert some.masks is not None
    fraction = 5 / 17  # the class token and four patches
    model = knowing(routed(["router=constant", f"capacity.fraction={fraction + 1e-6}"]), some.masks)
    with torch.no_grad():
        found = by_key(MaskAgreement().summarise(MaskAgreement().measure(model, some)))
    for layer in model.routed_layers:
        for name in ("auc", "iou", "recall"):
            assert found[f"{name}/layer{layer}"].value == 1
        assert found[f"background_of_kept/layer{layer}"].value == 0
        assert found[f"background_of_pruned/layer{layer}"].value == 1
    many = examples(batch=400)
    with torch.no_grad():
        chance = by_key(MaskAgreement().summarise(MaskAgreement().measure(routed(["router=random"]), many)))
    for key in ("auc/layer1", "recall/layer1", "iou/layer3", "background_of_kept/layer3"):
        finding = chance[key]
        assert finding.chance == pytest.approx(finding.value, abs=0.05)
    assert chance["auc/layer1"].low < 0.5 < chance["auc/layer1"].high


def test_without_masks_agreement_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match="probe=agreement needs the patches that matter"):
        MaskAgreement().measure(routed(["router=amod"]), examples(with_masks=False))


def test_selection_of_a_router_by_position_and_of_a_random_one() -> None:
    probe = SelectionBehaviour()
    with torch.no_grad():
        fixed = by_key(probe.summarise(probe.measure(routed(["router=constant"]), examples(batch=60))))
        chance = by_key(probe.summarise(probe.measure(routed(["router=random"]), examples(batch=60))))
    assert fixed["by_position/layer1"].value == 1
    assert fixed["overlap/layer3"].value == 1
    assert fixed["training_agreement/layer1"].value == 1
    assert chance["by_position/layer1"].value == pytest.approx(chance["by_position/layer1"].chance, abs=0.1)
    assert chance["overlap/layer3"].value == pytest.approx(chance["overlap/layer3"].chance, abs=0.1)
    assert chance["overlap_rank/layer3"].low < 0 < chance["overlap_rank/layer3"].high
    assert chance["kept/layer1"].value == pytest.approx(7 / 16)  # eight tokens, the class token one of them
    assert {f"kept_of_class_{c}" for c in range(5)} <= chance.keys()


def test_rows_do_not_depend_on_the_batch() -> None:
    probe, some = SelectionBehaviour(), examples()
    model = routed(["router=amod"])
    with torch.no_grad():
        whole = probe.measure(model, some)
        part = probe.measure(
            model,
            Examples(
                some.inputs[4:7], some.targets[4:7], some.index[4:7], None if some.masks is None else some.masks[4:7]
            ),
        )
    for name, values in part.items():
        np.testing.assert_allclose(values, whole[name][4:7], atol=1e-5)


def test_capacity_sweep_keeps_what_it_says_and_puts_the_budget_back() -> None:
    model, probe = routed(["router=amod"]), CapacitySweep((1.0, 0.25))
    with torch.no_grad():
        found = by_key(probe.summarise(probe.measure(model, examples())))
        dense = vit()(examples().inputs).argmax(dim=1) == examples().targets
    assert found["accuracy_at_1"].value == pytest.approx(dense.float().mean().item())
    assert (found["tokens_at_1"].value, found["tokens_at_0.25"].value) == (17, 4)
    assert [layer.capacity.fraction for layer in model.layers.values()] == [0.5, 0.5]
    with pytest.raises(ValueError, match=r"fractions=\[0, 2\]: numbers in \(0, 1\]"):
        CapacitySweep((0, 2))
    with pytest.raises(ValueError, match="needs a capacity with a fraction"):
        probe.measure(routed(["router=linear", "capacity=threshold"]), examples())


def test_states_of_patches(tmp_path) -> None:  # type: ignore[no-untyped-def]
    some = examples(batch=2)
    skip = picture(routed(["router=amod"]), some, "skip")
    assert skip.states.shape == (2, 4, PATCHES)
    assert (skip.states[:, 0] == KEPT).all()
    assert set(np.unique(skip.states[:, 1])) == {SKIPPED, KEPT}
    pruned = picture(routed(["method=evit", "placement=list", "placement.layers=[1]"]), some, "evit")
    assert set(np.unique(pruned.states[:, 2])) == {KEPT, MERGED}
    dropped = picture(routed(["method=evit_no_fusion", "placement=list", "placement.layers=[1]"]), some, "drop")
    assert set(np.unique(dropped.states[:, 2])) == {GONE, KEPT}
    assert np.isnan(skip.scores[:, 0]).all()
    assert np.isfinite(skip.scores[:, 1]).all()
    page = write_page(
        tmp_path / "page.html",
        some.inputs,
        [skip, pruned],
        title="<script>alert(1)</script>",
        captions=["</script>", "b"],
    )
    text = page.read_text()
    assert "<script>alert" not in text
    assert text.count("</script>") == 2
    sheet = write_sheet(tmp_path / "sheet.png", some.inputs, skip)
    assert sheet.read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="15 patches make no square"):
        write_page(tmp_path / "x.html", images(), [picture_of(15)], title="t")


def picture_of(patches: int):  # type: ignore[no-untyped-def]
    from routing_lab.probes.pictures import Picture

    return Picture("x", np.zeros((3, 1, patches), dtype=np.uint8), np.zeros((3, 1, patches)), [], [])


def test_a_model_of_ones_own_is_probed_without_a_run() -> None:
    some = examples(batch=10)
    model = routed(["method=evit", "placement=list", "placement.layers=[1]"]).train()
    with torch.no_grad():
        arrays = SelectionBehaviour().measure(model.eval(), some)
    expected = by_key(SelectionBehaviour().summarise(arrays))
    found = by_key(measure(model.train(), SelectionBehaviour(), some.inputs, some.targets, batch_size=3))
    assert model.training
    assert found["kept/layer1"] == expected["kept/layer1"]
    scored = by_key(measure(model, MaskAgreement(), some.inputs, some.targets, masks=some.masks))
    assert 0 <= scored["auc/layer1"].value <= 1
