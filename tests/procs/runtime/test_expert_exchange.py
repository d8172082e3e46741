"""Rows to other ranks in uneven numbers, and ranks with nothing to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_samples import VOCAB, mixture
from layouts import batch_of, make_engine, split
from ranks import run_ranks

from triptych.errors import RunError
from triptych.plan.plan import Plan
from triptych.plan.ranks import coordinates
from triptych.runtime.mesh import Mesh

COUNTS = [[0, 2, 1], [3, 0, 0], [1, 1, 0]]  # rows from a rank (row) to a rank (column)


def _exchange() -> Any:
    mesh = Mesh.create(Plan.uniform(4, dp=3, ep=3), timeout_s=60)
    comm, me = mesh.expert, mesh.rank
    sent, arriving = COUNTS[me], [row[me] for row in COUNTS]
    rows = torch.tensor([[me, other] for other in range(3) for _ in range(sent[other])])
    out = comm.all_to_all_rows(rows.float().view(-1, 2), sent, arriving)
    return out.tolist(), mesh.counters.by_axis["expert"].bytes_sent


def test_rows_arrive_by_sender_and_those_for_others_are_counted() -> None:
    for me, (rows, sent_bytes) in enumerate(run_ranks(3, _exchange)):
        assert rows == [[other, me] for other in range(3) for _ in range(COUNTS[other][me])]
        assert sent_bytes == 8 * (sum(COUNTS[me]) - COUNTS[me][me])


def test_strict_ranks_compare_what_they_send_and_expect() -> None:
    def body() -> str:
        mesh = Mesh.create(Plan.uniform(4, dp=2, ep=2), timeout_s=60, strict=True)
        with pytest.raises(RunError) as error:
            mesh.expert.all_to_all_rows(torch.zeros(2, 3), [1, 1], [1, 2])
        return str(error.value)

    assert "expects [1, 2] rows" in run_ranks(2, body)[0]


@pytest.mark.parametrize("layout", [{"dp": 2, "ep": 2}, {"dp": 2, "ep": 2, "zero": 3}], ids=str)
def test_a_replica_without_text_still_has_experts_in_an_evaluation(layout: Any) -> None:
    rows = batch_of(0, 4, 16, VOCAB)

    def body(plan: Plan) -> tuple[float, int]:
        engine = make_engine(plan, mixture())
        is_idle = engine.mesh.coordinates.dp > 0
        return engine.evaluate(
            [] if is_idle else split(rows, Plan.uniform(2), coordinates(Plan.uniform(2), 0))
        )

    (expected,) = run_ranks(1, body, Plan.uniform(2))
    for loss, tokens in run_ranks(2, body, Plan.uniform(2, **layout)):
        assert loss == pytest.approx(expected[0], rel=1e-6) and tokens == expected[1]
