"""Attention over the sequences of several ranks = plain attention, gradients included.

Every kind of score is compared with the softmax written out over a full mask.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import STRICT, run_ranks

from triptych.plan.context import pieces
from triptych.runtime.attention import causal_attention
from triptych.runtime.comm import Communicator, Counters
from triptych.runtime.context import ring
from triptych.runtime.context.block import Scores
from triptych.runtime.context.ring import ring_attention
from triptych.runtime.context.ulysses import ulysses_attention
from triptych.runtime.context.whole import whole_attention
from triptych.runtime.strict import StrictCommunicator

BATCH, QUERY_HEADS, KV_HEADS, LENGTH, DIM = 2, 4, 2, 48, 8
PACKED = ((5, 7, 12, 1, 23), (30, 18))
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "documents": {"documents": PACKED},
    "window": {"window": 7},
    "window and documents": {"window": 7, "documents": PACKED},
    "softcap": {"softcap": 0.7},
    "softcap, window and documents": {"softcap": 0.7, "window": 20, "documents": PACKED},
    "sinks": {"sinks": [0.5, -1.0, 0.0, 2.0]},
    "sinks, window and documents": {
        "sinks": [0.5, -1.0, 0.0, 2.0],
        "window": 7,
        "documents": PACKED,
    },
}


def _scores(case: str) -> Scores:
    settings = dict(CASES[case])
    if "sinks" in settings:
        settings["sinks"] = torch.tensor(settings["sinks"], dtype=torch.float64).requires_grad_()
    return Scores(0.3, **settings)


def _tensors(value_dim: int = DIM) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(QUERY_HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, value_dim), (QUERY_HEADS, value_dim)]
    return [
        torch.randn(BATCH, heads, LENGTH, dim, generator=generator, dtype=torch.float64)
        for heads, dim in shapes
    ]


def _mask(scores: Scores) -> torch.Tensor:
    place = torch.arange(LENGTH)
    gap = place[:, None] - place[None]
    seen = (gap >= 0) & (gap < (scores.window or LENGTH))
    rows = scores.documents or ((LENGTH,),) * BATCH
    numbers = [torch.arange(len(r)).repeat_interleave(torch.tensor(r)) for r in rows]
    return torch.stack([seen & (n[:, None] == n[None]) for n in numbers])[:, None]


def _by_definition(q: Any, k: Any, v: Any, scores: Scores) -> torch.Tensor:
    k, v = (x.repeat_interleave(QUERY_HEADS // KV_HEADS, dim=1) for x in (k, v))
    made = q @ k.mT * scores.scale
    if scores.softcap is not None:
        made = torch.tanh(made / scores.softcap) * scores.softcap
    made = made.masked_fill(~_mask(scores), float("-inf"))
    if scores.sinks is not None:
        sinks = scores.sinks[None, :, None, None].expand(BATCH, -1, LENGTH, 1)
        return torch.cat((made, sinks), -1).softmax(-1)[..., :-1] @ v
    return made.softmax(-1) @ v


def _answers(out: Any, inputs: list[torch.Tensor], weight: torch.Tensor, scores: Scores) -> Any:
    (out * weight).sum().backward()
    grads = [x.grad for x in inputs if x.grad is not None]
    sinks = None if scores.sinks is None else scores.sinks.grad.numpy()  # type: ignore[union-attr]
    return [x.detach().numpy() for x in (out, *grads)], sinks


def _one(attend: Any, case: str, value_dim: int = DIM) -> Any:
    *inputs, weight = _tensors(value_dim)
    scores = _scores(case)
    for tensor in inputs:
        tensor.requires_grad_()
    return _answers(attend(*inputs, scores), inputs, weight, scores)


@cache
def _expected(case: str, value_dim: int = DIM) -> Any:
    return _one(_by_definition, case, value_dim)


def _split(method: str, cases: list[str], value_dim: int = DIM) -> list[Any]:
    """The answers of each case on this rank, and the bytes sent forward and in all."""
    ring.MASKED_QUERIES = 5
    rank, size = dist.get_rank(), dist.get_world_size()
    counters = Counters()
    kind = StrictCommunicator if STRICT else Communicator
    comm = kind("context", range(size), rank, dist.group.WORLD, counters)
    places = _places(method, size, rank)
    attend = {"ring": ring_attention, "ulysses": ulysses_attention}[method]
    answers = []
    for case in cases:
        *inputs, weight = (t[:, :, places].contiguous() for t in _tensors(value_dim))
        for tensor in inputs:
            tensor.requires_grad_()
        scores, count = _scores(case), counters.axis("context")
        counters.reset()
        out = attend(*inputs, scores, comm)
        forward = count.bytes_sent
        answers.append((*_answers(out, inputs, weight, scores), forward, count.bytes_sent))
    dist.barrier()  # nobody leaves while a neighbour waits for its acknowledgement
    return answers


def _places(method: str, size: int, rank: int) -> torch.Tensor:
    held = pieces(LENGTH, size, rank, method)
    return torch.cat([torch.arange(piece.start, piece.stop) for piece in held])


def _assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(
        torch.from_numpy(found), torch.from_numpy(expected), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("most", [5, 256])
def test_attention_of_one_rank_is_the_definition(
    case: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "MASKED_QUERIES", most)
    found, sinks = _one(whole_attention, case)
    expected, expected_sinks = _expected(case)
    for mine, theirs in zip(found, expected, strict=True):
        _assert_same(mine, theirs)
    if sinks is not None:
        _assert_same(sinks, expected_sinks)


@pytest.mark.parametrize("case", [name for name in CASES if "documents" not in name])
def test_the_last_tokens_see_those_of_a_cache(case: str) -> None:
    q, k, v, _ = _tensors()
    scores = _scores(case)
    found, _ = causal_attention(
        torch.nn.Module(),
        q[:, :, -5:],
        k,
        v,
        None,
        scaling=scores.scale,
        sliding_window=scores.window,
        softcap=scores.softcap,
        s_aux=scores.sinks,
    )
    _assert_same(found.transpose(1, 2).detach().numpy(), _expected(case)[0][0][:, :, -5:])


@pytest.mark.parametrize(
    ("method", "size"),
    [("ring", 2), ("ring", 3), ("ring", 4), ("ulysses", 2), ("ulysses", 4)],
)
def test_attention_over_context_ranks_is_the_definition(method: str, size: int) -> None:
    """Four ranks share two KV heads under Ulysses."""
    answers = run_ranks(size, _split, method, list(CASES))
    for index, case in enumerate(CASES):
        expected, expected_sinks = _expected(case)
        for rank, answer in enumerate(answers):
            places = _places(method, size, rank)
            for mine, theirs in zip(answer[index][0], expected, strict=True):
                _assert_same(mine, theirs[:, :, places])
        if expected_sinks is not None:  # each rank has its part of the sum
            _assert_same(sum(answer[index][1] for answer in answers), expected_sinks)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_values_may_be_narrower_than_keys(method: str) -> None:
    """As those of latent attention are."""
    expected, _ = _expected("documents", 6)
    for rank, answer in enumerate(run_ranks(2, _split, method, ["documents"], 6)):
        for mine, theirs in zip(answer[0][0], expected, strict=True):
            _assert_same(mine, theirs[:, :, _places(method, 2, rank)])


@pytest.mark.parametrize("size", [2, 4])
def test_a_ring_sends_keys_and_values_once_round_and_back_with_gradients(size: int) -> None:
    """A window of 7 reaches 6 tokens back into the chunk before, which a neighbour has.

    Four ranks have chunks of 6; of two, each has such tokens in both its chunks of 12.
    """
    token_bytes = 2 * BATCH * KV_HEADS * DIM * 8
    tokens = {"plain": (size - 1) * LENGTH // size, "window": {2: 18, 4: 6 + 6}[size]}
    for answer in run_ranks(size, _split, "ring", list(tokens)):
        for (_, _, forward, both), count in zip(answer, tokens.values(), strict=True):
            assert (forward, both) == (count * token_bytes, 3 * count * token_bytes)


def test_ulysses_sends_its_share_of_queries_keys_values_and_outputs() -> None:
    for size, kv_heads in ((2, KV_HEADS), (4, 4)):
        tokens = BATCH * LENGTH // size
        whole = tokens * DIM * 8 * (2 * QUERY_HEADS + 2 * kv_heads)
        sent = (size - 1) / size * whole
        for answer in run_ranks(size, _split, "ulysses", ["plain"]):
            assert answer[0][2:] == (sent, 2 * sent)


def _dealt(elements: int) -> bool:
    """Part j of rank i says (i, j): what arrives says who sent it, and to whom."""
    rank, size = dist.get_rank(), dist.get_world_size()
    kind = StrictCommunicator if STRICT else Communicator
    comm = kind("context", range(size), rank, dist.group.WORLD, Counters())
    marks = torch.arange(size)[:, None].expand(size, elements)
    arrived = comm.all_to_all((10 * rank + marks).contiguous())
    dist.barrier()
    return torch.equal(arrived, 10 * marks + rank)


@pytest.mark.parametrize("elements", [3, 1 << 16])
def test_an_all_to_all_deals_parts_small_and_large(elements: int) -> None:
    assert run_ranks(3, _dealt, elements) == [True] * 3


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_token_is_on_one_rank(method: str, size: int) -> None:
    places = torch.cat([_places(method, size, rank) for rank in range(size)])
    assert sorted(places.tolist()) == list(range(48))
