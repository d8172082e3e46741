"""`triptych plan`, `predict` and `validate` with `--task serve`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from triptych.api import find_serving_plan, predict_serving
from triptych.cli.main import VERBS, run
from triptych.errors import InputError
from triptych.plan.serving import ServingWorkload

PLAN = ["plan", "llama-3.1-8b", "--cluster", "1x4xH100-SXM", "--task", "serve"]
PREDICT = ["predict", "llama-3.1-8b", "--cluster", "1x4xH100-SXM", "--task=serve"]

KEYS = {
    "ttft_s",
    "tpot_s",
    "output_tokens_per_s",
    "max_concurrency",
    "kv_cache_gib",
    "fits",
    "plan",
}


def answer(args: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = run([*args, "--json"])
    return code, json.loads(capfd.readouterr().out)


def test_plans_meet_objectives_and_say_why(capfd: pytest.CaptureFixture[str]) -> None:
    code, document = answer(
        [*PLAN, "--rate", "4", "--slo-ttft", "0.5", "--slo-tpot", "0.02"], capfd
    )
    assert code == 0 and document["task"] == "serve"
    assert document["candidates"] > 0 and document["search_time_s"] > 0
    for plan in document["plans"]:
        assert plan.keys() >= KEYS and plan["reason"]
        assert plan["ttft_s"] <= 0.5 and plan["tpot_s"] <= 0.02
        assert plan["objectives_met"] == {"ttft": True, "tpot": True, "rate": True}
    assert document["binds"]


def test_a_price_adds_up(capfd: pytest.CaptureFixture[str]) -> None:
    plan = "tp=2,pp=2,batch=32,chunk=2048"
    code, document = answer([*PREDICT, "--plan", plan, "--concurrency", "8"], capfd)
    assert code == 0 and document.keys() >= KEYS
    assert document["plan"]["replicas"] == 1 and len(document["stages_s"]) == 2
    assert sum(document["memory_gib"].values()) == pytest.approx(document["memory_limit_gib"])
    assert max(document["stages_s"]) == pytest.approx(sum(document["step_s"].values()))


def test_text_shows_the_plan_its_step_and_its_memory(capfd: pytest.CaptureFixture[str]) -> None:
    assert run([*PLAN, "--slo-tpot", "0.02"]) == 0
    text = capfd.readouterr().out
    assert "why:" in text and "what limits plan 1" in text and "plans priced in" in text
    assert run([*PREDICT, "--plan", "tp=4"]) == 0
    text = capfd.readouterr().out
    assert "step without prompts" in text and "kv cache" in text


def test_the_best_plan_is_exported_to_vllm_and_is_the_next_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page, script = tmp_path / "page.html", tmp_path / "serve.sh"
    args = ["--rate", "4", "--engine", "vllm", "--report", str(page)]
    code, document = answer([*PLAN, *args, "--export", "vllm", "--export-to", str(script)], capfd)
    assert code == 0 and document["export"]["text"] == script.read_text()
    best = document["plans"][0]["plan"]
    words = script.read_text().split()
    for flag, value in (
        ("--tensor-parallel-size", best["tp"]),
        ("--pipeline-parallel-size", best["pp"]),
        ("--data-parallel-size", best["replicas"]),
        ("--max-num-seqs", best["batch"]),
        ("--max-num-batched-tokens", best["chunk"]),
        ("--max-model-len", 1024 + 256 + 1),
    ):
        assert words[words.index(flag) + 1] == str(value)
    command = [line for line in script.read_text().splitlines() if not line.startswith("#")]
    assert document["next"].split() == " ".join(command).split()
    html = page.read_text()
    assert "<html" in html
    for text in (document["plans"][0]["reason"], "products", "kv cache", "--max-num-seqs"):
        assert text in html


def test_uneven_stages_and_narrow_caches_reach_vllm(capfd: pytest.CaptureFixture[str]) -> None:
    plan = "tp=2,pp=2,layers=17+15,weights=bf16,cache=fp8"
    assert run([*PREDICT, "--plan", plan, "--export", "vllm", "--slo-tpot", "0.1"]) == 0
    text = capfd.readouterr().out
    assert "VLLM_PP_LAYER_PARTITION=17,15" in text and "--kv-cache-dtype fp8" in text
    assert "slo-tpot = 0.1 s" in text and "--quantization" not in text
    assert run([*PREDICT, "--plan", "tp=4", "--export", "megatron"]) == 2
    assert "--export vllm" in capfd.readouterr().err


def test_the_functions_say_what_the_verbs_do(capfd: pytest.CaptureFixture[str]) -> None:
    code, document = answer([*PLAN, "--rate", "4", "--fix", "tp=2"], capfd)
    requests = ServingWorkload(input_tokens=1024, output_tokens=256, rate=4.0)
    found = find_serving_plan("llama-3.1-8b", "1x4xH100-SXM", requests, fixed={"tp": "2"})
    assert code == 0 and found.to_json()["plans"] == document["plans"]
    assert document["next"].split()[1] in VERBS
    best = found.plans[0].prediction
    again = predict_serving("llama-3.1-8b", "1x4xH100-SXM", best.plan.short(), requests)
    assert again == best
    assert predict_serving("llama-3.1-8b", "1x4xH100-SXM", best.plan, requests) == best
    with pytest.raises(InputError, match="vllm"):
        find_serving_plan("llama-3.1-8b", "1x4xH100-SXM", requests, engine="tgi")


def test_objectives_that_nothing_meets_exit_with_2_and_the_nearest(
    capfd: pytest.CaptureFixture[str],
) -> None:
    args = ["plan", "llama-3.1-70b", "--cluster", "1x1xL40S", "--task", "serve"]
    code, document = answer(args, capfd)
    assert code == 2 and not document["plans"] and not document["nearest"]["fits"]
    assert any("bytes) a device" in line for line in document["missing"])
    assert any(line.startswith("works: ") for line in document["missing"])
    assert run(args) == 2
    assert "nearest: tp=1,pp=1" in capfd.readouterr().err


def test_wrong_options_are_refused_with_what_works(capfd: pytest.CaptureFixture[str]) -> None:
    cases = {
        ("--task", "bake"): "train or serve",
        ("--task", "serve", "--rate", "-1"): "--rate 1",
        ("--task", "serve", "--rate", "1", "--concurrency", "3"): "--rate alone",
        ("--task", "serve", "--engine", "warp"): "tensorrt-llm",
        ("--task", "serve", "--fix", "tp=2,seq=3"): "chunk",
    }
    for options, works in cases.items():
        code, document = answer([*PLAN[:4], *options], capfd)
        assert code == 2, options
        assert works in json.dumps(document), options


def test_heads_that_do_not_divide_are_refused_with_degrees_that_do(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 112,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 2048,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    cluster = [str(path), "--cluster", "1x8xH100-SXM", "--task", "serve"]
    for args in (["plan", *cluster, "--fix", "tp=4"], ["predict", *cluster, "--plan", "tp=4"]):
        code, document = answer(args, capfd)
        (problem,) = document["error"]["problems"]
        assert code == 2 and "14 query heads and 2 KV heads" in problem["what"]
        offered = re.match(r"tp in ([\d, or]+) on 8 devices", problem["works"])
        assert offered, problem["works"]
        for tensor in re.findall(r"\d+", offered.group(1)):
            assert run([*args[:-1], f"tp={tensor}"]) == 0, tensor
        capfd.readouterr()


def test_training_is_the_task_unless_said(capfd: pytest.CaptureFixture[str]) -> None:
    args = ["predict", "llama-3.2-1b", "--cluster", "1x2xH100-SXM", "--plan", "tp=2"]
    code, document = answer([*args, "--task", "train"], capfd)
    assert code == 0 and document["step_time_s"] > 0
