"""Leave-one-out as a probe: what it says of a model whose tokens' worth is known, of random scores, of the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.probes.test_probes import by_key, examples
from tests.routing.tiny import images, routed

from routing_lab.probes import leave_one_out
from routing_lab.probes.importance import Importance
from routing_lab.probes.leave_one_out import EFFECTS, leave_one_out_effects

X, LABELS = images(dtype=torch.float64), torch.tensor([0, 3, 1])


def test_forcing_in_what_is_kept_and_out_what_is_bypassed_changes_nothing() -> None:
    model = routed(["router=amod"], double=True)
    kept = torch.zeros(3, 17, dtype=torch.bool).scatter(1, model(X, return_trace=True)[1][1].kept, True)
    out, into = (leave_one_out(model, X, LABELS, 1, name) for name in ("force_skip", "force_keep"))
    assert (out[~kept] == 0).all()
    assert (into[kept] == 0).all()
    assert (into[~kept] != 0).any()


def test_forced_in_and_out_again_is_worth_the_same() -> None:
    half, one_more = (routed(["router=constant", f"capacity.fraction={k / 17 + 1e-6}"], double=True) for k in (8, 9))
    kept = [model(X, return_trace=True)[1][1].kept[0].tolist() for model in (half, one_more)]
    (token,) = set(kept[1]) - set(kept[0])
    for model in (half, one_more):  # the next routed layer computes everything, so that it does not choose anew
        model.layers["3"].capacity.fraction = 1.0
    into = leave_one_out(half, X, LABELS, 1, "force_keep")[:, token]
    out = leave_one_out(one_more, X, LABELS, 1, "force_skip")[:, token]
    torch.testing.assert_close(into, out, rtol=0, atol=1e-12)


def test_deleted_at_the_first_layer_is_deleted_from_the_input() -> None:
    model = routed(["router=amod", "capacity.fraction=1.0"], double=True)
    found = [
        leave_one_out(model, X, LABELS, layer, name) for layer, name in ((None, "drop_input"), (0, "drop_at_layer"))
    ]
    torch.testing.assert_close(*found, rtol=0, atol=1e-12, equal_nan=True)
    later = leave_one_out(model, X, LABELS, 3, "drop_at_layer")
    assert not torch.allclose(later, found[0], equal_nan=True)
    with pytest.raises(ValueError, match="layer = 4: drop_at_layer needs one of the layers 0 to 3"):
        leave_one_out(model, X, LABELS, 4, "drop_at_layer")


def test_effects_are_what_they_are_named_for() -> None:
    model = routed(["router=amod"], double=True)
    found = leave_one_out_effects(model, X, LABELS, 1, "force_skip", EFFECTS)
    assert set(found) == {"loss", "logit", "kl"}
    assert (found["kl"] >= -1e-12).all()
    torch.testing.assert_close(found["loss"], leave_one_out(model, X, LABELS, 1))
    worst = found["loss"].flatten().argmax()
    assert found["logit"].flatten()[worst] > 0  # a loss that rises most comes with a true logit that falls


@pytest.mark.parametrize("dense", [True, False])
def test_rows_of_the_probe_and_chance(dense: bool) -> None:
    some, probe = examples(batch=8), Importance(dense=dense)
    model = routed(["router=amod"])
    with torch.no_grad():
        arrays = probe.measure(model, some)
        expected = leave_one_out(model, some.inputs, some.targets, 3, sample_ids=some.index)[:, 1:]
    kept = arrays["kept"][:, 1] == 1
    np.testing.assert_allclose(arrays["worth.loss"][:, 1][kept], expected.numpy()[kept], atol=1e-6)
    assert ("dense.loss" in arrays) == dense
    assert np.isfinite(arrays["received"]).all()
    found = by_key(probe.summarise(arrays))
    for layer in model.routed_layers:
        for scorer in ("random", "shuffled"):
            finding = found[f"spearman/{scorer}/layer{layer}"]
            assert finding.low < finding.chance < finding.high
        # A-MoD routes by the attention received in the layer before.
        assert found[f"spearman/score/layer{layer}"].value == pytest.approx(
            found[f"spearman/received/layer{layer}"].value
        )
    again = probe.measure(model, some)
    assert all(np.array_equal(values, again[name], equal_nan=True) for name, values in arrays.items())


def test_scores_that_are_the_worth_itself_are_perfect() -> None:
    some, probe = examples(batch=4), Importance(dense=False)
    with torch.no_grad():
        arrays = probe.measure(routed(["router=linear"]), some)
    arrays["score"] = arrays["worth.loss"].copy()
    found = by_key(probe.summarise(arrays))
    for coefficient in ("pearson", "spearman", "kendall"):
        assert found[f"{coefficient}/score/layer1"].value == pytest.approx(1)
    assert found["pooled_spearman/score/layer1"].value == pytest.approx(1)


def test_tokens_that_are_gone_have_no_worth() -> None:
    some = examples(batch=4)
    model = routed(["router=linear", "bypass=drop", "capacity.fraction=0.5"])
    model.layers["3"].capacity.fraction = 1.0
    with torch.no_grad():
        arrays = Importance(dense=False).measure(model, some)
    gone = ~(arrays["kept"][:, 0] == 1)
    assert np.isnan(arrays["worth.loss"][:, 1][gone]).all()
    assert np.isfinite(arrays["worth.loss"][:, 1][~gone]).all()
