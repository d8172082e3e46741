"""From logits to tokens: on one rank, in an order and with draws that depend on the answer alone.

A draw is a hash of seed, continuation and place in the answer: it is the same whatever else is in
the batch, and again after a preemption. Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from triptych.serve.engine.grammars import Guide
from triptych.serve.engine.sampling import Grammar, Sampling

CANDIDATES = 512
"""How many of the likeliest tokens are sorted first; all of them only if these are not enough."""

GuideMaker = Callable[[Grammar | None], Guide | None]


class Chance(NamedTuple):
    """The log-probability of a token, and the likeliest ones with theirs."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Drawn(NamedTuple):
    """A token for each row, and for those rows whose request asks what the model thought of it."""

    tokens: list[int]
    chances: dict[int, Chance]


@dataclass(slots=True)
class Asked:
    """What a request asked for."""

    sampling: Sampling
    end_ids: frozenset[int]  # those that end its answers
    prompt: tuple[int, ...] = ()  # if its tokens count


class _Answer:
    """What the choice of the next token of one answer depends on."""

    def __init__(self, asked: Asked, vocab: int, guide: Guide | None) -> None:
        self.num_tokens = 0
        self.guide = guide
        self.counts_V: torch.Tensor | None = None
        self.in_prompt_V: torch.Tensor | None = None
        if asked.sampling.has_penalties:
            self.counts_V = torch.zeros(vocab)
            self.in_prompt_V = torch.zeros(vocab, dtype=torch.bool)
            self.in_prompt_V[list(asked.prompt)] = True

    def add(self, token: int) -> None:
        self.num_tokens += 1
        if self.counts_V is not None:
            self.counts_V[token] += 1
        if self.guide is not None:
            self.guide.add(token)


class Sampler:
    """Chooses tokens; keeps what it needs of each answer until its request ends."""

    def __init__(self, vocab: int, unknown: Collection[int], make_guide: GuideMaker) -> None:
        self._vocab = vocab
        self._unknown = torch.tensor(sorted(unknown), dtype=torch.int64)
        self._make_guide = make_guide
        self._asked: dict[int, Asked] = {}  # of those who want more than the likeliest tokens
        self._answers: dict[int, dict[int, _Answer]] = {}

    def begin(self, request_id: int, asked: Asked) -> None:
        """From now on the request's answers may be sampled."""
        if not asked.sampling.is_plain:
            self._asked[request_id], self._answers[request_id] = asked, {}

    def end(self, request_id: int) -> None:
        """Forgets a request."""
        self._asked.pop(request_id, None)
        self._answers.pop(request_id, None)

    def sample(self, logits_NV: torch.Tensor, answers: Sequence[tuple[int, int]]) -> Drawn:
        """A token for each row; `answers` are request and continuation. Changes `logits_NV`."""
        if len(self._unknown):
            logits_NV.index_fill_(1, self._unknown.to(logits_NV.device), -torch.inf)
        drawn = Drawn(logits_NV.argmax(dim=1).tolist(), {})
        if self._asked:
            for row, (request_id, index) in enumerate(answers):
                if request_id in self._asked:  # else it is plain, or has just ended
                    self._choose(logits_NV[row], request_id, index, row, drawn)
        return drawn

    def _choose(
        self, logits_V: torch.Tensor, request_id: int, index: int, row: int, drawn: Drawn
    ) -> None:
        asked, answers = self._asked[request_id], self._answers[request_id]
        if index not in answers:
            guide = self._make_guide(asked.sampling.grammar)
            answers[index] = _Answer(asked, self._vocab, guide)
        answer, sampling = answers[index], asked.sampling
        raw_V = logits_V.float().cpu()
        bent_V = _bend(raw_V, asked, answer)
        if sampling.temperature == 0:
            token = int(bent_V.argmax())
        else:
            uniform = _uniform(sampling.seed or 0, index, answer.num_tokens)
            token = draw(bent_V, sampling, uniform)
        answer.add(token)
        drawn.tokens[row] = token
        if sampling.logprobs is not None:
            drawn.chances[row] = chance(raw_V, token, sampling.logprobs)


def chance(logits_V: torch.Tensor, token: int, count: int) -> Chance:
    """The log-probability of a token, and the `count` likeliest tokens with theirs."""
    found_V = torch.log_softmax(logits_V.float(), dim=0)
    values, ids = found_V.topk(count)
    return Chance(float(found_V[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def _bend(logits_V: torch.Tensor, asked: Asked, answer: _Answer) -> torch.Tensor:
    """Logits after bias, penalties, what may not end yet and what the grammar allows."""
    sampling, bent_V = asked.sampling, logits_V.clone()
    for token, bias in sampling.logit_bias.items():
        bent_V[token] += bias
    if answer.counts_V is not None and answer.in_prompt_V is not None:
        seen_V = answer.counts_V > 0
        factor = sampling.repetition_penalty
        known_V = seen_V | answer.in_prompt_V
        harder_V = torch.where(bent_V > 0, bent_V / factor, bent_V * factor)
        bent_V = torch.where(known_V, harder_V, bent_V)
        bent_V -= sampling.frequency_penalty * answer.counts_V
        bent_V -= sampling.presence_penalty * seen_V
    if answer.num_tokens < sampling.min_tokens:
        bent_V[list(asked.end_ids)] = -torch.inf
    if answer.guide is not None:
        bent_V.masked_fill_(~answer.guide.allowed(len(bent_V)), -torch.inf)
    return bent_V


def draw(logits_V: torch.Tensor, sampling: Sampling, uniform: float) -> int:
    """A token of softmax(logits / temperature) cut by top-k, top-p and min-p.

    `uniform` in [0, 1) is looked up in the cumulative sum. Only the likeliest tokens are sorted,
    before any softmax: all of them cost 100 times as much.
    """
    below_V = logits_V.double() - logits_V.max()  # so that no quotient overflows
    scaled_V = below_V / sampling.temperature
    if sampling.top_k is None and sampling.top_p == 1 and sampling.min_p == 0:
        return _look_up(torch.softmax(scaled_V, dim=0), uniform)
    vocab = len(scaled_V)
    wanted = min(sampling.top_k or CANDIDATES, vocab)
    values, ids = scaled_V.topk(wanted)
    if sampling.top_k is None:
        shares = torch.exp(values - torch.logsumexp(scaled_V, dim=0))
        enough = float(shares.sum()) >= sampling.top_p if sampling.top_p < 1 else False
        enough = enough or float(shares[-1]) < sampling.min_p * float(shares[0])
        if not enough and wanted < vocab:
            values, ids = scaled_V.sort(descending=True)
            shares = torch.softmax(values, dim=0)
    else:
        shares = torch.softmax(values, dim=0)
    before = shares.cumsum(0) - shares
    kept = (before < sampling.top_p) & (shares >= sampling.min_p * shares[0])
    kept[0] = True
    return int(ids[_look_up(torch.where(kept, shares, 0.0), uniform)])


def _look_up(weights: torch.Tensor, uniform: float) -> int:
    """The place where the cumulative sum of weights passes a share of the whole."""
    sums = weights.cumsum(0)
    place = int(torch.searchsorted(sums, uniform * float(sums[-1]), right=True))
    last = int(weights.nonzero()[-1])  # rounding may carry past the end
    return min(place, last)


def _uniform(seed: int, continuation: int, place: int) -> float:
    """A number in [0, 1) that depends on nothing else."""
    packed = struct.pack("<QII", seed % 2**64, continuation, place)
    bits = int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
    return (bits >> 11) / 2**53
