"""Serving rows: what they mean, what is scored, what is skipped and why."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from triptych.cli.main import run
from triptych.validate.named import named_model
from triptych.validate.serve import validate_serving
from triptych.validate.served import engine_of, family_of, served
from triptych.validate.table import Row, Skip

BASE = {
    "id": "lab-a-001",
    "source": "a lab",
    "date_or_version": "1.0.0",
    "engine": "vLLM",
    "model_name": "meta-llama/Llama-3.1-8B-Instruct",
    "params_b": "8",
    "n_layers": "32",
    "hidden": "4096",
    "n_heads": "32",
    "n_kv_heads": "8",
    "gpu": "h100_sxm",
    "n_gpus": "2",
    "tp": "2",
    "pp": "1",
    "precision": "bf16",
    "input_len": "1024",
    "output_len": "128",
    "batch_or_concurrency": "8",
    "request_rate": "",
    "ttft_ms": "60",
    "tpot_ms": "6",
    "output_tokens_per_s": "1200",
    "total_tokens_per_s": "",
    "requests_per_s": "",
    "notes": "",
}


def row(**cells: str) -> Row:
    return Row(BASE | cells)


def test_a_closed_loop_is_scored_for_everything() -> None:
    case = served(row())
    assert (case.ttft_s, case.tpot_s, case.tokens_per_s) == (0.06, 0.006, 1200)
    assert case.workload.concurrency == 8 and case.workload.rate is None
    assert case.plan.tensor == 2 and case.plan.replicas == 1 and case.plan.weights == "bf16"


def test_what_arrives_at_once_or_too_fast_has_a_queue_in_its_first_token() -> None:
    assert served(row(request_rate="inf")).ttft_s is None
    assert served(row(request_rate="inf")).tpot_s == 0.006
    kept = served(row(request_rate="10", requests_per_s="9.8"))
    assert kept.ttft_s == 0.06 and kept.tokens_per_s is None and kept.workload.rate == 10
    over = served(row(request_rate="10", requests_per_s="5"))
    assert over.ttft_s is None and over.tokens_per_s == 1200


def test_throughput_is_read_from_any_column() -> None:
    total = served(row(output_tokens_per_s="", total_tokens_per_s="900"))
    assert total.tokens_per_s == pytest.approx(900 * 128 / 1152)
    requests = served(row(output_tokens_per_s="", requests_per_s="2"))
    assert requests.tokens_per_s == 256


def test_an_offline_batch_is_that_of_each_replica() -> None:
    case = served(row(n_gpus="8", tp="4", request_rate="offline", batch_or_concurrency="16"))
    assert case.plan.replicas == 2 and case.workload.concurrency == 32


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"precision": "FP4"}, "fp4"),
        ({"notes": "gemm_quant=nvfp4"}, "nvfp4"),
        ({"tp": ""}, "degrees not stated"),
        ({"tp": "4"}, "disagree"),
        ({"input_len": "ShareGPT"}, "lengths not stated"),
        ({"request_rate": "see README"}, "arrivals not stated"),
        ({"gpu": "abacus"}, "GPU not in the catalogue"),
        ({"model_name": "Unheard 9x9B", "n_layers": "5"}, "experts not known"),
        ({"model_name": "Mixtral 8x7B", "notes": "moe_ep=4"}, "expert parallelism"),
        ({"model_name": "Nobody-9B", "n_layers": ""}, "architecture incomplete"),
        ({"ttft_ms": "", "tpot_ms": "", "output_tokens_per_s": ""}, "nothing measured"),
    ],
)
def test_rows_that_cannot_be_compared_say_why(cells: dict[str, str], reason: str) -> None:
    with pytest.raises(Skip, match=reason):
        served(row(**cells))


@pytest.mark.parametrize(
    ("cells", "name", "vocab"),
    [
        ({}, "Llama-3.1-8B", 128256),
        ({"model_name": "LLaMA v3 8B"}, "Llama-3-8B", 128256),
        ({"model_name": "Mistral 7B", "n_layers": "", "n_kv_heads": ""}, "Mistral-7B", 32768),
        ({"model_name": "Mistral 7B", "n_kv_heads": ""}, "Mistral-7B", 32768),
        (
            {"model_name": "LLaMA 7B (Llama2-7b per doc)", "n_kv_heads": "32"},
            "Llama-2-7B",
            32000,
        ),
        (
            {
                "model_name": "Llama-3.3-70b-instruct",
                "n_layers": "80",
                "hidden": "8192",
                "n_heads": "64",
            },
            "Llama-3.1-70B",
            128256,
        ),
    ],
)
def test_names_are_read_however_they_are_written(
    cells: dict[str, str], name: str, vocab: int
) -> None:
    model = named_model(row(**cells))
    assert model.name.startswith(name) and model.vocab == vocab


def test_an_unknown_model_is_as_wide_as_its_parameters_say() -> None:
    cells = {"model_name": "GPT-J 6B", "params_b": "6", "n_layers": "28", "n_heads": "16"}
    model = named_model(row(**cells, n_kv_heads=""))
    assert model.blocks[0].mlp.width == 4 * 4096 and model.kv_heads == 16


@pytest.mark.parametrize(
    ("engine", "version", "family"),
    [
        ("vLLM", "2024-11; vLLM 0.6.3", "vllm 0"),
        ("vLLM", "2024-11", "vllm 0"),
        ("vllm", "2026-03-11; 0.17.0", "vllm"),
        ("trtllm", "1.0.0rc3", "tensorrt-llm"),
        ("TensorRT-LLM", "0.5.0", "tensorrt-llm static"),
        ("TensorRT-LLM", "0.10.0", "tensorrt-llm early"),
        ("TensorRT-LLM", "0.12.0", "tensorrt-llm c++"),
        ("NVIDIA NIM", "NIM 1.8.0", "tensorrt-llm c++"),
        ("sglang", "0.5.9", "sglang"),
        ("TGI", "2024-10; vLLM 0.6.3", "tgi"),
        ("ours", "1", "triptych"),
    ],
)
def test_engines_are_told_by_name_and_version(engine: str, version: str, family: str) -> None:
    assert family_of(row(engine=engine, date_or_version=version)) == family


def test_notes_change_features() -> None:
    assert engine_of(row(notes="run with --enforce-eager")).eager_s > 0
    assert engine_of(row()).eager_s == 0
    assert engine_of(row(gpu="MI300X")).weight_rate < engine_of(row()).weight_rate
    noted = served(row(notes="max_num_seqs 512 max_num_batched_tokens 1024"))
    assert noted.plan.batch == 512 and noted.plan.chunk == 1024


def test_the_document_has_every_figure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [
        BASE,
        BASE | {"id": "lab-a-002", "request_rate": "inf"},
        BASE | {"id": "lab-b-001", "batch_or_concurrency": "64"},
        BASE | {"id": "lab-b-002", "precision": "FP4"},
    ]
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(BASE))
        writer.writeheader()
        writer.writerows(rows)
    assert run(["validate", str(path), "--task", "serve", "--json", "--rows", f"{path}.out"]) == 0
    document: dict[str, Any] = json.loads(capfd.readouterr().out)
    assert (document["rows"], document["used"]) == (4, 3)
    assert document["skipped"] == {"weights in fp4 are not priced": 1}
    counts = {name: document[name]["n"] for name in ("tpot", "ttft", "throughput")}
    assert counts == {"tpot": 3, "ttft": 2, "throughput": 3}
    figures = {"median_abs_rel_error", "mean_abs_rel_error", "p90_abs_rel_error", "bias", "n"}
    assert document["tpot"].keys() == figures | {
        *("by_source", "source_mean", "worst_source", "coverage_80")
    }
    assert set(document["tpot"]["by_source"]) == {"lab-a", "lab-b"}
    assert document["tpot"]["median_abs_rel_error"] < 0.5
    assert len(Path(f"{path}.out").read_text().splitlines()) == 5
    assert run(["validate", str(path), "--task", "serve"]) == 0
    assert "mean of sources" in capfd.readouterr().out


def test_rows_with_experts_are_scored_apart_and_bars_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(BASE))
        writer.writeheader()
        sparse = {"id": "b-2", "model_name": "Mixtral 8x7B", "tp": "2", "n_gpus": "2"}
        writer.writerows([BASE | {"id": "a-1"}, BASE | sparse])
    document = validate_serving(path).document
    assert document["used"] == 2
    for name in ("tpot", "ttft", "throughput"):
        assert document[name]["n"] == document["experts"][name]["n"] == 1
        assert document[name]["coverage_80"] in (0.0, 1.0)
        assert list(document["experts"][name]["by_source"]) == ["b"]
