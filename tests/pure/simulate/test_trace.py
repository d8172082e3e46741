"""Lists of requests: the public forms, lengths, and changes of a trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from triptych.errors import InputError
from triptych.simulate.trace import (
    fixed_lengths,
    lengths_of,
    log_normal_lengths,
    make,
    read_trace,
    uniform_lengths,
)

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
MOONCAKE = (
    "timestamp_ms,input_length,output_length,n_hash_blocks\n40,6758,500,14\n2040,7322,490,15\n"
)
SINGLE = "model,arrival_s,slo_s\nm10,0.0,0.495\nm2,0.5,0.495\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_azure_traces_start_at_zero(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, AZURE))
    assert trace.arrival_s == pytest.approx([0.0, 4.314579])
    assert trace.prompt_tokens.tolist() == [374, 396]
    assert trace.output_tokens.tolist() == [44, 109]


def test_mooncake_traces_are_in_milliseconds(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, MOONCAKE))
    assert trace.arrival_s.tolist() == [0.0, 2.0]
    assert trace.prompt_tokens.tolist() == [6758, 7322]


def test_single_shot_lists_have_models_and_objectives(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, SINGLE))
    assert trace.models == ("m2", "m10") and trace.model.tolist() == [1, 0]
    assert trace.slo_s.tolist() == [0.495, 0.495]


@pytest.mark.parametrize("text", ["a,b\n1,2\n", ""])
def test_an_unknown_form_is_refused_with_those_that_are_known(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match="ContextTokens"):
        read_trace(written(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (MOONCAKE.replace("7322", "many"), "many"),
        (MOONCAKE.replace(",7322,490,15", ""), "each row"),
        (MOONCAKE.replace("2040", "20"), "back in time"),
    ],
)
def test_a_damaged_trace_is_refused_with_its_name(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_trace(written(tmp_path, text))


def test_a_missing_trace_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        read_trace(tmp_path / "nowhere.csv")


def test_lengths_follow_their_distributions() -> None:
    rng, at = np.random.default_rng(1), np.arange(20_000.0)
    assert set(make(at, fixed_lengths(7, 3), rng).prompt_tokens) == {7}
    uniform = make(at, uniform_lengths((32, 256), (1, 2)), rng)
    assert (uniform.prompt_tokens.min(), uniform.prompt_tokens.max()) == (32, 256)
    assert set(uniform.output_tokens) == {1, 2}
    drawn = make(at, log_normal_lengths((500.0, 1.0), (100.0, 0.5)), rng)
    assert drawn.prompt_tokens.mean() == pytest.approx(500, rel=0.05)
    assert drawn.output_tokens.std() == pytest.approx(50, rel=0.05)
    again = make(at, lengths_of(drawn), rng)
    pairs = set(zip(drawn.prompt_tokens, drawn.output_tokens, strict=True))
    assert set(zip(again.prompt_tokens, again.output_tokens, strict=True)) <= pairs


def test_a_trace_is_cut_capped_and_stretched() -> None:
    trace = make(np.arange(11.0), fixed_lengths(500, 100), np.random.default_rng(0))
    assert len(trace.head(3)) == 3
    capped = trace.capped(256, 64)
    assert capped.prompt_tokens[0] == 256 and capped.output_tokens[0] == 64
    assert trace.rate_per_s == 1.0
    assert trace.at_rate(4.0).rate_per_s == 4.0
