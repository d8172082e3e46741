"""GPUs of a machine dealt to the groups of a server."""

from __future__ import annotations

import pytest

from triptych.errors import InputError
from triptych.serve.http.gpus import Gpus


def test_groups_share_no_gpu_while_there_are_enough() -> None:
    gpus = Gpus(["a", "b", "c", "d"])
    first, second = gpus.take(2), gpus.take(2)
    assert first == ("a", "b") and second == ("c", "d")
    gpus.give_back(second)
    assert gpus.take(1) == ("c",)
    assert gpus.take(2) == ("d", "a"), "one more: beside the fewest others"


def test_without_gpus_nothing_is_dealt_and_nothing_required() -> None:
    none = Gpus()
    none.require(8)
    assert none.take(2) == ()


def test_more_ranks_than_gpus_are_refused_with_what_works() -> None:
    gpus = Gpus(["a", "b"])
    gpus.require(2)
    with pytest.raises(InputError, match=r"(?s)groups of 3 ranks.*2 are visible.*CUDA_VISIBLE"):
        gpus.require(3)
