"""User cases through the product's own verbs: makes the helpers importable, one fork server."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
sys.path[:0] = [
    str(HERE),
    str(TESTS / "procs" / "train"),
    str(TESTS / "procs" / "serve"),
    str(TESTS / "pure" / "train"),
]

from verbs import Ranks, rank_log  # noqa: E402


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Verbs run in this process; their ranks are forked from one server and write to one file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("OMP_NUM_THREADS", "1")
        with rank_log(tmp_path_factory.mktemp("ranks") / "log") as found:
            yield found
