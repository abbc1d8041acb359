"""Measurements on a trained model."""

from __future__ import annotations

from routing_lab.probes.agreement import MaskAgreement
from routing_lab.probes.heads import HeadCorruption
from routing_lab.probes.importance import Importance
from routing_lab.probes.leave_one_out import leave_one_out
from routing_lab.probes.runner import measure
from routing_lab.probes.selection import CapacitySweep, SelectionBehaviour
from routing_lab.probes.structure import AttentionStructure

__all__ = [
    "AttentionStructure",
    "CapacitySweep",
    "HeadCorruption",
    "Importance",
    "MaskAgreement",
    "SelectionBehaviour",
    "leave_one_out",
    "measure",
]
