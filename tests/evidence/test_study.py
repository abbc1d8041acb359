"""Studies: checked before they run, contrasts refused when other keys differ, verdicts from records alone."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.evidence.synthetic import configuration, write_run

from routing_lab.evidence import statistics
from routing_lab.evidence.effects import describe
from routing_lab.evidence.registration import Cell, Plan
from routing_lab.evidence.rules import Evidence, parse_condition
from routing_lab.evidence.study import Contrast, Study, StudyError, check_arms, compound, load_study, parse_study
from routing_lab.evidence.verdict import effects_table, evaluate, verdict_record, verdict_text
from routing_lab.runs.records import RecordError, read_records

ARMS: dict[str, dict[str, Any]] = {
    "dense": {"router": "dense"},
    "linear_none": {"router": "linear", "scaling.name": "none"},
    "linear_multiply": {"router": "linear"},
    "amod_none": {"router": "amod", "scaling.name": "none"},
    "amod_multiply": {"router": "amod"},
}

CONTENT: dict[str, Any] = {
    "name": "confound",
    "question": "Is it the score source or the output rule?",
    "hypothesis": {"statement": "The source.", "predicted": {"source at none": "positive", "source x scaling": "none"}},
    "arms": {arm: [f"{key}={value}" for key, value in changes.items()] for arm, changes in ARMS.items()},
    "seeds": [0, 1, 2, 3, 4, 5],
    "reference": "dense",
    "contrasts": {
        "source at none": {"arms": ["amod_none", "linear_none"], "differ_in": "router"},
        "papers": {"arms": ["amod_none", "linear_multiply"], "differ_in": ["router", "scaling"]},
    },
    "factors": {
        "source": {
            "differ_in": "router",
            "levels": {"linear": ["linear_none", "linear_multiply"], "attention": ["amod_none", "amod_multiply"]},
        },
        "scaling": {
            "differ_in": "scaling",
            "levels": {"none": ["linear_none", "amod_none"], "multiply": ["linear_multiply", "amod_multiply"]},
        },
    },
    "decision": {
        "rules": [
            {"verdict": "supports", "says": "it is the source", "when": {"source: attention - linear": "positive"}},
            {
                "verdict": "contradicted",
                "says": "it is worse",
                "when_any": {"source at none": "negative", "papers": "< 0"},
            },
        ]
    },
    "scales": {"toy": {"overrides": ["data=digits"], "seconds_per_cell": 45, "machine": "2 CPU cores"}},
}


def content(**changes: Any) -> dict[str, Any]:
    """`CONTENT` with dotted keys (`__` for the dot) changed; None removes a key."""
    changed = copy.deepcopy(CONTENT)
    for key, value in changes.items():
        *parents, last = key.split("__")
        node = changed
        for parent in parents:
            node = node[parent]
        if value is None:
            del node[last]
        else:
            node[last] = value
    return changed


@pytest.fixture
def study() -> Study:
    return parse_study(CONTENT)


def write_study(root: Path, accuracy: dict[str, float], seeds: range = range(6), **options: Any) -> None:
    for number, (arm, changes) in enumerate(ARMS.items()):
        for seed in seeds:
            value = accuracy.get(arm, 0.9) + 0.002 * math.sin(7 * seed) + 0.0007 * math.cos(seed * (number + 2))
            write_run(root, {**changes, "study": "confound.toy", "arm": arm}, seed, value, noise=number, **options)


def test_study_reads_from_its_file_and_composes_overrides(tmp_path: Path, study: Study) -> None:
    path = tmp_path / "confound.yaml"
    path.write_text(json.dumps(content(name=None, common=["init=scratch"])))
    loaded = load_study(path)
    assert loaded.name == "confound"
    assert loaded.contrasts == study.contrasts
    assert loaded.overrides("amod_none", "toy", ["train.epochs=1"]) == [
        "init=scratch",
        "data=digits",
        "router=amod",
        "scaling.name=none",
        "train.epochs=1",
    ]
    larger = parse_study(content(scales__toy__arms={"dense": ["backbone=vit_mini"]}))
    assert larger.overrides("dense", "toy") == ["data=digits", "router=dense", "backbone=vit_mini"]
    with pytest.raises(StudyError, match="scale='paper': one of toy"):
        loaded.overrides("dense", "paper")
    assert loaded.key("toy") == "confound.toy"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"arms": {"dense": []}}, "arms"),
        ({"question": None}, "question"),
        ({"surprise": 1}, "surprise=1"),
        ({"seeds": [-1]}, "seeds.0=-1"),
        ({"seeds": [0, 0]}, "every seed once"),
        ({"seeds": ["0"]}, "seeds.0"),
        ({"reference": "mod"}, "reference=['mod']: no such arm; dense, linear_none"),
        ({"contrasts__papers__arms": ["amod", "mod"]}, "no such arm"),
        ({"contrasts__papers__arms": ["dense", "dense"]}, "two different arms"),
        ({"contrasts__papers__arms": ["dense"]}, "contrasts.papers.arms"),
        (
            {"hypothesis__predicted": {"x": "positive"}},
            "hypothesis.predicted.x: no such effect; there are: source at none",
        ),
        ({"hypothesis__predicted": {"papers": "up"}}, "hypothesis.predicted.papers='up'"),
        ({"tests": {"C01": ["papers", "x"]}}, "tests.C01: no such effect; there are: source at none"),
        (
            {"decision__rules": [{"verdict": "supports", "says": "s", "when": {"papers": "better"}}]},
            "is not a condition",
        ),
        (
            {"decision__rules": [{"verdict": "supports", "says": "s", "when": {"x": "positive"}}]},
            "rules.0.x: no such effect",
        ),
        ({"decision__rules": [{"verdict": "supports", "says": "s"}]}, "at least one condition"),
        ({"decision__rules": [{"verdict": "yes", "says": "s"}]}, "decision.rules.0.verdict='yes'"),
        ({"factors__scaling": None}, "two crossed factors"),
        ({"factors__scaling__levels__none": ["linear_none", "dense"]}, "one arm is expected at attention and none"),
        ({"arms__dense": ["router=dense", "seed=3"]}, "the study sets seed"),
        ({"common": ["study=x"]}, "common=['study=x']: the study sets seed"),
        ({"scales__toy__arms": {"mod": []}}, "scales.toy.arms=['mod']: no such arm"),
        ({"scales": {"huge": CONTENT["scales"]["toy"]}}, "huge"),
    ],
)
def test_what_cannot_be_run_or_judged_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(StudyError) as caught:
        parse_study(content(**changes))
    assert problem in str(caught.value)
    assert str(caught.value).startswith("confound: ")


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(StudyError) as caught:
        parse_study(content(reference="mod", seeds=[0, 0], contrasts__papers__arms=["dense", "dense"]))
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("text", ["", "- a\n", "a: [\n", "a: 1\na: 2\n"])
def test_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(StudyError, match=r"s\.yaml|s: "):
        load_study(tmp_path / "s.yaml")
    with pytest.raises(StudyError, match="no such file"):
        load_study(tmp_path / "absent.yaml")


def test_weak_studies_are_legal_and_say_so(study: Study) -> None:
    notes = "\n".join(study.warnings())
    assert "comparisons of whole configurations, not effects of one axis: papers" in notes
    assert "no margin is stated" in notes
    assert "no positive control is named" in notes
    assert "single run" in parse_study(content(seeds=[0])).warnings()[0]


@pytest.mark.parametrize(
    ("text", "interval", "holds"),
    [
        ("positive", (0.1, 0.2), True),
        ("undecided", (-0.1, 0.2), True),
        ("not undecided", (0.1, 0.2), True),
        ("not undecided", (-0.1, 0.2), False),
        ("negative", (-0.2, -0.1), True),
        ("superior or inferior", (-0.2, -0.1), True),
        ("> 0.05", (0.1, 0.2), True),
        (">0.15", (0.1, 0.2), False),
        ("< -1e-3", (-0.2, -0.1), True),
        ("within 0.25", (-0.1, 0.2), True),
        ("within 0.15", (-0.1, 0.2), False),
        ("positive", (math.nan, math.nan), False),
    ],
)
def test_conditions(text: str, interval: tuple[float, float], holds: bool) -> None:
    assert parse_condition(text).holds(Evidence(*interval, *interval)) is holds


@pytest.mark.parametrize("text", ["", "better", "positive > 1", "> x", "not", "within", "positive and negative"])
def test_other_conditions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a condition"):
        parse_condition(text)


def test_controlled_arms_pass_and_others_are_refused_with_the_keys_that_differ(study: Study) -> None:
    configs = {arm: configuration(changes) for arm, changes in ARMS.items()}
    check_arms(study, configs)
    configs["amod_none"] = configuration(ARMS["amod_none"] | {"capacity.fraction": 0.25, "train.lr": 0.1})
    with pytest.raises(StudyError) as caught:
        check_arms(study, configs)
    first = "source at none: not controlled: amod_none and linear_none also differ in capacity.fraction, train.lr"
    assert any(problem.startswith(first) for problem in caught.value.problems)
    assert any(problem.startswith("factor source: not controlled") for problem in caught.value.problems)

    configs["amod_none"] = configs["linear_none"]
    with pytest.raises(StudyError, match="do not differ; they should in router"):
        check_arms(study, configs)
    configs["amod_none"] = configuration({"router": "amod"})
    with pytest.raises(StudyError, match="arms amod_none and amod_multiply are the same configuration"):
        check_arms(study, configs)


@pytest.mark.parametrize(
    ("differ_in", "first", "second", "things"),
    [
        ("train", {"train.lr": 0.1, "train.epochs": 9}, {}, "train.epochs, train.lr"),
        ("data", {"data.name": "planted", "data.num_classes": 8}, {}, "data, data.num_classes"),
        ("capacity", {"capacity.fraction": 0.9, "capacity.protect": "none"}, {}, "capacity.fraction, capacity.protect"),
        ("router", {"router.corrupt": "shuffle"}, {"router": "amod"}, "router, router.corrupt"),
        ("router", {"router": "amod"}, {}, ""),
        ("train.lr", {"train.lr": 0.1}, {}, ""),
    ],
)
def test_a_controlled_contrast_differs_in_one_thing(
    differ_in: str, first: dict[str, Any], second: dict[str, Any], things: str
) -> None:
    """A leaf key, or the member of an axis with the options that only one of the two has; not whatever has one key."""
    configs = {"a": configuration({"router": "linear"} | first), "b": configuration({"router": "linear"} | second)}
    told = compound("x", Contrast(arms=["a", "b"], differ_in=[differ_in]), configs)
    assert ("compound" in told) == bool(things)
    assert things in told
    strict = {
        "margin": {"size": 0.01, "because": "b"},
        "contrasts": {"x": {"arms": ["a", "b"], "differ_in": differ_in}},
    }
    strict |= {"arms": {"a": ["x=1"], "b": ["x=2"]}, "reference": "a", "factors": {}}
    strict |= {"hypothesis__predicted": {"x": "none"}}
    rules = [{"verdict": "supports", "says": "s", "when": {"x": "superior"}}]
    study = parse_study(content(**strict, decision={"rules": rules, "otherwise": {"verdict": "mixed", "says": "m"}}))
    if things:
        with pytest.raises(StudyError, match="compound"):
            check_arms(study, configs)
    else:
        check_arms(study, configs)


def test_declared_keys_must_differ(study: Study) -> None:
    configs = {arm: configuration(changes) for arm, changes in ARMS.items()}
    wide = parse_study(content(contrasts__papers__differ_in=["router", "scaling", "capacity"]))
    with pytest.raises(StudyError, match="do not differ in capacity, which is declared"):
        check_arms(wide, configs)


def test_verdict_follows_the_rules_and_equals_the_statistics(tmp_path: Path, study: Study) -> None:
    write_study(tmp_path, {"amod_none": 0.93, "amod_multiply": 0.92, "linear_none": 0.91})
    records = read_records(tmp_path)
    result = evaluate(study, records, scale="toy")
    assert (result.verdict.name, result.verdict.says) == ("supports", "it is the source")
    assert result.verdict.is_complete
    assert result.scale == "toy"
    assert not result.missing

    values = {arm: {r["seed"]: r["metrics"]["test/acc"] for r in records if r["arm"] == arm} for arm in ARMS}
    # Two ways lead to the second rule, so that every test is made at half of 0.05.
    assert study.family.ways == {"supports": 1, "contradicted": 2}
    direct = statistics.paired_by_seed(values["amod_none"], values["linear_none"], level=0.975)
    effect = result.effects["source at none"]
    assert (effect.estimate, effect.low, effect.high, effect.p) == (direct.mean, direct.low, direct.high, direct.p)
    assert dict(effect.values) == {s: values["amod_none"][s] - values["linear_none"][s] for s in values["amod_none"]}
    assert math.isnan(effect.p_holm)
    assert not result.effects["papers"].is_controlled
    assert "whole configurations" in describe(result.effects["papers"])
    assert result.predictions()[0] == ("source at none", "positive", "superior")

    text = verdict_text(result)
    assert "Verdict: supports: it is the source" in text
    assert "source: attention - linear" in text
    assert "scale: toy" in text
    table = effects_table(result)
    assert "scale: toy" in table.caption
    assert table.column("estimate")[0] == direct.mean
    assert verdict_record(result)["effects"]["source at none"]["estimate"] == direct.mean


def test_second_rule_and_no_rule(tmp_path: Path, study: Study) -> None:
    write_study(tmp_path / "worse", {"amod_none": 0.88, "amod_multiply": 0.92})
    assert evaluate(study, read_records(tmp_path / "worse")).verdict.name == "contradicted"
    write_study(tmp_path / "equal", {})
    verdict = evaluate(study, read_records(tmp_path / "equal")).verdict
    assert (verdict.name, verdict.is_complete) == ("inconclusive", True)
    assert verdict.says == "no rule of the decision is met"


def test_holm_withholds_a_sign_that_the_interval_alone_would_grant(tmp_path: Path) -> None:
    write_study(tmp_path, {"amod_none": 0.9009, "amod_multiply": 0.9})
    records = read_records(tmp_path)
    rules = CONTENT["decision"]["rules"]
    plain, strict = (
        evaluate(parse_study(content(decision={"rules": rules, "adjust": adjust})), records).effects["source at none"]
        for adjust in ("none", "holm")
    )
    assert plain.low == strict.low
    assert plain.p <= 0.05 < strict.p_holm
    assert (plain.state_text, strict.state_text) == ("superior", "inconclusive")


def test_missing_and_failed_cells_leave_the_study_inconclusive_and_are_named(tmp_path: Path, study: Study) -> None:
    write_study(tmp_path, {"amod_none": 0.93})
    for path in sorted(tmp_path.glob("*-router_amod-name_none-s*"))[:2]:
        (path / "run.json").unlink()
        path.rmdir()
    result = evaluate(study, read_records(tmp_path))
    assert result.missing == ("amod_none: missing: seeds 0, 1",)
    assert (result.verdict.name, result.verdict.is_complete) == ("inconclusive", False)
    assert "seeds differ" in result.effects["source at none"].refusal
    assert result.effects["source at none"].state_text == "unknown"
    assert "Missing: amod_none" in verdict_text(result)
    nothing = evaluate(study, [])
    assert nothing.verdict.name == "inconclusive"
    assert "no results of" in nothing.effects["papers"].refusal


def test_two_seeds_are_a_single_run_and_decide_nothing(tmp_path: Path) -> None:
    write_study(tmp_path, {"amod_none": 0.99, "amod_multiply": 0.99}, range(2))
    result = evaluate(parse_study(content(seeds=[0, 1])), read_records(tmp_path))
    assert result.verdict.name == "inconclusive"
    assert "single run" in result.verdict.says
    assert result.effects["source at none"].note == "single run"


def test_effect_is_refused_when_records_differ_in_another_key_data_or_initial_weights(
    tmp_path: Path, study: Study
) -> None:
    write_study(tmp_path, {"amod_none": 0.93})
    records = read_records(tmp_path)
    amod = [record for record in records if record["arm"] == "amod_none"]
    for record in amod:
        record["config"]["train"]["lr"] = 0.1
    result = evaluate(study, records)
    assert "also differ in train.lr" in result.effects["source at none"].refusal
    assert "factor source: not controlled" in result.effects["source: attention - linear"].refusal
    assert result.verdict.name == "inconclusive"
    amod[0]["config"]["train"]["lr"] = 0.2
    with pytest.raises(RecordError, match="amod_none has records of 2 configurations"):
        evaluate(study, records)
    for record in amod:
        record["config"]["train"]["lr"] = 0.002
    amod[2]["init"]["hash"] = "other"
    assert "other initial weights under one seed" in evaluate(study, records).effects["source at none"].refusal
    amod[2]["data"]["fingerprint"] = "other"
    assert "other data under one seed" in evaluate(study, records).effects["source at none"].refusal


def test_equal_differences_are_insensitive_and_counted_ones_are_not(tmp_path: Path) -> None:
    for arm, changes in ARMS.items():
        for seed in range(3):
            accuracy = 0.9 + 0.01 * seed + (0.02 if arm == "amod_none" else 0.0)
            write_run(tmp_path, {**changes, "study": "confound", "arm": arm}, seed, accuracy)
    records = read_records(tmp_path)
    rules = [{"verdict": "supports", "says": "better", "when": {"source at none": "positive"}}]
    equal = evaluate(parse_study(content(seeds=[0, 1, 2], decision={"rules": rules})), records)
    effect = equal.effects["source at none"]
    assert effect.estimate == pytest.approx(0.02)
    assert effect.state_text == "insensitive"
    assert (equal.verdict.name, equal.verdict.is_complete) == ("insensitive", True)
    assert "no estimate of noise" in equal.verdict.reasons[0]

    contrasts = {"cost": {"arms": ["amod_none", "dense"], "differ_in": ["router", "scaling"]}}
    rules = [{"verdict": "supports", "says": "cheaper", "when": {"cost": "negative"}}]
    counted = evaluate(
        parse_study(
            content(
                seeds=[0, 1, 2],
                metric="cost/macs_measured",
                contrasts=contrasts,
                factors={},
                hypothesis__predicted={"cost": "negative"},
                decision={"rules": rules},
            )
        ),
        records,
    )
    assert counted.effects["cost"].low == counted.effects["cost"].high == -250_000
    assert counted.verdict.name == "supports"


def test_plan_finds_runs_that_another_study_made(tmp_path: Path, study: Study) -> None:
    write_study(tmp_path, {"amod_none": 0.93})
    records = read_records(tmp_path)
    cells = tuple(Cell(record["arm"], record["seed"], record["run_id"]) for record in records)
    for record in records:
        record["study"] = "another"
    assert evaluate(study, records, plan=Plan(study, "toy", cells)).verdict.is_complete
    assert not evaluate(study, records).verdict.is_complete


def test_bootstrap_over_seeds_and_examples_reads_the_predictions(tmp_path: Path, study: Study) -> None:
    write_study(tmp_path, {"amod_none": 0.93, "linear_none": 0.88}, examples=200)
    bootstrap = evaluate(study, read_records(tmp_path)).effects["source at none"].bootstrap
    assert bootstrap is not None
    assert bootstrap.low < bootstrap.estimate < bootstrap.high
    assert bootstrap.estimate == pytest.approx(0.05, abs=0.01)


def test_convergence_and_cost_at_equal_accuracy(tmp_path: Path) -> None:
    for number, (arm, changes) in enumerate({**ARMS, "amod_25": {"router": "amod", "capacity.fraction": 0.25}}.items()):
        for seed in range(6):
            accuracy = {"amod_25": 0.85, "amod_multiply": 0.93, "dense": 0.9}.get(arm, 0.8) + 0.003 * math.sin(
                seed + number
            )
            write_run(tmp_path, {**changes, "study": "confound", "arm": arm}, seed, accuracy, epochs=8)
    arms = CONTENT["arms"] | {"amod_25": ["router=amod", "capacity.fraction=0.25"]}
    contrasts = CONTENT["contrasts"] | {"speed": {"arms": ["amod_multiply", "linear_multiply"], "differ_in": "router"}}
    study = parse_study(
        content(
            arms=arms,
            contrasts=contrasts,
            convergence={"targets": [0.5, 0.9]},
            equal_accuracy={"curve": ["amod_25", "amod_multiply"], "reference": "dense"},
        )
    )
    effects = evaluate(study, read_records(tmp_path)).effects
    assert effects["speed-up speed @ 0.5"].estimate == pytest.approx(1.0)
    assert "not reached in every run (6 at least" in effects["speed-up speed @ 0.9"].refusal
    assert effects["area speed"].sign == 1
    saving = effects["saving at equal accuracy"]
    assert 0.25 < saving.low < saving.estimate < saving.high < 0.375
    assert describe(saving).startswith("saving at equal accuracy (whole configurations) superior: +")
