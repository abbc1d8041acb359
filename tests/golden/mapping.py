"""From the options of a golden case, in its own words, to overrides of `routing_lab.route`.

A word that is not known is an error: a case is never run as something else than it says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tests.golden.cases import Case
from torch import Tensor

NORMALIZATIONS = ("raw", "sigmoid", "tanh", "unit_mean", "unit_max", "softmax_kept")
COMPARISONS = {">=": "ge", ">": "gt"}


def vision_overrides(case: Case) -> list[str]:
    """Overrides for the families `eq_mod_*` and `eq_amod_*`."""
    options = case.options
    routed = options["routed_layers_0based"]
    depth = case.facts["backbone"]["kwargs"]["depth"]
    return [
        *_placed(routed),
        *_router(options, case.weights, routed),
        *_source(options, routed, depth),
        *_capacity(options),
        *_scaling(options),
        f"visibility={_visibility(options)}",
        "bypass=skip",
        f"placement.sublayer={_sublayer(options)}",
    ]


def decoder_overrides(case: Case) -> list[str]:
    """Overrides for the family `eq_dtr_*`."""
    options = case.options
    routed = options["routed_layers_0based"]
    forward = options["path_forward"]
    if forward.startswith("soft mix"):
        scaling = ["scaling=soft_mix", "scaling.evaluate=soft"]
    elif forward.startswith("hard"):
        scaling = ["scaling=none"] if "NO multiplication" in forward else ["scaling=top1_probability"]
    else:
        raise AssertionError(f"{case.name}: path_forward = {forward}")
    return [
        *_placed(routed),
        *_router(options, case.weights, routed),
        *_capacity(options),
        *scaling,
        "bypass=project",
        f"visibility={_visibility(options)}",
        "placement.sublayer=attention",
    ]


def _placed(routed: Sequence[int]) -> list[str]:
    return ["placement=list", f"placement.layers={_list(routed)}"]


def _router(options: Mapping[str, Any], weights: Mapping[str, Tensor], routed: Sequence[int]) -> list[str]:
    name, first = options["router"], f"router.{routed[0]}"
    normalized = "layer norm" in options["router_input"] or "layernormed" in options["router_input"]
    if name == "attn_col":
        return ["router=amod", *_head_reduction(options)]
    if name == "attn_row" or name.startswith("cls"):
        return ["router=cls_attention", *_head_reduction(options)]
    if name == "linear":
        bias = f"{first}.bias" in weights
        return ["router=linear", f"router.bias={bias}", f"router.normalize_input={normalized}"]
    if name.startswith("mlp2"):
        hidden = weights[f"{first}.fc1.weight"].shape[0]
        return ["router=mlp", f"router.hidden={hidden}", f"router.normalize_input={normalized}"]
    raise AssertionError(f"router = {name}")


def _head_reduction(options: Mapping[str, Any]) -> list[str]:
    words = options["router_input"]
    for reduction in ("max", "median"):
        if f"{reduction} over heads" in words:
            return [f"router.head_reduction={reduction}"]
    one = re.search(r"\bhead (\d+)\b", words)
    if one:
        return ["router.head_reduction=head", f"router.head={one.group(1)}"]
    assert "mean over heads" in words, words
    return ["router.head_reduction=mean"]


def _source(options: Mapping[str, Any], routed: Sequence[int], depth: int) -> list[str]:
    """The layers whose attention is read, in the rule that gives them."""
    named = {int(layer): source for layer, source in options["source_layer_of_routed_layer"].items()}
    if all(source is None for source in named.values()):
        return []
    distances = {layer - source for layer, source in named.items()}
    dense = [layer for layer in range(depth) if layer not in routed]
    if distances == {1}:
        rule = ["placement.attention_source=previous"]
    elif len(distances) == 1:
        rule = ["placement.attention_source=lag", f"placement.lag={distances.pop()}"]
    elif len(set(named.values())) == 1:
        rule = [f"placement.attention_source={named[routed[0]]}"]
    else:
        assert all(source == max(d for d in dense if d < layer) for layer, source in named.items()), named
        rule = ["placement.attention_source=last_dense"]
    if set(named.values()) & set(routed):
        rule.append(f"placement.attention_fill={options.get('attention_fill', 'zero')}")
    return rule


def _capacity(options: Mapping[str, Any]) -> list[str]:
    words = options.get("select_in_words", options["select"])
    rule = options["select"].split(":")[0].split(" ")[0]
    if rule == "argmax":
        return ["capacity=argmax", "capacity.protect=none"]
    common = [f"capacity.protect={_protected(options)}"]
    if options.get("order") == "lowest":
        common.append("capacity.order=lowest")
    if rule == "threshold":
        return ["capacity=threshold", f"capacity.threshold={_list(options['threshold'])}", *common]
    fraction = options["capacity"]
    if isinstance(fraction, dict):
        fraction = [fraction[layer] for layer in sorted(fraction, key=int)]
    common += [f"capacity.fraction={_list(fraction)}", f"capacity.scope={_scope(options)}"]
    if rule == "topk":
        rounding = next((name for name in ("floor", "ceil", "round") if f"{name}(" in words), "floor")
        return ["capacity=topk", f"capacity.rounding={rounding}", *common]
    if rule == "percentile":
        comparison = re.search(r"comparison (>=|>)", words) or re.search(r"(>=|>) P_beta", words)
        interpolation = re.search(r"'(linear|lower|higher|midpoint|nearest)' quantile", words)
        assert comparison, words
        chosen = interpolation.group(1) if interpolation else "linear"
        compare = COMPARISONS[comparison.group(1)]
        return ["capacity=percentile", f"capacity.compare={compare}", f"capacity.interpolation={chosen}", *common]
    raise AssertionError(f"select = {options['select']}")


def _protected(options: Mapping[str, Any]) -> str:
    protect = options.get("protect_cls", False)
    if protect is False or protect is None or str(protect).startswith("no"):
        return "none"
    assert protect is True or "inside k" in protect or "counted" in protect, protect
    return "class"


def _scope(options: Mapping[str, Any]) -> str:
    words = options.get("scope", "per sample")
    assert "sample" in words or "batch" in words, words
    return "sample" if "sample" in words else "batch"


def _scaling(options: Mapping[str, Any]) -> list[str]:
    name = options["scaling"]
    target = "output" if options.get("scaling_target", "block_delta").startswith("block_output") else "update"
    if name == "none":
        return ["scaling=none", f"scaling.target={target}"]
    if name.startswith("straight_through"):
        return ["scaling=straight_through", f"scaling.target={target}"]
    assert name in NORMALIZATIONS, name
    return ["scaling=multiply", f"scaling.normalize={name}", f"scaling.target={target}"]


def _visibility(options: Mapping[str, Any]) -> str:
    words = options.get("attn_scope_key", options["attn_scope"])
    known = {"kept_only": "kept", "routed_kv": "kept", "full_kv": "all", "full": "all"}
    word = re.split(r"[^a-z_]", words)[0]
    assert word in known, words
    return known[word]


def _sublayer(options: Mapping[str, Any]) -> str:
    words = options.get("skip", "whole block")
    return next((part for part in ("attention", "mlp") if words.startswith(part)), "block")


def _list(value: Any) -> str:
    return str(value).replace(" ", "")
