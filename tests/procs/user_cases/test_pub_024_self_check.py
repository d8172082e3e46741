"""User case pub_024: the check says which layouts are one process, and what differs first."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import tiny_config
from ranks import run_ranks
from tiny_runs import forget_fork_server

from triptych.cli.main import run
from triptych.runtime.comm import Communicator, Pending

PLANS = ("tp=2,sp=0", "pp=2", "cp=2", "dp=2,zero=3", "tp=2,pp=2,sp=0")


def checked(folder: Path, plan: str, *options: str, is_corrupted: bool = False) -> tuple[int, Any]:
    """Exit code and JSON of `triptych verify` over 5 steps."""
    model = folder / "config.json"
    model.write_text(json.dumps(tiny_config()))
    command = ["verify", str(model), "--plan", plan, "--steps", "5", "--json", *options]

    def body() -> int:
        if is_corrupted:
            _corrupt_an_all_reduce()
        forget_fork_server()  # of the process that forked this one
        answer = os.open(folder / "answer.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(answer, 1)  # the answer goes to the descriptor, whatever sys.stdout is
        return run(command)

    code = run_ranks(1, body)[0]
    return code, json.loads((folder / "answer.json").read_text())


def _corrupt_an_all_reduce() -> None:
    """One element of one sum over tensor ranks comes out wrong: that of layer 1's attention."""
    sound, calls = Communicator.start_all_reduce, [0]

    def corrupted(comm: Communicator, tensor: torch.Tensor, *args: Any, **more: Any) -> Pending:
        pending = sound(comm, tensor, *args, **more)
        if comm.axis == "tensor" and comm.size > 1:
            calls[0] += 1
            if calls[0] == 4:  # embedding, attention and MLP of layer 0, attention of layer 1
                pending.wait().view(-1)[0] += 0.01
        return pending

    Communicator.start_all_reduce = corrupted  # type: ignore[method-assign]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("plan", PLANS)
def test_layouts_agree_after_five_steps(tmp_path: Path, plan: str) -> None:
    code, found = checked(tmp_path, plan, "--precision", "fp32")
    assert code == 0 and found["same"] and found["first_that_differs"] is None
    assert found["relative_difference"].keys() == {"loss", "grad_norm", "gradients", "weights"}
    assert max(found["relative_difference"].values()) < 1e-5


def test_a_corrupted_sum_is_found_and_the_first_tensor_named(tmp_path: Path) -> None:
    code, found = checked(tmp_path, "tp=2,sp=0", is_corrupted=True)
    assert code == 1 and not found["same"]
    assert found["first_that_differs"] == "model.embed_tokens.weight"  # its gradient came last
    assert found["relative_difference"]["loss"] > found["tolerance"]


def test_rounding_in_bf16_is_told_from_a_fault(tmp_path: Path) -> None:
    code, found = checked(tmp_path, "tp=2,pp=2", "--precision", "bf16")
    assert code == 0 and found["tolerance"] == 0.05
    assert found["relative_difference"]["gradients"] > 1e-4  # which fp32 would call a fault
