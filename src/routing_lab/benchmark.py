"""Time a routed model beside the dense one: `python -m routing_lab.benchmark method=amod backbone=deit_small`.

Words are overrides of the training command, and besides: batch_size=32 rounds=11 train=false compile=false device=cpu
dtype=float32 threads=null out=<paths.runs>/benchmarks. With -m, values separated by commas are a sweep. Weights are
untrained, which the time of most methods does not depend on. Each result is printed and written to a file named after
the run that the same configuration trains.

Exit codes: 0 measured; 2 the words were refused and nothing was written.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from routing_lab.config import Composer, ConfigError
from routing_lab.config.compose import expand, parse_one
from routing_lab.config.identity import identity, run_folder
from routing_lab.config.load import check_overrides
from routing_lab.config.problems import Problem
from routing_lab.runs.files import write_json

if TYPE_CHECKING:
    from torch import Tensor, nn

    from routing_lab.config.load import Loaded
    from routing_lab.routing.model import RoutedModel
    from routing_lab.timing import TimedPair

OUTPUTS = 1000
"""Classes of the head that is timed: those of ImageNet."""


class Setting(BaseModel):
    """How a cell is timed: the words of the command that are not overrides of a configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch_size: int = Field(default=32, ge=1)
    rounds: int = Field(default=11, ge=2)
    train: bool = False
    compile: bool = False
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?|mps)$")
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    threads: int | None = Field(default=None, ge=1)
    out: str | None = None


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; leaves through `sys.exit`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or {"-h", "--help"} & set(words):
        print(__doc__)
        sys.exit(0 if words else 2)
    try:
        cells = [checked(cell) for cell in cells_of(words)]
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    for setting, loaded in cells:
        comparison = measure(setting, loaded)
        path = record(setting, loaded, comparison)
        print(table(run_folder(loaded.config, loaded.resolved).name, comparison))
        if comparison.warning:
            print(f"note: {comparison.warning}", file=sys.stderr)
        print(f"written: {path}\n", flush=True)
    sys.exit(0)


def compare(model: nn.Module, routed: RoutedModel, example: Tensor, **settings: Any) -> TimedPair:
    """Latency, memory and parts of a routed model beside the dense one: see `routing_lab.timing.compare`."""
    from routing_lab import timing

    return timing.compare(model, routed, example, **settings)


def cells_of(words: Sequence[str]) -> list[list[str]]:
    """The words of each cell; several values are a sweep with -m or --multirun."""
    sweep = {"-m", "--multirun"} & set(words)
    overrides = [word for word in words if word not in ("-m", "--multirun")]
    problems = [
        Problem(word, None, "an override is expected, as in batch_size=32") for word in overrides if "=" not in word
    ]
    for word in overrides:
        if "=" in word and not sweep and parse_one(word).is_sweep_override():
            key, _, value = word.partition("=")
            problems.append(Problem(key, value, f"several values need -m (one list is written [{value}])"))
    if problems:
        raise ConfigError(problems)
    return expand(overrides) if sweep else [overrides]


def checked(words: Sequence[str]) -> tuple[Setting, Loaded]:
    """How a cell is timed, and its configuration; raises ConfigError with every problem of both."""
    own = {key: value for key, _, value in (word.partition("=") for word in words) if key in Setting.model_fields}
    problems = []
    setting = Setting()
    try:
        setting = Setting(**{key: None if value == "null" else value for key, value in own.items()})
    except ValidationError as error:
        for item in error.errors():
            key = str(item["loc"][0])
            problems.append(Problem(key, own[key], item["msg"][0].lower() + item["msg"][1:]))
    try:
        loaded = check_overrides(Composer(), [word for word in words if word.partition("=")[0] not in own])
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if not loaded.config.router.traits.routes:
        problems.append(
            Problem("router", loaded.config.router.name, "routes nothing, so that there is nothing to compare")
        )
    if setting.device.startswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            problems.append(Problem("device", setting.device, "is not available on this machine"))
    if problems:
        raise ConfigError(problems)
    return setting, loaded


def measure(setting: Setting, loaded: Loaded) -> TimedPair:
    """Build the model of a cell and time it."""
    import torch

    from routing_lab.assembly import build_model

    if setting.threads is not None:
        torch.set_num_threads(setting.threads)
    routed = build_model(loaded.config, OUTPUTS).to(setting.device, getattr(torch, setting.dtype))
    example = routed.adapter.example(setting.batch_size).to(setting.device)
    if example.is_floating_point():
        example = example.to(getattr(torch, setting.dtype))
    return compare(
        routed.backbone, routed, example, rounds=setting.rounds, train=setting.train, compiled=setting.compile
    )


def record(setting: Setting, loaded: Loaded, comparison: TimedPair) -> Path:
    """Write what was measured; the name joins it to the run of the same configuration."""
    settings = setting.model_dump(exclude={"out"})
    name = run_folder(loaded.config, loaded.resolved).name
    folder = Path(setting.out or Path(loaded.config.paths.runs) / "benchmarks")
    folder.mkdir(parents=True, exist_ok=True)
    own = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:6]
    content = {
        "run": name,
        "identity": identity(loaded.resolved),
        "asked": settings,
        **comparison.as_dict(),
    }
    return write_json(folder / f"{name}-{own}.json", content)


def table(name: str, comparison: TimedPair) -> str:
    """What was measured, for a terminal."""
    dense, routed, ratio = comparison.dense, comparison.routed, comparison.ratio
    what = "training step" if comparison.setting["train"] else "forward"
    lines = [
        f"{name}: {what}, batch {comparison.setting['batch_size']}, {comparison.setting['dtype']}, "
        f"{comparison.setting['device']}, {comparison.setting['threads']} threads",
        f"  dense      {1000 * dense.median:10.2f} ms  (spread {100 * dense.spread:.0f} %)",
        f"  routed     {1000 * routed.median:10.2f} ms  (spread {100 * routed.spread:.0f} %)",
        f"  examples/s {comparison.examples_per_second:10.1f}",
        f"  time       {ratio.median:10.3f} of dense  (spread {100 * ratio.spread:.0f} %)",
        f"  MACs       {comparison.mac_ratio:10.3f} of dense",
        f"  speed-up   {comparison.speedup:10.3f}",
        f"  efficiency {comparison.efficiency:10.3f}",
    ]
    if comparison.peak_memory is not None:
        held = {key: value / 2**20 for key, value in comparison.peak_memory.items()}
        lines.append(f"  memory     {held['routed']:10.1f} MiB at most, dense {held['dense']:.1f}")
    if comparison.parts is not None:
        total = sum(comparison.parts.values())
        lines.append(f"  parts of one forward, {1000 * total:.2f} ms while watched:")
        lines += [
            f"    {part:<15}{1000 * seconds:10.2f} ms {100 * seconds / total:6.1f} %"
            for part, seconds in comparison.parts.items()
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
