"""Experts that files hold together: every element of a stored tensor is in one logical tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from triptych.plan.fused import Fused

EXPERTS, HIDDEN, WIDTH = 3, 5, 4
STORED = {
    "m.layers.0.mlp.experts.gate_up_proj": (EXPERTS, HIDDEN, 2 * WIDTH),
    "m.layers.0.mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * WIDTH),
    "m.layers.0.mlp.experts.down_proj": (EXPERTS, WIDTH, HIDDEN),
    "m.layers.0.mlp.experts.down_proj_bias": (EXPERTS, HIDDEN),
}


class _Stored:
    """A numpy array with the one method of a tensor that a place uses."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __getitem__(self, at: object) -> _Stored:
        return _Stored(self.array[at])

    def movedim(self, source: int, target: int) -> Any:
        return np.moveaxis(self.array, source, target)


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("name", STORED)
def test_members_cover_a_stored_tensor_once(name: str, in_turn: bool) -> None:
    shape, fused = STORED[name], Fused(in_turn)
    stored = _Stored(np.arange(np.prod(shape)).reshape(shape))
    members = list(fused.members(name, shape))
    parts = [member.place.of(stored, member.shape) for member in members]
    assert [part.shape for part in parts] == [member.shape for member in members]
    assert sorted(np.concatenate([part.ravel() for part in parts])) == [*range(np.prod(shape))]
    assert {fused.stored_name(member.name) for member in members} == {name}
    assert fused.stored_shape(name, members[0].shape, len(members)) == shape


@pytest.mark.parametrize(("in_turn", "gate"), [(True, [0, 2, 4, 6]), (False, [0, 1, 2, 3])])
def test_a_gate_has_its_columns(in_turn: bool, gate: list[int]) -> None:
    name = "m.layers.0.mlp.experts.gate_up_proj"
    stored = _Stored(np.arange(EXPERTS * HIDDEN * 8).reshape(STORED[name]))
    member = next(m for m in Fused(in_turn).members(name, STORED[name]) if "2.gate" in m.name)
    assert member.name == "m.layers.0.mlp.experts.2.gate_proj.weight"
    expected = stored.array[2][:, gate].T
    assert np.array_equal(member.place.of(stored, member.shape), expected)
    part = stored[member.place.slices([slice(1, 3), slice(0, 2)])]
    assert np.array_equal(member.place.logical(part), expected[1:3, :2])


def test_other_tensors_are_stored_by_themselves() -> None:
    fused = Fused(in_turn=True)
    for name in ("m.layers.0.mlp.router.weight", "m.layers.0.mlp.down_proj.weight"):
        assert fused.stored_name(name) is None
        assert list(fused.members(name, (4, 4))) == []
