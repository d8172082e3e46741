"""`triptych bench-serve` before a server: what was sent when, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from http_samples import NAME, Server, serving
from scripted import Scripted, engine_of, tokenizer_folder

from triptych.cli.main import run
from triptych.serve.core.limits import Limits
from triptych.serve.http.exposure import Exposure
from triptych.simulate.trace import read_trace

LIMITS = Limits(num_blocks=64, block_size=4, model_context=128, max_running=8, max_waiting=100,
                token_budget=48)  # fmt: skip
STEP_S = 0.002


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))
    exposure, script = Exposure(keys=["k"]), Scripted(lambda *_: 5)
    with serving(folder, None, exposure, lambda: engine_of(script, LIMITS, STEP_S)) as server:
        yield server


def bench(capfd: pytest.CaptureFixture[str], server: Server, *options: str) -> tuple[int, dict]:  # type: ignore[type-arg]
    ids = ["--token-ids", "1", "200"]
    code = run(["bench-serve", f"{server.url}/v1", "--api-key", "k", "--json", *ids, *options])
    return code, json.loads(capfd.readouterr().out)


def write_trace(path: Path) -> Path:
    rows = [f"2024-01-01 00:00:0{i / 20:.3f},{20 + 9 * i},{5 + i}" for i in range(20)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return path


def test_a_trace_is_sent_at_its_times_and_measured(
    capfd: pytest.CaptureFixture[str], server: Server, tmp_path: Path
) -> None:
    trace = write_trace(tmp_path / "trace.csv")
    before = server.service.metrics.output_tokens.labels(NAME)._value.get()
    options = ["--trace", str(trace), "--input", "100", "--output", "20"]
    code, found = bench(capfd, server, *options, "--slo-ttft", "60")
    capped = read_trace(trace).capped(100, 20)
    total = int(capped.output_tokens.sum())
    assert code == 0 and found["model"] == NAME and found["requests"] == len(capped) == 20
    assert server.service.metrics.output_tokens.labels(NAME)._value.get() - before == total
    assert found["refused"] == found["failed"] == 0 and found["attainment"] == 1
    span_s = float(np.ptp(capped.arrival_s))
    assert found["duration_s"] > span_s
    assert found["output_tokens_per_s"] * found["duration_s"] == pytest.approx(total)
    assert found["goodput_per_s"] * found["duration_s"] == pytest.approx(20)
    assert found["tpot_s"]["p50"]["value"] > STEP_S / 2
    for name in ("ttft_s", "tpot_s", "latency_s"):
        ranked = [found[name][f"p{q}"]["value"] for q in (50, 90, 99)]
        assert ranked == sorted(ranked) and ranked[0] > 0


def test_requests_that_cannot_work_are_counted_with_their_cause(
    capfd: pytest.CaptureFixture[str], server: Server, tmp_path: Path
) -> None:
    trace = write_trace(tmp_path / "trace.csv")
    code, found = bench(capfd, server, "--trace", str(trace), "--input", "150", "--rate", "200")
    sizes = read_trace(trace).capped(150, 64)
    fits = (sizes.prompt_tokens + sizes.output_tokens) <= LIMITS.context
    assert code == 0 and found["failed"] == int((~fits).sum()) > 0
    assert "context limit is 128" in found["faults"][0]
    assert found["attainment"] == pytest.approx(fits.mean())


def test_arrivals_are_drawn_and_the_text_has_the_figures(
    capfd: pytest.CaptureFixture[str], server: Server
) -> None:
    options = ["--rate", "500", "--cv", "2", "--requests", "12", "--input", "9", "--output", "3"]
    command = ["bench-serve", f"{server.url}/v1", "--api-key", "k", "--token-ids", "1", "9"]
    assert run([*command, *options]) == 0
    out = capfd.readouterr().out
    assert "12 requests in" in out and "TTFT" in out and "requests/s within" in out


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ([], 2, "neither a trace nor a rate"),
        (["--rate", "-1"], 2, "--rate -1"),
        (["--rate", "1", "--token-ids", "9", "3"], 2, "--token-ids"),
        (["--trace", "nowhere.csv"], 2, "nowhere.csv"),
        (["--rate", "99", "--api-key", "wrong"], 1, "no models at"),
        (["--rate", "99", "--requests", "2", "--model", "gpt"], 1, "there is no model 'gpt'"),
    ],
)
def test_what_cannot_be_sent_ends_the_command(
    capfd: pytest.CaptureFixture[str], server: Server, options: list[str], code: int, words: str
) -> None:
    assert run(["bench-serve", f"{server.url}/v1", "--api-key", "k", *options]) == code
    assert words in capfd.readouterr().err
