"""Sampling against the definitions written out over the whole vocabulary."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from serve_samples import END, byte_tokenizer

from triptych.errors import InputError
from triptych.serve.engine.grammars import Grammars
from triptych.serve.engine.sampler import CANDIDATES, Asked, Chance, Sampler, draw
from triptych.serve.engine.sampling import Grammar, Sampling

VOCAB = 3 * CANDIDATES


def kept_shares(logits: list[float], sampling: Sampling) -> dict[int, float]:
    """Probabilities of the tokens that remain, by the definitions."""
    highest = max(logits)
    weights = [math.exp((value - highest) / sampling.temperature) for value in logits]
    order = sorted(range(len(logits)), key=lambda i: -weights[i])[: sampling.top_k or len(logits)]
    total = sum(weights[i] for i in order)
    found: dict[int, float] = {}
    before = 0.0
    for i in order:
        share = weights[i] / total
        if before >= sampling.top_p or share < sampling.min_p * weights[order[0]] / total:
            break
        found[i] = share
        before += share
    whole = sum(found.values())
    return {i: share / whole for i, share in found.items()}


CASES = [
    Sampling(temperature=0.7),
    Sampling(temperature=1.3, top_k=7),
    Sampling(temperature=1.0, top_p=0.5),
    Sampling(temperature=2.0, top_p=0.97),
    Sampling(temperature=1.0, min_p=0.05),
    Sampling(temperature=0.5, top_k=20, top_p=0.8, min_p=0.01),
]


@pytest.mark.parametrize("flat", [False, True], ids=["peaked", "flat"])
@pytest.mark.parametrize("sampling", CASES, ids=repr)
def test_draws_cover_each_token_by_its_share(sampling: Sampling, flat: bool) -> None:
    """A flat distribution needs more tokens than are sorted first."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(VOCAB, generator=generator) * (0.05 if flat else 3.0)
    shares = kept_shares(logits.double().tolist(), sampling)
    count = 400
    drawn = [draw(logits, sampling, (place + 0.5) / count) for place in range(count)]
    assert set(drawn) <= set(shares)
    for token, share in shares.items():
        assert abs(drawn.count(token) / count - share) <= 1.01 / count


def sampler(vocab: int, unknown: tuple[int, ...] = ()) -> Sampler:
    return Sampler(vocab, unknown, lambda _: None)


def choose(logits: torch.Tensor, count: int, asked: Asked) -> list[int]:
    """`count` tokens in a row from the same logits."""
    made = sampler(len(logits))
    made.begin(1, asked)
    return [made.sample(logits[None].clone(), [(1, 0)]).tokens[0] for _ in range(count)]


def test_penalties_bend_logits_as_they_are_defined() -> None:
    logits = torch.tensor([2.0, 1.9, 1.0, -1.0])
    presence = Asked(Sampling(presence_penalty=0.5), frozenset())
    assert choose(logits, 4, presence) == [0, 1, 0, 0]
    frequency = Asked(Sampling(frequency_penalty=0.6), frozenset())
    assert choose(logits, 5, frequency) == [0, 1, 0, 1, 2]
    repetition = Asked(Sampling(repetition_penalty=2.0), frozenset(), prompt=(0,))
    assert choose(logits, 2, repetition) == [1, 0]
    bias = Asked(Sampling(logit_bias={3: 10.0}), frozenset())
    assert choose(logits, 1, bias) == [3]


@pytest.mark.parametrize("cuts", [{}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.1}])
def test_the_smallest_and_largest_temperatures_draw_as_their_limits_do(
    cuts: dict[str, float],
) -> None:
    logits = torch.tensor([1.0, 1e30, 2.0, -1e30])
    smallest = Asked(Sampling(temperature=1e-320, seed=1, **cuts), frozenset())
    assert {*choose(logits, 20, smallest)} == {1}
    largest = Asked(Sampling(temperature=1e308, seed=1, **cuts), frozenset())
    assert {*choose(logits, 60, largest)} <= {0, 1, 2, 3}


def test_an_answer_does_not_end_before_its_least_length() -> None:
    asked = Asked(Sampling(min_tokens=2), frozenset({0}))
    logits = torch.tensor([3.0, 2.0, 1.0])
    assert choose(logits, 3, asked) == [1, 1, 0]


def test_log_probabilities_are_those_of_the_model_before_all_else() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0])
    asked = Asked(Sampling(temperature=0.1, logit_bias={0: 50.0}, logprobs=2, seed=1), frozenset())
    made = sampler(len(logits))
    made.begin(1, asked)
    tokens, chances = made.sample(logits[None].clone(), [(1, 0)])
    expected = torch.log_softmax(logits, 0)
    assert tokens == [0]
    assert chances == {0: Chance(pytest.approx(float(expected[0])), chances[0].top)}
    assert [token for token, _ in chances[0].top] == [1, 2]
    assert chances[0].top[0][1] == pytest.approx(float(expected[1]))


def test_what_is_no_token_is_never_chosen() -> None:
    made = sampler(4, unknown=(3,))
    logits = torch.tensor([[0.0, 1.0, 0.5, 9.0]])
    assert made.sample(logits, [(1, 0)]).tokens == [1]


@given(st.integers(0, 2**63), st.integers(1, 6))
def test_a_seed_repeats_its_draws_whatever_else_is_in_the_batch(seed: int, others: int) -> None:
    logits = torch.linspace(0, 1, 50)
    asked = Asked(Sampling(temperature=1.0, seed=seed), frozenset())
    alone = choose(logits, 5, asked)
    made = sampler(50)
    for request in range(others + 1):
        other = Asked(Sampling(temperature=1.0, seed=request), frozenset())
        made.begin(request, asked if request == others else other)
    rows = [(request, 0) for request in range(others + 1)]
    together = [made.sample(logits.repeat(others + 1, 1), rows).tokens[-1] for _ in range(5)]
    assert together == alone


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind="json_schema", text=json.dumps(SCHEMA)),
        Grammar(kind="regex", text="[a-c]{3}=[0-9]+"),
        Grammar(kind="lark", text='start: "yes" | "no"'),
        Grammar(kind="json"),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_random_logits_under_a_grammar_give_what_it_allows(grammar: Grammar) -> None:
    tokenizer = byte_tokenizer()
    end = tokenizer.token_to_id(END)
    grammars = Grammars(tokenizer, frozenset({end}))
    vocab = tokenizer.get_vocab_size() + 11
    made = Sampler(vocab, range(vocab - 11, vocab), grammars.guide)
    asked = Asked(Sampling(temperature=1.0, seed=5, grammar=grammar), frozenset({end}))
    made.begin(1, asked)
    generator, ids = torch.Generator().manual_seed(1), list[int]()
    while len(ids) < 400:
        logits = torch.randn(1, vocab, generator=generator)
        logits[0, end] += 3
        ids += made.sample(logits, [(1, 0)]).tokens
        if ids[-1] == end:
            break
    text = tokenizer.decode(ids[:-1])
    assert ids[-1] == end, text
    _check(grammar, text)


def _check(grammar: Grammar, text: str) -> None:
    if grammar.kind == "json_schema":
        found = json.loads(text)
        assert isinstance(found["a"], int) and found["b"] in ("x", "y") and len(found) == 2
    elif grammar.kind == "json":
        json.loads(text)
    elif grammar.kind == "regex":
        assert text[:3].strip("abc") == "" and text[3] == "=" and text[4:].isdigit()
    else:
        assert text in ("yes", "no")


def test_a_grammar_that_cannot_be_read_is_refused_with_the_reason() -> None:
    grammars = Grammars(byte_tokenizer(), frozenset())
    for grammar in (Grammar(kind="json_schema", text="{"), Grammar(kind="regex", text="(")):
        with pytest.raises(InputError, match=grammar.kind):
            grammars.check(grammar)
