"""A study that compares methods compares them at one cost, and its plan says which number of each arm gives it."""

from __future__ import annotations

from pathlib import Path

from routing_lab import study as study_command

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def test_every_arm_of_token_reduction_but_the_dense_one_is_of_one_cost() -> None:
    planned = study_command.plan_study(EXPERIMENTS / "token_reduction.yaml", here=False)
    matched = {arm: loaded.config.match for arm, loaded in planned.arms.items()}
    assert [arm for arm, match in matched.items() if match.solution is None] == ["dense"]
    found = [match for arm, match in matched.items() if arm != "dense"]
    assert len({match.share * match.macs for match in found}) == 1
    assert all(abs(match.solution.ratio - 1) <= 0.01 for match in found)
    told = study_command.describe(planned)
    assert "  tome: match.key=bypass.merged: at [" in told
    # A cell is given the cost of the arm, and so finds the same number anywhere.
    evit = planned.jobs[[cell.arm for cell in planned.plan.cells].index("evit")]
    assert f"match.macs={matched['evit'].macs}" in evit
