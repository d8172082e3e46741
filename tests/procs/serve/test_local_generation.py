"""Generation with ranks that are started for it: the text of one process, and no rank left over."""

from __future__ import annotations

import multiprocessing
import select
from pathlib import Path

import pytest
from serve_samples import PROMPTS, config_of, save_model

from triptych.errors import PlanError, RunError
from triptych.plan.plan import Plan
from triptych.serve.engine import executor
from triptych.serve.engine.engine import Engine
from triptych.serve.engine.offline import Wanted, generate
from triptych.serve.engine.settings import EngineSettings
from triptych.serve.engine.values import Ask


@pytest.mark.parametrize("is_fresh", [False, True])
def test_two_local_ranks_give_the_text_of_one_process(tmp_path: Path, is_fresh: bool) -> None:
    """Forked from a server, or from this process."""
    save_model(tmp_path, config_of())
    pieces: list[str] = []
    found = generate(
        tmp_path,
        PROMPTS[:1],
        Plan.uniform(4, tp=2),
        Wanted(max_new_tokens=8),
        on_text=lambda _, piece: pieces.append(piece),
        is_fresh=is_fresh,
    )
    assert found == generate(tmp_path, PROMPTS[:1], None, Wanted(max_new_tokens=8))
    assert "".join(pieces) == found[0].text
    assert multiprocessing.active_children() == []


def test_a_rank_that_dies_is_named_and_none_is_left(tmp_path: Path) -> None:
    save_model(tmp_path, config_of())

    def kill_the_other(_: int, __: str) -> None:
        for child in multiprocessing.active_children():
            child.kill()

    with pytest.raises(RunError, match=r"rank 1 ended with exit code -9"):
        generate(tmp_path, PROMPTS, Plan.uniform(4, pp=2), on_text=kill_the_other)
    assert multiprocessing.active_children() == []


def test_a_rank_that_dies_while_nothing_runs_is_found_at_a_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "HEARTBEAT_S", 0.1)
    save_model(tmp_path, config_of())
    with Engine.open(tmp_path, Plan.uniform(4, tp=2), EngineSettings()) as engine:
        assert list(engine.stream([Ask(id=1, prompt=[5, 6], max_tokens=3)]))
        for child in multiprocessing.active_children():
            child.kill()
        ready, _, _ = select.select([engine], [], [], 60)
        assert ready == [engine], "nothing was heard"
        with pytest.raises(RunError, match=r"rank 1 ended with exit code -9"):
            engine.step(0)
        with pytest.raises(RunError, match=r"rank 1 ended"):
            engine.add_request(Ask(id=2, prompt=[5], max_tokens=1))
    assert multiprocessing.active_children() == []


def test_what_cannot_work_is_refused_before_a_rank_starts(tmp_path: Path) -> None:
    save_model(tmp_path, config_of())
    with pytest.raises(PlanError, match=r"dp=2"):
        generate(tmp_path, PROMPTS, Plan.uniform(4, dp=2))
    assert multiprocessing.active_children() == []
