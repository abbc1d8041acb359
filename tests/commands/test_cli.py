"""The console script's dispatch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

import routing_lab
from routing_lab.cli import COMMANDS, main


def leave(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return int(left.value.code or 0)


def test_usage_names_every_command(capsys: Any) -> None:
    assert leave() == leave("--help") == leave("-h") == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


def test_every_command_has_a_main() -> None:
    assert all(callable(import_module(f"routing_lab.{name}").main) for name in COMMANDS)


def test_version(capsys: Any) -> None:
    assert leave("--version") == 0
    assert capsys.readouterr().out == f"routing_lab {routing_lab.__version__}\n"


def test_an_unknown_command_is_refused(capsys: Any) -> None:
    assert leave("trian") == 2
    assert "trian: no such command" in capsys.readouterr().err


def test_arguments_are_handed_on(train: Any, trained: list, capfd: Any) -> None:
    assert leave("train", "seed=5") == 0
    assert [call["seed"] for call in trained] == [5]
