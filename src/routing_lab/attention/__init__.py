"""Attention that also returns statistics of its map: eager reference and chunked form."""

from routing_lab.attention.policy import policy_softmax
from routing_lab.attention.statistics import (
    AttentionStatistics,
    StatisticsRequest,
    attention_statistics,
    received_chunked,
    received_eager,
)

__all__ = [
    "AttentionStatistics",
    "StatisticsRequest",
    "attention_statistics",
    "policy_softmax",
    "received_chunked",
    "received_eager",
]
