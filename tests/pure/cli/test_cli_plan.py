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
