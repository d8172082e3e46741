"""`triptych plan` and `triptych predict`: fast, without torch, and never silent about why."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from triptych.cli.main import run
from triptych.cluster.text import parse_cluster
from triptych.cluster.toml import write_cluster
from triptych.plan.toml import read_plan

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
}

PLAN_70B = [
    "plan", "llama-3.1-70b", "--cluster", "8x8xH100-SXM", "--seq", "8192", "--batch", "512"
]  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> str:
    return written(tmp_path, {})


def written(folder: Path, changes: dict[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIG | changes))
    return str(path)


def answer(args: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = run([*args, "--json"])
    return code, json.loads(capfd.readouterr().out)


def test_planning_a_large_model_imports_no_torch_and_prints_one_document() -> None:
    code = (
        "import sys\n"
        "from triptych.cli.main import run\n"
        f"code = run({[*PLAN_70B, '--json']!r})\n"
        "slow = {'torch', 'transformers', 'numpy', 'scipy', 'pydantic', 'rich', 'jinja2'}\n"
        "print('slow:', *(slow & set(sys.modules)), file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr.endswith("...\nslow:\n"), done.stderr
    document = json.loads(done.stdout)
    best = document["plans"][0]
    for field in ("step_time_s", "mfu", "memory_gib", "time_s", "fits", "plan", "reason"):
        assert field in best
    for field in ("search_time_s", "candidates", "rejected", "next", "runnable"):
        assert field in document
    times = [plan["step_time_s"] for plan in document["plans"]]
    assert times == sorted(times)


def test_the_plan_is_ranked_explained_and_followed_by_the_next_command(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.toml"
    where = ["--cluster", "1x4xcpu", "--seq", "64", "--batch", "8", "--out", str(out)]
    assert run(["plan", model, *where]) == 0
    printed = capsys.readouterr().out
    assert "why:" in printed and "fastest" in printed
    words = shlex.split(printed.strip().splitlines()[-1])
    assert words[:2] == ["triptych", "train"] and str(out) in words
    assert f"model.path={model}" in words and "train.global_batch=8" in words
    assert read_plan(out).world_size == 4


def test_fixed_settings_hold_for_every_plan(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    where = ["--cluster", "1x4xcpu", "--seq", "64", "--batch", "8"]
    code, document = answer(["plan", model, *where, "--fix", "tp=2,pp=2", "zero=0"], capfd)
    assert code == 0 and document["plans"]
    for plan in document["plans"]:
        assert (plan["plan"]["tp"], plan["plan"]["pp"], plan["plan"]["zero"]) == (2, 2, 0)


@pytest.mark.parametrize("verb", ["plan", "predict"])
def test_heads_that_do_not_divide_name_both_counts_and_degrees_that_work(
    verb: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = written(tmp_path, {"num_attention_heads": 14, "hidden_size": 112})
    where = ["--cluster", "1x4xcpu", "--seq", "64", "--batch", "8"]
    wanted = ["--fix", "tp=4"] if verb == "plan" else ["--plan", "tp=4"]
    code, document = answer([verb, model, *where, *wanted], capfd)
    (problem,) = document["error"]["problems"]
    assert code == 2 and "tp=4" in problem["what"]
    assert "14 query heads and 2 KV heads" in problem["what"]
    assert problem["works"].startswith("tp in 1, 2 on 4 devices")
    for tp in ("1", "2"):
        offered = ["--fix", f"tp={tp}"] if verb == "plan" else ["--plan", f"tp={tp}"]
        assert answer([verb, model, *where, *offered], capfd)[0] == 0


def test_batch_arithmetic_is_shown_in_full(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    where = ["--cluster", "1x4xcpu", "--seq", "64", "--batch", "30"]
    code, document = answer(["predict", model, *where, "--plan", "tp=2,microbatch=4"], capfd)
    (problem,) = document["error"]["problems"]
    assert code == 2
    for word in ("world=4", "TP=2", "DP=2", "30 / (microbatch 4 x DP 2)"):
        assert word in problem["what"]
    assert "microbatch 3 | microbatch 5" in problem["works"]


def test_a_plan_file_and_its_short_form_have_the_same_price(
    model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.toml"
    where = ["--cluster", "1x4xcpu", "--seq", "64", "--batch", "8"]
    _, found = answer(["plan", model, *where, "--out", str(out)], capfd)
    best = found["runnable"]
    from_file = answer(["predict", model, *where, "--plan", str(out)], capfd)[1]
    from_text = answer(["predict", model, *where, "--plan", best["plan"]["short"]], capfd)[1]
    assert from_file == from_text
    assert from_file["step_time_s"] == best["step_time_s"]


def test_nothing_fits_is_explained_and_the_stated_need_does_fit(
    model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def planned(memory_bytes: int) -> tuple[int, dict[str, Any]]:
        path = tmp_path / "cluster.toml"
        path.write_text(cluster_of(memory_bytes))
        args = ["plan", model, "--cluster", str(path), "--seq", "64", "--batch", "8"]
        return answer(args, capfd)

    code, document = planned(2**20)
    assert code == 2 and document["plans"] == [] and document["rejected"]["memory"] > 0
    closest = document["closest"]
    assert closest["over_bytes"] == closest["needed_bytes"] - 2**20 and closest["changes"]
    assert planned(closest["needed_bytes"] - 4096)[0] == 2
    assert planned(closest["needed_bytes"])[0] == 0


def cluster_of(memory_bytes: int) -> str:
    cluster = parse_cluster("1x2xcpu")
    (group,) = cluster.groups
    small = replace(group, device=replace(group.device, memory_bytes=float(memory_bytes)))
    return write_cluster(replace(cluster, groups=(small,)))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["plan", "lama-3.1-8b", "--cluster", "1x8xH100"], ["lama-3.1-8b", "Llama-3.1-8B"]),
        (["plan", "llama-3.1-8b", "--cluster", "1x8xH100-SMX"], ["H100-SMX", "H100-SXM"]),
        (["plan", "llama-3.1-8b"], ["--cluster"]),
        (["plan", "llama-3.1-8b", "--cluster", "1x8xH100", "--fix", "tpp=8"], ["tpp", "tp"]),
        (["plan", "llama-3.1-8b", "--cluster", "1x8xH100", "--fix", "tp"], ["--fix tp"]),
        (["plan", "llama-3.1-8b", "--cluster", "1x8xH100", "--batch", "0"], ["0"]),
        (["predict", "llama-3.1-8b", "--cluster", "1x8xH100", "--plan", "no.toml"], ["no.toml"]),
        (["predict", "llama-3.1-8b", "--cluster", "1x8xH100", "--plan", "zer=1"], ["zero"]),
    ],
)
def test_wrong_input_ends_with_code_2_and_what_was_meant(
    args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(args) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    assert all(word in captured.err for word in words)


def test_an_html_report_of_the_plans_is_written(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plans.html"
    where = ["--cluster", "1x2xcpu", "--seq", "64", "--batch", "8"]
    assert run(["plan", model, *where, "--report", str(page)]) == 0
    assert "tp=" in page.read_text()


def test_a_folder_that_is_not_there_is_named(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "none" / "plan.toml"
    args = ["plan", model, "--cluster", "1x2xcpu", "--seq", "64", "--batch", "8"]
    assert run([*args, "--out", str(out)]) == 2
    assert str(out) in capsys.readouterr().err


# --- objectives, prices, sweeps, explanations --------------------------------------------------

TINY = ["--cluster", "1x4xH100-SXM", "--seq", "64", "--batch", "8"]


def test_an_objective_ranks_and_a_price_is_counted(
    model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", model, *TINY, "--price", "2.50"]
    fast = answer([*words, "--objective", "money"], capfd)[1]["plans"]
    small = answer([*words, "--objective", "memory"], capfd)[1]["plans"]
    memory = [plan["peak_memory_gib"] for plan in small]
    assert memory == sorted(memory) and small[0]["reason"].startswith("smallest")
    assert small[0]["peak_memory_gib"] <= fast[0]["peak_memory_gib"]
    for plan in (*fast, *small):
        hours = 1e9 / plan["tokens_per_s_per_gpu"] / 3600
        assert plan["gpu_hours_per_billion_tokens"] == pytest.approx(hours)
        assert plan["cost_per_billion_tokens"] == pytest.approx(2.5 * hours)


def test_a_front_and_a_sensitivity_are_there_if_asked_for(
    model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", model, *TINY, "--fix", "microbatch=1"]
    plain = answer(words, capfd)[1]
    assert plain["front"] == plain["sensitivity"] == []
    full = answer([*words, "--front", "--sensitivity"], capfd)[1]
    memory = [plan["peak_memory_gib"] for plan in full["front"]]
    times = [plan["step_time_s"] for plan in full["front"]]
    assert times == sorted(times) and memory == sorted(memory, reverse=True)
    changes = [effect["change"] for effect in full["sensitivity"]]
    assert changes == [
        "links in the node x0.5",
        "links in the node x2",
        "memory x0.9",
        "memory x1.1",
        "global batch x0.5",
        "global batch x2",
    ]
    for effect in full["sensitivity"]:
        assert effect["plan"] and effect["step_time_s"] > 0
        if effect["kept_step_time_s"] is not None:
            assert effect["kept_step_time_s"] >= effect["step_time_s"] * (1 - 1e-9)
    assert run([*words, "--front", "--sensitivity"]) == 0
    text = capfd.readouterr().out
    assert "what binds plan 1" in text and "none is both faster and smaller" in text
    assert "global batch x2" in text and "passed over by a bound" in text


def test_a_sweep_is_a_grid_with_the_best_row_and_the_front(
    model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    sweep = ["--sweep", "gpus=1,2,4", "batch=4,8", "--fix", "microbatch=1", "--price", "2"]
    code, document = answer(["plan", model, *TINY, *sweep, "--objective", "gpu-hours"], capfd)
    rows = document["rows"]
    assert code == 0 and document["sweep"] == ["gpus", "batch"]
    assert [(row["gpus"], row["batch"]) for row in rows] == [
        (gpus, batch) for gpus in "124" for batch in "48"
    ]
    assert all(row["plan"] and row["devices"] == int(row["gpus"]) for row in rows)
    hours = [row["gpu_hours_per_billion_tokens"] for row in rows]
    assert document["best"] == hours.index(min(hours))
    speeds = [rows[index]["tokens_per_s"] for index in document["front"]]
    assert speeds == sorted(speeds) and document["front"]
    assert run(["plan", model, *TINY, *sweep]) == 0
    assert "GPU-h per B tokens" in capfd.readouterr().out


def test_a_sweep_over_devices_has_the_price_of_each(
    model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "sweep.html"
    sweep = ["--sweep", "device=H100-SXM,A100-80", "gpus=2,4,6", "--fix", "microbatch=1"]
    prices = ["--price", "H100-SXM=3,A100-80=1.5", "--objective", "money"]
    words = ["plan", model, *TINY, *sweep, *prices, "--report", str(page)]
    code, document = answer(words, capfd)
    assert code == 0 and len(document["rows"]) == 6
    for row in document["rows"]:
        if row["plan"]:
            price = 3 if row["device"].startswith("H100") else 1.5
            hours = row["gpu_hours_per_billion_tokens"]
            assert row["cost_per_billion_tokens"] == pytest.approx(price * hours)
    problems = [row["problem"] for row in document["rows"] if not row["plan"]]
    assert problems and all("works: gpus=4" in problem for problem in problems)
    assert "GPU-h per B tokens" in page.read_text() and "<script" not in page.read_text()


def test_all_that_is_wrong_is_said_at_once_with_what_was_meant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", "llama-3.1-8b", "--cluster", "1x8xH100-SXM"]
    wrong = ["--fix", "tpp=8,zer=1,pp", "--sweep", "gpu=8", "seq=x", "--objective", "tme"]
    assert run([*words, *wrong, "--price", "cheap"]) == 2
    text = capsys.readouterr().err
    for word in ("tpp", "zero", "--fix pp", "gpus=...", "seq=x", "time", "--price cheap"):
        assert word in text
    assert run([*words, "--objective", "money"]) == 2
    assert "--price 2.50" in capsys.readouterr().err


PINNED = [
    ("tp", "2"), ("pp", "2"), ("dp", "2"), ("cp", "2"), ("ep", "1"), ("zero", "2"),
    ("hybrid_shard", "2"), ("accumulation", "reduce_last"), ("schedule", "zb-h1"), ("chunks", "2"),
    ("microbatch", "2"), ("recompute", "selective"), ("recompute_every", "2"),
    ("shard_activations", "0"), ("sequence_parallel", "1"), ("offload", "optimizer"),
    ("context_method", "ulysses"), ("layers", "3+1"), ("bucket_bytes", "1048576"),
    ("prefetch", "2"), ("precision", "fp32"), ("attention", "eager"), ("compile", "1"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), PINNED)
def test_every_setting_can_be_fixed_and_its_plan_reads_back(
    key: str, value: str, model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code, document = answer(["plan", model, *TINY, "--fix", f"{key}={value}", "--top", "2"], capfd)
    assert code == 0
    for plan in document["plans"]:
        whole = plan["plan"]
        shown = whole["precision"]["parameter"] if key == "precision" else whole[key]
        wanted = [3, 1] if key == "layers" else value
        assert str(int(shown) if isinstance(shown, bool) else shown) == str(wanted)
        back = answer(["predict", model, *TINY, "--plan", whole["short"]], capfd)[1]
        assert back["step_time_s"] == plan["step_time_s"]
