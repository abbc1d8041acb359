"""A head in closed form for a backbone that is not trained: ridge regression on its features."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.linear_model import RidgeClassifierCV
from torch import Tensor, nn

STRENGTHS = tuple(np.logspace(-3, 4, 15).tolist())
"""Ridge penalties, of which leave-one-out over the training split chooses."""


def solve_head(model: Any, data: Any, batch_size: int) -> dict[str, Any]:
    """Set the weights of the backbone's linear head by ridge regression of the classes (-1 or 1) on what enters it.

    Features are those of the training split without augmentation, of the model as it is routed; the penalty is the one
    with the least leave-one-out error. Nothing else of the model changes.

    Args:
        model: the routed model, left in the mode it came in.
        data: its data, with `split`, `examples` and `num_classes`.
        batch_size: images in one forward.

    Returns what a record keeps: `penalty` and `examples`.

    Raises:
        ValueError: a backbone whose output does not come from one linear module, or a training split of one class.
    """
    head = _head(model.backbone)
    features, targets = _features(model, head, data, batch_size)
    classes = np.unique(targets)
    if len(classes) < 2:
        raise ValueError("init.readout=true: the training split has a single class")
    solved = RidgeClassifierCV(alphas=STRENGTHS).fit(features, targets)
    weight, bias = np.atleast_2d(solved.coef_), np.atleast_1d(solved.intercept_)
    if len(classes) == 2:  # one column tells the second class from the first
        weight, bias = np.concatenate([-weight, weight]), np.concatenate([-bias, bias])
    with torch.no_grad():
        head.weight.zero_()
        head.bias.fill_(float(bias.min()) - 1.0)  # a class without training images is never the answer
        head.weight[classes] = torch.as_tensor(weight, dtype=head.weight.dtype, device=head.weight.device)
        head.bias[classes] = torch.as_tensor(bias, dtype=head.bias.dtype, device=head.bias.device)
    return {"penalty": float(solved.alpha_), "examples": len(targets)}


def _head(backbone: Any) -> nn.Linear:
    find = getattr(backbone, "get_classifier", None)
    head = find() if callable(find) else None
    if not isinstance(head, nn.Linear) or head.bias is None:
        raise ValueError(
            f"init.readout=true: the output of {type(backbone).__name__} does not come from one linear head with a bias"
        )
    return head


def _features(model: Any, head: nn.Linear, data: Any, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    seen: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].double().cpu()))
    device, was_training, targets = head.weight.device, model.training, []
    model.eval()
    try:
        with torch.no_grad():
            for chosen in data.split["train"].split(batch_size):
                images, labels, index = data.examples(chosen)
                model(images.to(device), sample_ids=index.to(device))
                targets.append(labels)
    finally:
        handle.remove()
        model.train(was_training)
    return torch.cat(seen).numpy(), torch.cat(targets).numpy()
