"""Attention that also returns statistics of its map: eager reference and chunked form."""

from routing_lab.attention.core import Kernel, attention, attention_with_statistics, map_statistics
from routing_lab.attention.policy import policy_softmax
from routing_lab.attention.statistics import (
    AttentionStatistics,
    MapRows,
    StatisticsRequest,
    attention_statistics,
    received_chunked,
    received_eager,
)

__all__ = [
    "AttentionStatistics",
    "Kernel",
    "MapRows",
    "StatisticsRequest",
    "attention",
    "attention_statistics",
    "attention_with_statistics",
    "map_statistics",
    "policy_softmax",
    "received_chunked",
    "received_eager",
]
