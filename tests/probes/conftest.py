"""One thread: tiny tensors are not worth more. Tests in a browser are collected where a Chromium is installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.evidence.browser import chromium

collect_ignore = [] if chromium() else ["test_browser.py"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
