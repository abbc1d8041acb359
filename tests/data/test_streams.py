"""Named seed streams: fixed values, no collisions, seed 0 is a seed."""

from __future__ import annotations

import itertools

import pytest

from routing_lab.streams import STREAMS, stream_seed


def test_values_are_fixed_for_ever() -> None:
    assert stream_seed(0, "data", 3) == 7744771279370058725
    assert stream_seed(1, "initialisation") == 3077599583518601137


def test_every_seed_stream_and_index_has_its_own_value() -> None:
    keys = list(itertools.product(range(3), STREAMS, [(), (0,), (1,), (0, 1), (1, 0), (11,), (1, 1)]))
    values = {stream_seed(seed, stream, *indices) for seed, stream, indices in keys}
    assert len(values) == len(keys)
    assert all(0 <= value < 2**63 for value in values)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="seed=-1"):
        stream_seed(-1, "data")
    with pytest.raises(ValueError, match="expected one of initialisation, data"):
        stream_seed(0, "weather")  # type: ignore[arg-type]
