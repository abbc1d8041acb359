"""What every test gets: no network, and a process left as it was found."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.update(
    {
        "MPLBACKEND": "Agg",
        # Workers of the suite share the processors out; more threads than processors only wait for each other.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "HF_HUB_OFFLINE": "1",
        "WANDB_SILENT": "true",
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
    }
)
for _key in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_RUN_ID"):
    os.environ.pop(_key, None)


@pytest.fixture(autouse=True)
def _restore_process() -> Iterator[None]:
    """Put back the environment, the signal handlers, Hydra's global state and the open W&B run after every test."""
    environment = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    if "wandb" in sys.modules:
        wandb = sys.modules["wandb"]
        if getattr(wandb, "run", None) is not None:
            wandb.finish()
    if "hydra.core.global_hydra" in sys.modules:
        sys.modules["hydra.core.global_hydra"].GlobalHydra.instance().clear()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for key in set(os.environ) - set(environment):
        # pytest owns this one and removes it itself
        if key != "PYTEST_CURRENT_TEST":
            del os.environ[key]
    os.environ.update({key: value for key, value in environment.items() if key != "PYTEST_CURRENT_TEST"})


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections leave neither this machine nor the test: anything but a local address is an error."""
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a test tried to reach the network: {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_only)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """One thread: tiny tensors are not worth more, and results do not depend on the machine."""
    torch = sys.modules.get("torch")  # tests that need none do not load it
    if torch is None:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
