"""The likeliest next token, from rows whose labels mark one position each."""

from __future__ import annotations

import torch

from triptych.runtime.build.stage import StageModule
from triptych.runtime.tensor.loss import IGNORED


def likeliest(
    num_rows: int, stage: StageModule, hidden_BsH: torch.Tensor, labels_BS: torch.Tensor
) -> torch.Tensor:
    """The likeliest token after the marked position of each row, [rows]; of the last stage.

    Ids of rows whose mark is on another context rank are 0, so that a sum over ranks is the answer.
    The smallest id wins among equals, in every layout. Cost: 2 x rows all-reduced over the
    vocabulary's ranks.
    """
    logits_BSv = stage.local_logits(hidden_BsH)
    rows, places = torch.nonzero(labels_BS != IGNORED, as_tuple=True)
    vocabulary = stage.vocabulary
    best = torch.full((num_rows,), -torch.inf, dtype=torch.float32, device=logits_BSv.device)
    token = torch.zeros(num_rows, dtype=torch.int64, device=logits_BSv.device)
    if len(rows):
        best[rows], found = logits_BSv[rows, places].float().max(dim=-1)
        token[rows] = found + vocabulary.start
    largest = vocabulary.comm.all_reduce(best.clone(), maximum=True)
    is_mine = (best == largest) & torch.isfinite(best)
    candidate = torch.where(is_mine, -token, torch.iinfo(torch.int64).min)
    winner = -vocabulary.comm.all_reduce(candidate, maximum=True)
    return torch.where(torch.isfinite(largest), winner, 0)
