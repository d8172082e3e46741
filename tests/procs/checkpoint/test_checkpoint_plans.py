"""A run goes on under any other plan: the same losses, moments equal bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from family_samples import EXPERT_FAMILIES, UNEVEN, family_config
from layouts import Run, batch_of, make_engine, merge, split, strictly, tiny_config
from ranks import run_ranks

from triptych.checkpoint.read import load, state
from triptych.checkpoint.write import save
from triptych.model.hf import from_config
from triptych.plan.plan import Plan, Precision
from triptych.plan.short import parse_plan
from triptych.runtime.engine import Engine

STEPS = 3
PLANS = {
    "one": {},
    "tp4": {"tp": 4},
    "pp4": {"pp": 4},
    "dp4": {"dp": 4},
    "tp2-pp2": {"tp": 2, "pp": 2},
    "tp2-sp-dp2-zero": {"tp": 2, "dp": 2, "zero": 1, "sequence_parallel": True},
    "pp3-uneven": {"pp": 3, "layers": (2, 1, 1)},
    "dp4-zero": {"dp": 4, "zero": 1},
}
EXPERT_PLANS: dict[str, dict[str, Any]] = {
    "dp2-ep2": {"dp": 2, "ep": 2},
    "dp4-ep4-zero": {"dp": 4, "ep": 4, "zero": 3},
    "tp2-dp2-ep2-zero": {"tp": 2, "dp": 2, "ep": 2, "zero": 1, "sequence_parallel": True},
}
OWN = {
    "tp2|dp2-zero3": "tp=2+1,dp=1+2,zero=3,microbatch=2",
    "dp3|tp2-sp-zero1": "tp=1+2,dp=3+1,zero=1,sp=1,layers=1+3",
}


def plan_of(name: str, precision: Precision) -> Plan:
    if name in OWN:
        return parse_plan(OWN[name], from_config(tiny_config(), "tiny")).with_(precision=precision)
    settings = (PLANS | EXPERT_PLANS)[name]
    return Plan.uniform(4, precision=precision, microbatch=3, **settings)


def pieces_of(engine: Engine) -> list[Any]:
    """This rank's boxes, as `layouts.merge` takes them."""
    return [
        (s.kind, s.name, s.shape, s.box, s.tensor.detach().float().numpy().copy())
        for s in engine.shards()
    ]


def train(engine: Engine, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        strictly(step)
        rows = batch_of(step, 12, 16, 512)
        micro = split(rows, engine.plan, engine.mesh.coordinates)
        losses.append(engine.step(micro, 1e-2).loss)
    return losses


def unbroken(name: str, precision: Precision, config: dict[str, Any], folder: Path) -> Run:
    """Trains on without a stop, and saves on the way."""
    engine = make_engine(plan_of(name, precision), config)
    train(engine, 0, STEPS)
    save(folder, STEPS, engine.shards(), {"samples": 4 * STEPS})
    run = Run()
    run.tensors["pieces", ""] = pieces_of(engine)  # type: ignore[assignment]
    run.losses.extend(train(engine, STEPS, 2 * STEPS))
    return run


def resumed(name: str, precision: Precision, config: dict[str, Any], checkpoint: Path) -> Run:
    """Another plan goes on from the checkpoint."""
    engine = make_engine(plan_of(name, precision), config)
    load(checkpoint, engine.shards())
    engine.after_load(state(checkpoint)["step"])
    run = Run()
    run.tensors["pieces", ""] = pieces_of(engine)  # type: ignore[assignment]
    run.losses.extend(train(engine, STEPS, 2 * STEPS))
    return run


def world(name: str) -> int:
    return plan_of(name, Precision()).world_size


def compare(
    old: str, others: Iterable[str], precision: Precision, config: dict[str, Any], folder: Path
) -> None:
    before = merge(run_ranks(world(old), unbroken, old, precision, config, folder))
    for new in others:
        require_same(before, new, precision, config, folder)


def require_same(
    before: Run, new: str, precision: Precision, config: dict[str, Any], folder: Path
) -> None:
    """The plan `new` goes on from the checkpoint in `folder` as the run that made it did."""
    checkpoint = folder / f"step-{STEPS:08d}"
    after = merge(run_ranks(world(new), resumed, new, precision, config, checkpoint))
    assert after.tensors.keys() == before.tensors.keys()
    for key, expected in before.tensors.items():
        assert torch.equal(after.tensors[key], expected), (new, key)
    tolerance = 1e-5 if precision.parameter == "fp32" else 2e-3
    torch.testing.assert_close(
        torch.tensor(after.losses),
        torch.tensor(before.losses),
        rtol=tolerance,
        atol=tolerance,
        msg=lambda text: f"{new}: {text}",
    )


Begun = Callable[[str], tuple[Run, Path]]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Begun:
    """The unbroken run under a plan and the folder with its checkpoint, made once for each."""

    @cache
    def run(old: str) -> tuple[Run, Path]:
        folder = tmp_path_factory.mktemp(old)
        made = run_ranks(world(old), unbroken, old, Precision(), tiny_config(), folder)
        return merge(made), folder

    return run


@pytest.mark.sweep(7)  # of 8 x 8 pairs: each plan is left and gone on with
@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), [*product(PLANS, PLANS)])
def test_losses_continue_and_moments_are_bit_equal_under_every_other_plan(
    begun: Begun, old: str, new: str
) -> None:
    """User case pub_046."""
    before, folder = begun(old)
    require_same(before, new, Precision(), tiny_config(), folder)


@pytest.mark.parametrize(("old", "new"), [("tp2-pp2", "dp4-zero"), ("dp4-zero", "pp4")])
def test_a_tied_model_in_mixed_precision_goes_on_under_another_plan(
    tmp_path: Path, old: str, new: str
) -> None:
    compare(old, [new], Precision.mixed(), tiny_config(tie_word_embeddings=True), tmp_path)


@pytest.mark.parametrize(("old", "new"), [tuple(OWN), tuple(OWN)[::-1], ("tp4", "tp2|dp2-zero3")])
def test_stages_with_their_own_degrees_load_and_are_loaded(
    tmp_path: Path, old: str, new: str
) -> None:
    compare(old, [new, "one"], Precision(), tiny_config(tie_word_embeddings=True), tmp_path)


@pytest.mark.sweep(5)
@pytest.mark.parametrize("family", [name for name in UNEVEN if name not in ("llama", "qwen3")])
def test_every_family_goes_on_under_another_plan(tmp_path: Path, family: str) -> None:
    compare("tp2-pp2", ["tp2-sp-dp2-zero"], Precision(), family_config(family), tmp_path)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_experts_go_on_in_other_groups(tmp_path: Path, family: str) -> None:
    others = {"mixtral": ["dp4-ep4-zero", "one"], "qwen3_moe": ["tp2-pp2"]}
    new = others.get(family, ["tp2-dp2-ep2-zero"])
    compare("dp2-ep2", new, Precision(), family_config(family), tmp_path)
