"""What a routed model costs in time beside the dense one, measured so that a busy machine does not decide.

Dense and routed rounds alternate inside one process and every round gives a ratio of its own: what slows the machine
down slows both. The spread of the ratios says whether their median is to be trusted. On one thread of a CPU the clock
is the processor's time of this process, which does not run while others have the processor.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from routing_lab.attention import core
from routing_lab.cost.macs import ModelShape, dense_macs, routed_macs
from routing_lab.cost.measure import WorkMeter, decoder_shape, vision_shape
from routing_lab.routing.model import RoutedModel

CATEGORIES = ("qkv", "attention", "mlp", "gather_scatter", "statistics", "router", "rest")
"""Parts of a routed forward; `qkv` are the projections of attention, its output's among them."""

TRUSTED = 0.1
"""Largest spread of the ratios, interquartile range over median, of which no warning is given."""

_ATTENTION = ("scaled_dot_product_attention", "baddbmm", "softmax")
_MOVES = ("index_select", "index_copy", "gather", "scatter", "scatter_add", "scatter_reduce")
_CHOICES = ("topk", "sort", "argsort", "kthvalue", "multinomial")
_ACTIVATIONS = ("gelu", "silu", "relu")
_PRODUCTS = ("bmm", "matmul", "__matmul__")


@dataclass(frozen=True)
class Timing:
    """Seconds of a forward or step: median, and interquartile range over median."""

    median: float
    spread: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Timing:
        """Of at least two measurements."""
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(middle, (high - low) / middle)


@dataclass(frozen=True)
class TimedPair:
    """A routed model beside the dense one.

    Args:
        dense, routed: seconds.
        ratio: routed over dense, of the rounds.
        mac_ratio: multiply-accumulates of the routed forward over those of the dense one.
        examples_per_second: of the routed model.
        peak_memory: bytes allocated at most beyond what was there before, `dense` and `routed`; None where the device
            does not tell.
        parts: seconds of one routed forward by category, in a run that is watched operation by operation; None under
            compilation, where operations are no longer apart.
        setting: batch, rounds, train, compile, dtype, device, threads, load of the machine before, versions.
    """

    dense: Timing
    routed: Timing
    ratio: Timing
    mac_ratio: float
    examples_per_second: float
    peak_memory: Mapping[str, int] | None
    parts: Mapping[str, float] | None
    setting: Mapping[str, Any] = field(default_factory=dict)

    @property
    def speedup(self) -> float:
        """Dense over routed time."""
        return 1 / self.ratio.median

    @property
    def efficiency(self) -> float:
        """Ratio of multiply-accumulates over ratio of times: 1 where time fell as much as they did."""
        return self.mac_ratio / self.ratio.median

    @property
    def warning(self) -> str | None:
        """Why the figures are not to be trusted; None: they are."""
        if self.ratio.spread <= TRUSTED:
            return None
        return (
            f"the ratios of the rounds spread by {100 * self.ratio.spread:.0f} % (interquartile range over median; at "
            f"most {100 * TRUSTED:.0f} % is trusted): other work shares this machine; repeat with more rounds"
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for a record."""
        return {
            **asdict(self),
            "speedup": self.speedup,
            "efficiency": self.efficiency,
            "warning": self.warning,
        }


def compare(
    model: nn.Module,
    routed: RoutedModel,
    example: Tensor,
    *,
    rounds: int = 11,
    train: bool = False,
    compiled: bool = False,
) -> TimedPair:
    """Latency, memory and parts of `routed` beside `model`, on `example`, on the device where they are.

    Args:
        model: the dense model; may share its parameters with the routed one.
        routed: the same backbone, routed.
        example: a batch of inputs.
        rounds: each runs both once, after one that is not counted.
        train: a step, forward and backward, instead of a forward in evaluation.
        compiled: both under `torch.compile`.

    Raises:
        ValueError: fewer than two rounds.
    """
    if rounds < 2:
        raise ValueError(f"rounds = {rounds}: at least 2 are needed for a spread")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    clock = _clock(example.device)
    modes = (model.training, routed.training)
    run = {"dense": _runner(model, example, train, compiled), "routed": _runner(routed, example, train, compiled)}
    try:
        for function in run.values():
            function()
        seconds: dict[str, list[float]] = {name: [] for name in run}
        for number in range(rounds):
            # Whoever comes first in a round finds the caches of the other: they take turns.
            for name in list(run)[:: 1 if number % 2 else -1]:
                seconds[name].append(_seconds(run[name], example.device, clock))
        memory = _peak_memory(run, example.device)
        routed.eval()
        mac_ratio = _mac_ratio(routed, example)
        parts = None if compiled else forward_parts(routed, example)
    finally:
        model.train(modes[0])
        routed.train(modes[1])
    timing = {name: Timing.of(values) for name, values in seconds.items()}
    return TimedPair(
        timing["dense"],
        timing["routed"],
        Timing.of([one / other for one, other in zip(seconds["routed"], seconds["dense"], strict=True)]),
        mac_ratio,
        example.shape[0] / timing["routed"].median,
        memory,
        parts,
        {
            "batch_size": example.shape[0],
            "rounds": rounds,
            "train": train,
            "compile": compiled,
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(example.device) if example.is_cuda else example.device.type,
            "threads": torch.get_num_threads(),
            "clock": clock.__name__,
            "load": load,
            "cpus": os.cpu_count(),
            "torch": torch.__version__,
        },
    )


@torch.no_grad()
def forward_parts(routed: RoutedModel, example: Tensor) -> dict[str, float]:
    """Seconds of one routed forward by category; they sum to the time of the forward that was watched."""
    routed(example)
    clock = _clock(example.device)
    watch = _Watch(_weights(routed), example.device, clock)
    start = clock()
    with watch, _statistics_of(watch):
        routed(example)
    _wait(example.device)
    total = clock() - start
    parts = {name: watch.seconds[name] for name in CATEGORIES}
    parts["rest"] += total - sum(parts.values())
    return parts


class _Watch(TorchFunctionMode):
    """Times every torch function, under the category that function and weight say.

    Args:
        weights: category of the parameter with this id.
        device: is waited for around every function.
        clock: seconds.
    """

    def __init__(self, weights: Mapping[int, str], device: torch.device, clock: Callable[[], float]) -> None:
        super().__init__()
        self.seconds: dict[str, float] = defaultdict(float)
        self.inside: str | None = None
        self._weights = weights
        self._device = device
        self._clock = clock

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _wait(self._device)
        start = self._clock()
        found = func(*args, **(kwargs or {}))
        _wait(self._device)
        self.seconds[self.inside or self._category(func, args)] += self._clock() - start
        return found

    def _category(self, func: Any, args: Any) -> str:
        name = getattr(func, "__name__", "")
        weight = next((self._weights[id(arg)] for arg in args if id(arg) in self._weights), None)
        if weight is not None:
            return weight
        if name in _PRODUCTS:
            # One row times a map is a sum of its columns.
            return "statistics" if args[0].dim() > 2 and args[0].shape[-2] == 1 else "attention"
        for category, names in (
            ("attention", _ATTENTION),
            ("gather_scatter", _MOVES),
            ("router", _CHOICES),
            ("mlp", _ACTIVATIONS),
        ):
            if name in names:
                return category
        return "rest"


def _weights(routed: RoutedModel) -> dict[int, str]:
    """The category of every matrix that a block or a router multiplies by, by the module that holds it."""
    found = {id(parameter): "router" for parameter in routed.layers.parameters()}
    for name, module in routed.backbone.named_modules():
        where = name.split(".")
        kind = "mlp" if "mlp" in where else "qkv" if {"attn", "self_attn"} & set(where) else None
        if kind is not None and isinstance(module, nn.Linear):
            found |= {id(parameter): kind for parameter in module.parameters()}
    return found


@contextmanager
def _statistics_of(watch: _Watch) -> Iterator[None]:
    """Everything in a pass of its own over a map belongs to the statistics."""
    names = vars(core)
    original = names["attention_statistics"]

    def watched(*args: Any, **options: Any) -> Any:
        watch.inside = "statistics"
        try:
            return original(*args, **options)
        finally:
            watch.inside = None

    names["attention_statistics"] = watched
    try:
        yield
    finally:
        names["attention_statistics"] = original


def _runner(model: nn.Module, example: Tensor, train: bool, compiled: bool) -> Callable[[], object]:
    call = torch.compile(model, dynamic=False) if compiled else model

    def forward() -> object:
        model.eval()
        with torch.no_grad():
            return call(example)

    def step() -> object:
        model.train()
        model.zero_grad(set_to_none=True)
        output = call(example)
        return getattr(output, "logits", output).float().square().mean().backward()

    return step if train else forward


def _clock(device: torch.device) -> Callable[[], float]:
    return time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def _seconds(function: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    _wait(device)
    start = clock()
    function()
    _wait(device)
    return clock() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_memory(run: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, int] | None:
    if device.type == "cuda":
        found = {}
        for name, function in run.items():
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            function()
            found[name] = torch.cuda.max_memory_allocated(device) - before
        return found
    if device.type == "cpu":
        return {name: _peak_on_cpu(function) for name, function in run.items()}
    return None


def _peak_on_cpu(function: Callable[[], object]) -> int:
    """The highest sum of what torch allocated and has not freed, from the profiler's record of both."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


@torch.no_grad()
def _mac_ratio(routed: RoutedModel, example: Tensor) -> float:
    shape = model_shape(routed, example)
    meter = WorkMeter(shape.depth)
    meter.add(routed(example, return_trace=True)[1])
    routers = 0.0
    for layer in routed.routed_layers:
        router: nn.Module = routed.layers[str(layer)].router  # type: ignore[assignment]
        routers += meter.router()[layer] * sum(weight.numel() for weight in router.parameters() if weight.ndim == 2)
    return (routed_macs(shape, meter.mean()).total + routers) / dense_macs(shape).total


def model_shape(routed: RoutedModel, example: Tensor) -> ModelShape:
    """What the cost model needs of a routed model that is given `example`."""
    if routed.adapter.causal:
        return decoder_shape(routed.backbone.config, example.shape[1])
    return vision_shape(routed.backbone)
