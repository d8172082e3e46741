"""What goes to kernels of CUDA together = tiles one by one.

No device is asked for: the variable-length kernel is written out in its own words, on CPU tensors,
and its shapes are those of fake CUDA tensors; the flexible one runs on CPU as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch._subclasses.fake_tensor import FakeTensorMode

from triptych.plan.context import pieces
from triptych.runtime.comm import Communicator, Counters
from triptych.runtime.context import flex, varlen
from triptych.runtime.context.block import Attended, Scores
from triptych.runtime.context.ring import ring_attention
from triptych.runtime.context.tiles import Sight, tiles

BATCH, HEADS, KV_HEADS, LENGTH, DIM = 2, 4, 2, 48, 8
DOCUMENTS = ((5, 7, 12, 1, 23), (8, 40))
SCORES = {
    "packed": Scores(0.3, documents=DOCUMENTS),
    "window": Scores(0.3, window=7),
    "packed, window": Scores(0.3, window=5, documents=DOCUMENTS),
    "chunks": Scores(0.3, chunk=10),
    "packed, sinks": Scores(0.3, documents=DOCUMENTS, sinks=torch.linspace(-1, 1, HEADS)),
}


def _seen(queries: int, keys: int, mask: varlen.Mask) -> torch.Tensor:
    """Who sees whom in the kernel's words: a sequence's last query is at its last key."""
    place = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)[None]
    seen = torch.ones_like(place, dtype=torch.bool)
    if mask.left >= 0:
        seen &= place <= mask.left
    if mask.right >= 0:
        seen &= place >= -mask.right
    return seen


def _forward(q: Any, k: Any, v: Any, at: Any, mask: varlen.Mask, scale: float) -> Attended:
    outs, sums = [], []
    for rows, keys in _sequences(at):
        made = _made(q[rows], k[keys], mask, scale)
        sums.append(made.logsumexp(-1).T)
        outs.append((made.softmax(-1) @ _spread(v[keys])).transpose(0, 1))
    assert at.most_queries == max(len(out) for out in outs)
    return Attended(torch.cat(outs), torch.cat(sums))


def _backward(
    mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], at: Any, mask: Any, scale: float
) -> Any:
    """As flash attention does it: the softmax is that of the whole log-sum-exp."""
    grads = [torch.zeros_like(x) for x in (mine[1], *theirs)]
    for rows, keys in _sequences(at):
        grad, q, out, lse = (x[rows] for x in mine)
        k, v = (_spread(x[keys]) for x in theirs)
        weights = (_made(q, theirs[0][keys], mask, scale) - lse.T[..., None]).exp()
        grad, out, q = (x.transpose(0, 1) for x in (grad, out, q))
        inner = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
        parts = (inner @ k, _gather(inner.mT @ q), _gather(weights.mT @ grad))
        for total, span, part in zip(grads, (rows, keys, keys), parts, strict=True):
            total[span] = part.transpose(0, 1)
    return tuple(grads)


def _sequences(at: Any) -> list[tuple[slice, slice]]:
    spans = [
        [slice(*span) for span in pairwise(starts.tolist())]
        for starts in (at.query_starts, at.key_starts)
    ]
    return list(zip(*spans, strict=True))


def _made(q: torch.Tensor, k: torch.Tensor, mask: varlen.Mask, scale: float) -> torch.Tensor:
    scores = q.transpose(0, 1) @ _spread(k).mT * scale
    return scores.masked_fill(~_seen(len(q), len(k), mask), float("-inf"))


def _spread(x_NKD: torch.Tensor) -> torch.Tensor:
    return x_NKD.transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, dim=0)


def _gather(x_HND: torch.Tensor) -> torch.Tensor:
    return x_HND.unflatten(0, (KV_HEADS, -1)).sum(1)


def _attention(name: str, comm: Communicator | None = None) -> list[torch.Tensor]:
    """Output and gradients of this rank's tokens."""
    torch.manual_seed(0)
    size, index = (comm.size, comm.index) if comm else (1, 0)
    own = [i for piece in pieces(LENGTH, size, index) for i in range(piece.start, piece.stop)]
    shapes = [(BATCH, heads, LENGTH, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, grad = (torch.randn(shape, dtype=torch.float64)[:, :, own] for shape in shapes)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = ring_attention(*inputs, SCORES[name], comm)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


def _both(size: int) -> list[str]:
    """Names of the cases in which the two ways differ."""
    comm = None
    if size > 1:
        group, rank = torch.distributed.group.WORLD, torch.distributed.get_rank()
        comm = Communicator("context", range(size), rank, group, Counters())
    wrong = []
    for name in SCORES:
        expected = _attention(name, comm)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(varlen, "fits", lambda q, v, scores: True)
            patch.setattr(varlen, "_forward", _forward)
            patch.setattr(varlen, "_backward", _backward)
            found = _attention(name, comm)
        if not all(torch.allclose(*pair, atol=1e-12) for pair in zip(found, expected, strict=True)):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("size", [1, 2, 4])
def test_tiles_together_are_tiles_one_by_one(size: int) -> None:
    assert run_ranks(size, _both, size) == [[]] * size


def test_documents_and_windows_of_a_rank_are_one_launch() -> None:
    for sight in (Sight(LENGTH, 1, DOCUMENTS), Sight(LENGTH, 1, DOCUMENTS, 5)):
        (launch,) = varlen.launches(tiles(sight, 0, 0), BATCH)
        assert launch.is_first and launch.mask.right == 0


@pytest.mark.parametrize("name", ["packed", "packed, window"])
def test_the_kernel_of_the_device_takes_and_gives_these_shapes(name: str) -> None:
    """fp16 and bf16 on CUDA go there, and nothing else does."""
    with FakeTensorMode():
        for dtype in (torch.bfloat16, torch.float16):
            q, k, v = (
                torch.empty(BATCH, heads, LENGTH, DIM, dtype=dtype, device="cuda")
                for heads in (HEADS, KV_HEADS, KV_HEADS)
            )
            assert varlen.fits(q, v, SCORES[name])
            assert not varlen.fits(q, v, SCORES[name]._replace(softcap=1.0))
            assert not varlen.fits(q.float(), v.float(), SCORES[name])
            assert not varlen.fits(q.cpu(), v.cpu(), SCORES[name])
            _launch_on(q, k, v, SCORES[name])


def _launch_on(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> None:
    """Both passes of the real operators over fake tensors."""
    sight = Sight(LENGTH, 1, scores.documents, scores.window)
    (launch,) = varlen.launches(tiles(sight, 0, 0), BATCH)
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    starts = torch.empty(len(launch.tiles) + 1, dtype=torch.int32, device="cuda")
    places = torch.empty(BATCH * LENGTH, dtype=torch.int32, device="cuda")
    at = varlen._Places(places, places, starts, starts, 40, 40)
    part = varlen._forward(*flat, at, launch.mask, scores.scale)
    assert part.out_BHSD.shape == flat[0].shape and part.out_BHSD.dtype == q.dtype
    assert part.lse_BHS.shape == (BATCH * LENGTH, HEADS)
    mine = [flat[0], flat[0], part.out_BHSD, part.lse_BHS]
    grads = varlen._backward(mine, flat[1:], at, launch.mask, scores.scale)
    assert [x.shape for x in grads] == [x.shape for x in flat]


BENT = {
    "soft cap": Scores(0.3, softcap=2.0),
    "soft cap, window, packed": Scores(0.3, 7, 2.0, DOCUMENTS),
    "soft cap, sinks": Scores(0.3, softcap=2.0, sinks=torch.linspace(-1, 1, HEADS)),
    "chunks": Scores(0.3, chunk=10),
    "one row for all": Scores(0.3, documents=((20, 28),)),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", BENT)
@pytest.mark.parametrize("value_dim", [DIM, 4])
def test_the_flexible_kernel_gives_what_tiles_give(name: str, value_dim: int) -> None:
    torch.manual_seed(0)
    shapes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, value_dim))
    q, k, v = (torch.randn(BATCH, heads, LENGTH, dim) for heads, dim in shapes)
    found = flex.flexible_attention(q, k, v, BENT[name], flex.flex_attention)
    torch.testing.assert_close(found, ring_attention(q, k, v, BENT[name]), rtol=1e-5, atol=1e-5)


def test_the_flexible_kernel_is_for_narrow_types_on_cuda() -> None:
    with FakeTensorMode():
        q = torch.empty(BATCH, HEADS, LENGTH, DIM, dtype=torch.bfloat16, device="cuda")
        assert flex.fits(q) and not flex.fits(q.float()) and not flex.fits(q.cpu())
