"""The oracle by leave-one-out: what it keeps, and that nothing that is told the targets does worse by chance."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.probes.test_probes import by_key, examples
from tests.routing.tiny import routed

from routing_lab.probes.oracle import CHOOSERS, LeaveOneOutOracle, most_valuable


def test_as_many_are_kept_and_the_prefix_stays_as_it_was() -> None:
    values = torch.tensor([[9.0, 1.0, 5.0, 3.0], [9.0, 4.0, 2.0, 8.0]])
    own = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 0]]).bool()
    free = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0]]).bool()
    assert most_valuable(values, own, free).tolist() == [[False, False, True, True], [True, True, False, False]]


@pytest.mark.parametrize(
    "overrides",
    [["router=amod"], ["router=linear", "scaling=multiply", "placement=list", "placement.layers=[3]"], ["bypass=drop"]],
    ids=" ".join,
)
def test_the_oracle_beats_chance_at_the_same_budget(overrides: list[str]) -> None:
    some = examples(batch=16)
    model = routed(overrides)
    with torch.no_grad():
        arrays, alone = (LeaveOneOutOracle(rows=rows).measure(model, some) for rows in (256, 7))
    found = by_key(LeaveOneOutOracle().summarise(arrays))
    assert found["loss/oracle_below_random"].low > 0
    assert found["loss/oracle_below_own"].low > 0
    assert found["accuracy/oracle_above_random"].value == pytest.approx(
        found["accuracy/oracle"].value - found["accuracy/random"].value
    )
    assert all(0 <= found[f"accuracy/{name}"].low <= found[f"accuracy/{name}"].high <= 1 for name in CHOOSERS)
    for name, values in arrays.items():
        np.testing.assert_allclose(alone[name], values, atol=1e-6)
