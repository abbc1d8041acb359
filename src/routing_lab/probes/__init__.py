"""Measurements on a trained model."""

from __future__ import annotations

from routing_lab.probes.leave_one_out import leave_one_out

__all__ = ["leave_one_out"]
