"""A trained routed model as one file that runs without this package: ONNX, or an exported program of torch.

The batch is open. What was written is loaded again and must agree with the model, on a batch of another size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from routing_lab.routing.model import RoutedModel

SUFFIXES = (".onnx", ".pt2")
TOLERANCE = 1e-4
"""Largest difference from the model, relative to its largest output."""


class _Outputs(nn.Module):
    """The model as the function of its inputs alone that it is when served."""

    def __init__(self, model: RoutedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        output = self.model(inputs)
        return getattr(output, "logits", output)


def export(model: RoutedModel, path: str | Path) -> float:
    """Write a model in evaluation mode; the largest difference between what was written and the model.

    Args:
        path: ends in .onnx (needs onnx and onnxscript, and onnxruntime to be checked) or .pt2.

    Raises:
        ValueError: another ending, a model that cannot be exported, with the reason, or a file that does not agree with
            the model; nothing is left then.
    """
    target = Path(path)
    if target.suffix not in SUFFIXES:
        raise ValueError(f"{target}: expected a name that ends in {' or '.join(SUFFIXES)}")
    served = _Outputs(model).eval()
    inputs = model.adapter.example(2)
    with torch.no_grad():
        program = _program(served, inputs)
        partial = target.with_name(f".{target.stem}.partial{target.suffix}")
        partial.parent.mkdir(parents=True, exist_ok=True)
        try:
            other = model.adapter.example(3)
            if target.suffix == ".onnx":
                _write_onnx(program, partial)
                found = _run_onnx(partial, other)
            else:
                torch.export.save(program, partial)
                found = torch.export.load(partial).module()(other)
            expected = served(other)
            difference = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12))
            if not difference <= TOLERANCE:
                raise ValueError(
                    f"{target}: what was written differs from the model by {difference:.2g} of its largest output; "
                    "tokens whose scores tie may be chosen differently"
                )
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    return difference


def _program(served: nn.Module, inputs: Tensor) -> Any:
    batch = torch.export.Dim("batch", min=1)
    try:
        return torch.export.export(served, (inputs,), dynamic_shapes={"inputs": {0: batch}})
    except Exception as error:
        # torch raises its own, internal exceptions; all of them name the operation in their first line.
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            "the model cannot be exported: Python must not ask for the value of a tensor, such as how many tokens a "
            f"layer keeps, nor for the batch; torch says: {reason}"
        ) from error


def _write_onnx(program: Any, path: Path) -> None:
    try:
        from onnxscript import opset18
    except ImportError as error:
        raise ValueError(f"{path.suffix} needs pip install 'routing_lab[export]': {error}") from error

    def stable_sort(x: Any, stable: bool = True, dim: int = -1, descending: bool = False) -> Any:
        """TopK of everything, which is stable by definition: of equal values the lower index comes first."""
        axis = dim % len(x.shape)
        number = opset18.Shape(x, start=axis, end=axis + 1)
        return opset18.TopK(x, number, axis=axis, largest=int(descending), sorted=1)

    table: dict[Any, Any] = {torch.ops.aten.sort.stable: stable_sort}
    try:
        written = torch.onnx.export(program, dynamo=True, verbose=False, custom_translation_table=table)
    except torch.onnx.errors.OnnxExporterError as error:
        reason = [line for line in str(error).splitlines() if "DispatchError" in line or "Failure message" in line]
        raise ValueError(
            f"ONNX lacks an operation of this model: {' '.join(reason) or type(error).__name__}"
        ) from error
    assert written is not None
    written.save(path)


def _run_onnx(path: Path, inputs: Tensor) -> Tensor:
    try:
        import onnxruntime
    except ImportError as error:
        raise ValueError(f"checking {path.suffix} needs pip install 'routing_lab[export]': {error}") from error
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return torch.from_numpy(session.run(None, {name: inputs.numpy()})[0])
