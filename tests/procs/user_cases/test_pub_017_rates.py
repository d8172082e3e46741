"""User case PUB-017: the learning rate is a function of the step, whatever the layout."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from tiny_runs import metrics
from verbs import Ranks, job

WARM_UP, STEPS, PEAK, LEAST = 5, 40, 2e-3, 1e-5
SETTINGS = (
    f"train.steps={STEPS}",
    f"optimizer.warmup_steps={WARM_UP}",
    f"optimizer.learning_rate={PEAK}",
    f"optimizer.min_learning_rate={LEAST}",
    "checkpoint.every=20",
    "train.global_batch=4",
)


def closed_form(step: int) -> float:
    if step <= WARM_UP:
        return PEAK * step / WARM_UP
    done = (step - WARM_UP) / (STEPS - WARM_UP)
    return LEAST + (PEAK - LEAST) * (1 + math.cos(math.pi * done)) / 2


def rates(job_path: Path) -> dict[int, float]:
    return {line["step"]: line["learning_rate"] for line in metrics(job_path) if "loss" in line}


@pytest.fixture(scope="module")
def whole(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The rates of one process."""
    path = job(tmp_path_factory.mktemp("whole"), num_hidden_layers=2)
    ranks.done("train", path, "--plan", "dp=1", "--set", *SETTINGS)
    return rates(path)


def test_pub_017_the_rate_is_the_closed_form_of_the_step(whole: dict[int, float]) -> None:
    assert list(whole) == list(range(1, STEPS + 1))
    assert all(rate == pytest.approx(closed_form(step), rel=1e-12) for step, rate in whole.items())


@pytest.mark.parametrize("plan", ["dp=2", "dp=4", "tp=2,pp=2"])
def test_pub_017_the_rate_is_the_same_in_every_layout_and_after_resuming_in_another(
    ranks: Ranks, tmp_path: Path, whole: dict[int, float], plan: str
) -> None:
    path = job(tmp_path, num_hidden_layers=2)
    ranks.done("train", path, "--plan", plan, "--set", *SETTINGS)
    assert rates(path) == whole
    if plan == "tp=2,pp=2":
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{STEPS:08d}")
        ended = ranks.done("train", path, "--plan", "dp=2", "--set", *SETTINGS)
        assert "after step 20" in ended.err
        assert rates(path) == whole
