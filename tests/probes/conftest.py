"""Tests in a browser are collected where a Chromium is installed."""

from __future__ import annotations

from tests.evidence.browser import chromium

collect_ignore = [] if chromium() else ["test_browser.py"]
