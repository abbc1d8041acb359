"""Weights & Biases as a mirror of the record: one W&B run per finished cell, written from what is on disk.

The record stays the source of truth, so nothing here can make a run fail, and an interrupted run leaves no half-written
W&B run behind. Offline by default: no account, no prompt, no network. `evidence.wandb_source` reads records back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routing_lab.evidence.wandb_source import NO_API_KEY, RECORD_KEY, has_api_key
from routing_lab.runs.files import json_text
from routing_lab.runs.records import flatten

if TYPE_CHECKING:
    from routing_lab.config.training import WandbConfig


def mirror(
    wandb_config: WandbConfig,
    folder: Path,
    record: Mapping[str, Any],
    resolved: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
    group: str | None,
) -> str | None:
    """Write a record and its history to Weights & Biases; returns a warning where that did not work.

    Args:
        wandb_config: mode, project, entity and tags; `disabled` imports nothing.
        folder: the run folder; W&B's files go to `wandb/` inside it.
        record: the finished record; its metrics, cost and routing become the summary, which holds it whole as well.
        resolved: the resolved configuration.
        history: one row per epoch.
        group: name of the study or sweep.
    """
    if wandb_config.mode == "disabled":
        return None
    with _environment_restored():
        try:
            return _mirror(wandb_config, folder, record, resolved, history, group)
        except Exception as error:  # whatever a tracker may raise, the run is finished and its record is on disk
            return f"Weights & Biases: nothing was logged ({type(error).__name__}: {error})"


def summary(record: Mapping[str, Any]) -> dict[str, Any]:
    """The flat numbers of a record: metrics under their own names, cost and routing with the section in front; and the
    whole of it as JSON under `record`, so that it can be restored.
    """
    sections = {f"{name}/{key}": value for name in ("cost", "routing") for key, value in record[name].items()}
    kept = {key: value for key, value in record.items() if key not in _OF_THE_FOLDER}
    return {
        **record["metrics"],
        **flatten(sections, separator="/"),
        "status": record["status"],
        RECORD_KEY: json_text(kept),
    }


_OF_THE_FOLDER = ("folder", "heartbeat", "history")
"""What a record that was read says of where it stands and how it is written, not of the run."""


def _mirror(
    wandb_config: WandbConfig,
    folder: Path,
    record: Mapping[str, Any],
    resolved: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
    group: str | None,
) -> str | None:
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    warning = None
    mode = wandb_config.mode
    if mode == "online" and not has_api_key():
        mode = "offline"
        warning = f"wandb.mode=online: {NO_API_KEY}. The run was written offline and can be synced later"
    run = wandb.init(
        mode=mode,
        project=wandb_config.project,
        entity=wandb_config.entity,
        dir=folder,
        name=record["name"],
        group=group,
        job_type="train",
        tags=[*wandb_config.tags, *sorted({axis["name"] for axis in record["axes"].values() if "name" in axis})],
        config=dict(resolved),
        reinit="create_new",
        settings=wandb.Settings(
            silent=True, console="off", disable_git=True, save_code=False, disable_code=True, x_disable_stats=True
        ),
    )
    try:
        # The summary is the record's alone, not the last row of the history.
        run.define_metric("*", step_metric="epoch", summary="none")
        for row in history:
            run.log(dict(row))
        run.summary.update(summary(record))
    finally:
        run.finish()
    return warning


@contextmanager
def _environment_restored() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        for key in set(os.environ) - set(before):
            del os.environ[key]
        os.environ.update(before)
