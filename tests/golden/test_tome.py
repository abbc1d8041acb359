"""ToMe against its official code (`tome_*`), and against a slow reference where no case of it is at hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.golden.cases import Case, find
from tests.routing.tiny import images, vit
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn

import routing_lab

EXACT = 1e-10


def overrides(case: Case) -> list[str]:
    """What `routing_lab.route` is given for the options of a case."""
    options = case.options
    depth = case.facts["backbone"]["kwargs"]["depth"]
    merged, inflect = options["r"], 0.0
    if "inflect" in options["r_form"]:
        merged, inflect = merged
    elif isinstance(merged, list):
        merged = [*merged, *[0] * (depth - len(merged))]
    given = str(merged).replace(" ", "")
    rule = [f"bypass.merged={given}", f"bypass.inflect={inflect}", f"bypass.proportional={options['prop_attn']}"]
    return ["method=tome", *rule]


def check_tome(case: Case, dtype: torch.dtype) -> None:
    model = routing_lab.route(case.backbone(), overrides(case))
    model.load_state_dict(case.weights, strict=True)
    model.to(dtype).train(case.facts["mode"].startswith("train"))
    pictures = case.expected("input").to(dtype)
    logits, trace = model(pictures, return_trace=True)
    for found, key in ((logits, "logits"), (model.backbone(pictures), "logits_dense")):
        exact = dtype == torch.float64 and case.is_double(key)
        tolerance = EXACT if exact else case.facts["tolerance"]["logits_abs"]
        torch.testing.assert_close(found.double(), case.expected(key), rtol=0, atol=tolerance)
    assert [part.tokens for part in trace.layers] == case.options["tokens_after_each_block"]
    for layer in case.options["reduced_layers"]:
        assert trace[layer].tokens == case.expected("tokens", layer)
        assert torch.equal(trace[layer].source, case.expected("source", layer))
        assert torch.equal(trace[layer].size.double(), case.expected("size", layer))


CASES = find({"tome_*": check_tome})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize(("case", "check"), CASES, ids=[case.name for case, _ in CASES])
def test_golden(case: Case, check: Any, dtype: torch.dtype) -> None:
    check(case, dtype)


def test_there_is_a_case() -> None:
    assert CASES


# --- the slow reference: one sample, one token at a time ---


def reference(
    model: nn.Module, pictures: Tensor, schedule: list[int], proportional: bool
) -> tuple[Tensor, list[list[int]]]:
    """Logits of a timm model under ToMe, and for each sample where its first tokens went, by loops over the tokens."""
    outputs, sources = [], []
    for picture in pictures:
        x = model.norm_pre(model._pos_embed(model.patch_embed(picture.unsqueeze(0))))
        members: list[list[int]] = [[token] for token in range(x.shape[1])]
        for block, wanted in zip(model.blocks, schedule, strict=True):
            sizes = [len(member) for member in members]
            bias = torch.tensor([math.log(size) if proportional else 0.0 for size in sizes], dtype=x.dtype)
            attn, normed = block.attn, block.norm1(x)
            query, key, value = attn.qkv(normed).unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
            query, key = attn.q_norm(query), attn.k_norm(key)
            weights = torch.softmax(query @ key.transpose(-1, -2) * attn.scale + bias, dim=-1)
            x = x + block.ls1(attn.proj(attn.norm((weights @ value).transpose(1, 2).flatten(2))))
            rows, members = merged(x[0], key[0].mean(dim=0), members, wanted, model.num_prefix_tokens)
            x = torch.stack(rows).unsqueeze(0)
            x = x + block.ls2(block.mlp(block.norm2(x)))
        outputs.append(model.forward_head(model.norm(x)))
        place = {first: position for position, member in enumerate(members) for first in member}
        sources.append([place[token] for token in sorted(place)])
    return torch.cat(outputs), sources


def merged(
    x: Tensor, metric: Tensor, members: list[list[int]], wanted: int, prefix: int
) -> tuple[list[Tensor], list[list[int]]]:
    wanted = min(wanted, (len(x) - prefix) // 2)
    if wanted <= 0:
        return list(x), members
    even, odd = range(0, len(x), 2), range(1, len(x), 2)
    pairs = []
    for a in even:
        for b in odd:
            if a >= prefix and b >= prefix:
                cosine = float(metric[a] @ metric[b] / metric[a].norm() / metric[b].norm())
                pairs.append((cosine, a, b))
    best = {a: max(pair for pair in pairs if pair[1] == a) for a in even if a >= prefix}
    chosen = sorted(best.values(), reverse=True)[:wanted]
    joins: dict[int, list[int]] = {}
    for _, a, b in chosen:
        joins.setdefault(b, []).append(a)
    gone = {a for _, a, _ in chosen}
    order = [*range(prefix), *(a for a in even if a >= prefix and a not in gone), *(b for b in odd if b >= prefix)]
    rows, remaining = [], []
    for token in order:
        group = [token, *joins.get(token, [])]
        weight = [len(members[one]) for one in group]
        rows.append(sum(size * x[one] for size, one in zip(weight, group, strict=True)) / sum(weight))
        remaining.append([first for one in group for first in members[one]])
    return rows, remaining


VARIANTS: list[tuple[str, dict[str, Any], type | None]] = [
    ("class token", {}, None),
    ("no class token", {"class_token": False, "global_pool": "avg"}, None),
    ("registers", {"reg_tokens": 2}, None),
    ("four registers", {"reg_tokens": 4}, None),
    ("layer scale and qk-norm", {"init_values": 0.3, "qk_norm": True}, None),
    ("distilled", {}, VisionTransformerDistilled),
    ("average over patches", {"global_pool": "avg"}, None),
]
SCHEDULES: list[tuple[list[str], list[int]]] = [
    (["bypass.merged=2", "bypass.inflect=1.0"], [0, 1, 2, 4]),
    (["bypass.merged=2", "bypass.inflect=-1.0"], [4, 2, 1, 0]),
    (["bypass.merged=3", "bypass.inflect=0.5"], [1, 2, 3, 5]),
    (["bypass.merged=[3,0,0,2]"], [3, 0, 0, 2]),
    (["bypass.merged=100"], [100, 100, 100, 100]),
    (["bypass.merged=0.2"], [3, 3, 3, 3]),
    (["bypass.merged=3", "bypass.proportional=false"], [3, 3, 3, 3]),
]


def compare(kind: type | None, options: dict[str, Any], given: list[str], schedule: list[int]) -> None:
    model = vit(5, **options) if kind is None else vit(5, kind, **options)
    model.double()
    pictures = images(dtype=torch.float64)
    routed = routing_lab.route(model, ["method=tome", *given])
    with torch.no_grad():
        logits, trace = routed(pictures, return_trace=True)
        expected, sources = reference(model, pictures, schedule, "bypass.proportional=false" not in given)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    assert trace[3].source.tolist() == sources


@pytest.mark.parametrize(("name", "options", "kind"), VARIANTS, ids=[name for name, _, _ in VARIANTS])
def test_every_kind_of_backbone(name: str, options: dict[str, Any], kind: type | None) -> None:
    compare(kind, options, ["bypass.merged=3"], [3, 3, 3, 3])


@pytest.mark.parametrize(("given", "schedule"), SCHEDULES, ids=[" ".join(given) for given, _ in SCHEDULES])
def test_every_schedule(given: list[str], schedule: list[int]) -> None:
    compare(None, {}, given, schedule)


def test_distillation_token_comes_second_whatever_is_merged() -> None:
    compare(VisionTransformerDistilled, {}, ["bypass.merged=100"], [100] * 4)
