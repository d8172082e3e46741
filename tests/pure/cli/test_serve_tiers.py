"""Latency classes of a command line."""

from __future__ import annotations

import math

import pytest

from triptych.cli.serve_tiers import policy_of
from triptych.errors import InputError
from triptych.serve.core.request import LatencyClass

DEFAULT = LatencyClass(ttft_s=0.5)


def test_tiers_are_classes_beside_the_default_one() -> None:
    policy = policy_of(DEFAULT, ["flex=60,inf,2", "quick=0.1", "steady=1,0.05"], True)
    assert policy.refuses_late and policy.classes == (
        DEFAULT,
        LatencyClass(name="flex", ttft_s=60, tpot_s=math.inf, priority=2),
        LatencyClass(name="quick", ttft_s=0.1),
        LatencyClass(name="steady", ttft_s=1, tpot_s=0.05),
    )


def test_all_wrong_tiers_are_named_at_once() -> None:
    wrong = ["flex", "a=-1", "=1", "b=inf", "c=1,0", "d=1,1,-1", "e=1,1,1,1", "f=1,1,x", "g=nan"]
    with pytest.raises(InputError) as found:
        policy_of(DEFAULT, [*wrong, "default=1", "ok=1", "ok=2"], False)
    text = str(found.value)
    assert all(f"--tier {one}" in text for one in wrong)
    assert "default, ok twice" in text and "--tier flex=60,inf,1" in text
