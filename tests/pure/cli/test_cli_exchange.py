"""`--export` and `--from`: text that can be redirected, one document, one message."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from triptych.cli.main import run
from triptych.cluster.text import parse_cluster
from triptych.cost.predict import predict
from triptych.cost.programs import MEGATRON_CORE
from triptych.model.load import load_model
from triptych.plan.toml import load_plan
from triptych.plan.workload import Workload

PLAN = ["plan", "llama-3.1-8b", "--cluster", "1x8xH100-SXM", "--seq", "4096", "--batch", "64"]
PREDICT = ["predict", *PLAN[1:], "--plan", "tp=4,dp=2,zero=1,sp=1"]
SCRIPT = """
TP=4
ARGS=(--tensor-model-parallel-size $TP --sequence-parallel --micro-batch-size 1)
torchrun --nproc_per_node 8 pretrain_gpt.py "${ARGS[@]}" --global-batch-size 64 --seq-length 4096 \\
    --bf16 --use-distributed-optimizer --num-layers 40 --unheard-of 1
"""


def answer(args: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any], str]:
    code = run([*args, "--json"])
    captured = capfd.readouterr()
    return code, json.loads(captured.out), captured.err


def test_an_export_is_all_of_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    assert run([*PREDICT, "--export", "torchtitan"]) == 0
    captured = capfd.readouterr()
    job = tomllib.loads(captured.out)
    assert job["parallelism"]["tensor_parallel_degree"] == 4
    assert "step time" in captured.err and "zero = 1: FSDP2 shards" in captured.err


def test_an_export_goes_to_its_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.sh"
    assert run([*PLAN, "--export", "megatron", "--export-to", str(path)]) == 0
    assert "--micro-batch-size" in path.read_text()
    captured = capfd.readouterr()
    assert "next:" in captured.out and f"wrote {path}" in captured.err


def test_the_document_has_text_and_notes(capfd: pytest.CaptureFixture[str]) -> None:
    code, document, _ = answer([*PREDICT, "--export", "deepspeed"], capfd)
    part = document["export"]
    assert code == 0 and json.loads(part["text"])["tensor_parallel"] == {"autotp_size": 4}
    notes = {note["field"]: note for note in part["not_expressed"]}
    assert notes["sequence_parallel"]["value"] == "true" and notes["sequence_parallel"]["why"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--export", "megaton"], ["megaton", "works: megatron"]),
        (["--export-to", "x"], ["goes with --export"]),
        (["--plan", "tp=2+1,dp=2+4,microbatch=2", "--export", "vllm"], ["one set of degrees"]),
        (["--plan", "pp=8", "--export", "fsdp2"], ["no pipeline", "--fix pp=1"]),
    ],
)
def test_what_cannot_be_exported_is_refused(
    args: list[str], words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run([*PREDICT[:-2], *(["--plan", "tp=8"] if "--plan" not in args else []), *args]) == 2
    said = capfd.readouterr().err
    assert all(word in said for word in words), said


def as_megatron_s(prediction: dict[str, Any]) -> float:
    """The step of a prediction's plan under Megatron Core, with its fused kernels."""
    model, cluster = load_model("llama-3.1-8b"), parse_cluster("1x8xH100-SXM")
    plan = load_plan(prediction["plan"]["short"], model, cluster).with_(compile=True)
    work = Workload(sequence_length=4096, global_batch=64)
    return predict(model, cluster, work, plan, MEGATRON_CORE).step_time_s


def test_the_present_plan_is_priced_beside_ours(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    args = [*PLAN[:4], "--from", str(path)]
    code, document, _ = answer(args, capfd)
    present, best = document["present"], document["plans"][0]
    assert code == 0 and document["global_batch"] == 64 and document["sequence_length"] == 4096
    assert present["prediction"]["plan"]["tp"] == 4 and present["prediction"]["plan"]["zero"] == 1
    gap = present["difference"]
    theirs = present["prediction"]
    assert gap["step_time_s"] == best["step_time_s"] - theirs["step_time_s"]
    for name in ("time_s", "memory_gib"):
        assert gap[name] == {k: best[name][k] - v for k, v in theirs[name].items()}
    assert present["program"] == "Megatron Core"
    assert present["prediction"]["step_time_s"] == as_megatron_s(present["prediction"])
    assert present["not_understood"] == ["--unheard-of 1"]
    assert present["model_differs"] == ["--num-layers 40 in the file, 32 in Llama-3.1-8B"]
    assert run(args) == 0
    text = capfd.readouterr().out
    for part in ("present plan, from Megatron-LM: tp=4", "difference", "assumed:", "--unheard-of"):
        assert part in text


def test_a_contradictory_script_gives_one_message(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT.replace("TP=4", "TP=3").replace("size 64", "size 0"))
    code, document, said = answer([*PLAN[:4], "--from", str(path)], capfd)
    problems = document["error"]["problems"]
    assert code == 2 and len(problems) >= 2 and said.count("error:") == 1
    assert run([*PLAN[:4], "--from", str(tmp_path / "absent.sh")]) == 2


def test_a_deepspeed_file_takes_pins(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}}')
    args = [*PLAN, "--from", str(path), "--fix", "tp=8"]
    code, document, _ = answer(args, capfd)
    assert code == 0 and document["present"]["prediction"]["plan"]["tp"] == 8
    assert document["present"]["program"] == "DeepSpeed"
