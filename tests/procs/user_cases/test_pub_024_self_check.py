"""User case pub_024: the check says which layouts are one process, and what differs first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import tiny_config
from verbs import Ranks

from triptych.cli.main import run
from triptych.runtime.comm import Communicator, Pending

PLANS = ("tp=2,sp=0", "pp=2", "cp=2", "dp=2,zero=3", "tp=2,pp=2,sp=0")


Checked = Callable[..., tuple[int, Any]]


@pytest.fixture
def checked(ranks: Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Checked:
    """Exit code and JSON of `triptych verify` over 5 steps under a plan."""
    model = tmp_path / "config.json"
    model.write_text(json.dumps(tiny_config()))

    def run_verify(plan: str, *options: str) -> tuple[int, Any]:
        capfd.readouterr()
        code = run(["verify", str(model), "--plan", plan, "--steps", "5", "--json", *options])
        return code, json.loads(capfd.readouterr().out)

    return run_verify


def corrupt_an_all_reduce(patch: pytest.MonkeyPatch) -> None:
    """One element of one sum over tensor ranks comes out wrong: that of layer 1's attention."""
    sound, calls = Communicator.start_all_reduce, [0]

    def corrupted(comm: Communicator, tensor: torch.Tensor, *args: Any, **more: Any) -> Pending:
        pending = sound(comm, tensor, *args, **more)
        if comm.axis == "tensor" and comm.size > 1:
            calls[0] += 1
            if calls[0] == 4:  # embedding, attention and MLP of layer 0, attention of layer 1
                pending.wait().view(-1)[0] += 0.01
        return pending

    patch.setattr(Communicator, "start_all_reduce", corrupted)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("plan", PLANS)
def test_layouts_agree_after_five_steps(checked: Checked, plan: str) -> None:
    code, found = checked(plan, "--precision", "fp32")
    assert code == 0 and found["same"] and found["first_that_differs"] is None
    assert found["relative_difference"].keys() == {"loss", "grad_norm", "gradients", "weights"}
    assert max(found["relative_difference"].values()) < 1e-5


def test_a_corrupted_sum_is_found_and_the_first_tensor_named(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    corrupt_an_all_reduce(monkeypatch)
    code, found = checked("tp=2,sp=0")
    assert code == 1 and not found["same"]
    assert found["first_that_differs"] == "model.embed_tokens.weight"  # its gradient came last
    assert found["relative_difference"]["loss"] > found["tolerance"]


def test_rounding_in_bf16_is_told_from_a_fault(checked: Checked) -> None:
    code, found = checked("tp=2,pp=2", "--precision", "bf16")
    assert code == 0 and found["tolerance"] == 0.05
    assert found["relative_difference"]["gradients"] > 1e-4  # which fp32 would call a fault
