# ---
# jupyter:
#   jupytext:
#     cell_markers: '"""'
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
"""
# Aggregate results

Reads the records of any folder of runs, or of a Weights & Biases project (`runs = "wandb:<entity>/<project>"`), shows
the tables and figures of the report, and leaves room to explore. Everything is computed by `routing_lab.evidence`;
nothing here imports torch.
"""

# %%
from pathlib import Path

from IPython.display import display

from routing_lab.evidence import figures
from routing_lab.evidence.arms import group_arms
from routing_lab.evidence.figures import Measure, Row
from routing_lab.evidence.pilot import is_pilot
from routing_lab.evidence.registration import read_plans
from routing_lab.evidence.study import load_study
from routing_lab.evidence.tables import factor_table, pairwise_table, present_metric, sweep_table
from routing_lab.evidence.verdict import effects_table, evaluate, verdict_text
from routing_lab.evidence.wandb_source import read_source
from routing_lab.runs.records import to_frame

# %% tags=["parameters"]
runs = "../runs"
experiments = "../experiments"
metric = None  # a metric or cost of the records, as "test/acc"; None: the first that they have
factors = ["router.name", "capacity.fraction"]  # configuration keys that the arms are laid out by
reference = None  # label of an arm that the others are compared with; None: the dense arm, or the first one

# %% [markdown]
"""
## Runs

One row per run. Configuration keys have dots (`router.name`), everything measured has slashes (`test/acc`,
`cost/macs_measured`). Runs that failed or cannot be read are rows too; their `status` says so. Pilots never count.
"""

# %%
records = [record for record in read_source(runs) if not is_pilot(record)]
frame = to_frame(records)
print(frame["status"].value_counts().to_string() if records else f"{runs}: no runs there yet; nothing below has data")

# %%
frame.head()

# %% [markdown]
"""
## Arms and their differences

An arm is a configuration with its seeds. Differences are paired by seed.
"""

# %%
metric = metric or present_metric(group_arms(records))
table = sweep_table(records, metric=metric, reference=reference)
display(table)

# %%
rows = [
    Row(
        c.arm.label,
        c.difference.mean,
        c.difference.low,
        c.difference.high,
        tuple(c.arm.values(metric)[seed] - c.reference.values(metric)[seed] for seed in c.arm.values(metric)),
        c.detectable,
    )
    for c in table.comparisons
    if c.difference is not None
]
caption = table.arms.caption.removeprefix("Arms: ")
figures.forest(rows, Measure.of_difference(metric), f"Differences from each arm's reference, {caption}")

# %%
figures.pareto(table.members, metric, "cost/macs_measured", f"{metric} over measured cost, {caption}")

# %%
validation = metric.replace("test/", "val/", 1)
figures.curves(table.members, validation, f"Training curves of {validation}, {caption}")

# %%
figures.kept_fractions(table.members, f"Tokens kept, {caption}")

# %% [markdown]
"""
## By factor

One arm a row, laid out by `factors`. Arms that agree in all of them and differ elsewhere stay apart: a spread over both
would be one of configurations, not of seeds.
"""

# %%
factor_table(table.members, metric, factors)

# %%
pairwise_table(table.members[:8], metric, caption)

# %% [markdown]
"""
## Studies

Registered studies, and study files that a record names, with the verdict that their decision rule gives.
"""

# %%
plans = read_plans(runs) if Path(runs).is_dir() else []
results = [evaluate(plan.study, records, plan=plan) for plan in plans]
planned = {plan.study.name for plan in plans}
for name in sorted({str(record["study"]).split(".")[0] for record in records if record["study"]} - planned):
    path = Path(experiments) / f"{name}.yaml"
    if path.exists():
        results.append(evaluate(load_study(path), records))
for result in results:
    print(verdict_text(result), end="\n\n")

# %%
for result in results:
    display(effects_table(result))

# %% [markdown]
"""
## Explore

`frame` is an ordinary pandas frame. Figures are SVG: `Path("forest.svg").write_text(drawing.svg)`.
"""

# %%
frame.describe() if records else frame
