"""Attention that also returns statistics of its map, in one pass, by the back end that suits the device."""

from routing_lab.attention.core import (
    Kernel,
    attention,
    attention_map,
    attention_with_statistics,
    in_one_pass,
    map_statistics,
)
from routing_lab.attention.maps import AttentionMap
from routing_lab.attention.policy import policy_softmax
from routing_lab.attention.registry import BACKENDS, backend, choose
from routing_lab.attention.statistics import AttentionStatistics, MapRows, StatisticsRequest, attention_statistics

__all__ = [
    "BACKENDS",
    "AttentionMap",
    "AttentionStatistics",
    "Kernel",
    "MapRows",
    "StatisticsRequest",
    "attention",
    "attention_map",
    "attention_statistics",
    "attention_with_statistics",
    "backend",
    "choose",
    "in_one_pass",
    "map_statistics",
    "policy_softmax",
]
