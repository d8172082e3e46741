"""Rank tests: makes `ranks.py` and `layouts.py` importable."""

import sys
from collections.abc import Iterator
from functools import _lru_cache_wrapper
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module", autouse=True)
def forgetful(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a module has cached goes with it: a small process forks fast."""
    yield
    for value in vars(request.module).values():
        if isinstance(value, _lru_cache_wrapper):
            value.cache_clear()
