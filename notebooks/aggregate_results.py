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

Reads the records of a folder of runs, or of a Weights & Biases project (`runs = "wandb:<entity>/<project>"`), into
one tidy frame, shows the tables and figures of the report, and leaves room to explore. Everything is computed by
`routing_lab.evidence`; nothing here imports torch.
"""

# %%
from pathlib import Path

from IPython.display import display

from routing_lab.evidence import figures
from routing_lab.evidence.registration import read_plans
from routing_lab.evidence.study import load_study
from routing_lab.evidence.tables import pairwise_table, sweep_table
from routing_lab.evidence.verdict import effects_table, evaluate, verdict_text
from routing_lab.evidence.wandb_source import read_source
from routing_lab.runs.records import to_frame

# %% tags=["parameters"]
runs = "../runs"
experiments = "../experiments"

# %% [markdown]
"""
## Runs

One row per run. Configuration keys have dots (`router.name`), everything measured has slashes (`test/acc`,
`cost/macs_measured`). Runs that failed or cannot be read are rows too; their `status` says so.
"""

# %%
records = read_source(runs)
frame = to_frame(records)
frame["status"].value_counts()

# %%
frame.head()

# %% [markdown]
"""
## Arms and their differences

An arm is a configuration with its seeds. Differences are paired by seed against the dense arm, or the first one.
"""

# %%
table = sweep_table(records)
display(table)

# %%
rows = [
    figures.Row(c.arm.label, c.difference.mean, c.difference.low, c.difference.high)
    for c in table.comparisons
    if c.difference is not None
]
caption = table.arms.caption.removeprefix("Arms: ")
figures.forest(rows, figures.Measure.of_difference("test/acc"), f"Differences from the reference arm, {caption}")

# %%
figures.pareto(table.members, "test/acc", "cost/macs_measured", f"Accuracy over measured cost, {caption}")

# %%
figures.curves(table.members, "val/acc", f"Training curves, {caption}")

# %%
figures.kept_fractions(table.members, f"Tokens kept, {caption}")

# %% [markdown]
"""
## Studies

Planned studies, and study files that a record names, with the verdict that their decision rule gives.
"""

# %%
plans = read_plans(runs)
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

The frame is an ordinary pandas frame.
"""

# %%
finished = frame[frame["status"] == "finished"]
finished.pivot_table(
    index="router.name", columns="capacity.fraction", values="test/acc", aggfunc=["mean", "std", "count"]
)

# %%
pairwise_table(table.members[:8], "test/acc", caption)
