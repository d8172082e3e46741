"""Tables in the terminal."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from triptych.report.run import Run, read_run
from triptych.report.terminal import (
    comparison_table,
    memory_table,
    plans_table,
    prediction_text,
    run_text,
    stages_table,
    time_table,
)


def test_ranked_plans_have_figures_reasons_and_rejections(search_document: dict[str, Any]) -> None:
    assert plans_table(search_document).splitlines() == [
        "#  plan              step  tokens/s/GPU     MFU      memory  bubble",
        "-------------------------------------------------------------------",
        "1  tp=2,pp=2,dp=1  100 ms            1k  40.0 %  512.00 MiB  25.0 %",
        "2  tp=1,pp=4,dp=1  200 ms            1k  40.0 %  512.00 MiB  25.0 %",
        "",
        "all of them: precision=fp32",
        "",
        "why:",
        "  1  fastest: <TP> stays in the node",
        "  2  2 times slower",
        "",
        "42 legal plans in 250 ms: 2 simulated, the others passed over by a bound",
        "  33 by time: work",
        "  7 by memory: state",
        "  3 sets of degrees rejected: heads do not divide",
    ]


def test_no_plan_is_said_with_the_reasons() -> None:
    text = plans_table({"plans": [], "legal": 3, "bounds": {"memory: state": 3}})
    assert text.startswith("no plan fits\n")
    assert "3 by memory: state" in text


def test_a_plan_that_does_not_fit_is_marked(make_prediction: Callable[..., Any]) -> None:
    text = plans_table({"plans": [make_prediction(fits=False, reason="least memory")]})
    assert "1  does not fit in memory; least memory" in text
    assert "DOES NOT FIT" in prediction_text(make_prediction(fits=False))


def test_long_reasons_are_wrapped(make_prediction: Callable[..., Any]) -> None:
    text = plans_table({"plans": [make_prediction(reason="word " * 60)]})
    assert max(map(len, text.splitlines())) <= 100


def test_memory_by_term_adds_up_to_the_peak(make_prediction: Callable[..., Any]) -> None:
    assert memory_table(make_prediction()).splitlines() == [
        "memory of the largest rank",
        "----------------------------------------------------------------------",
        "weights                     204.80 MiB  " + "#" * 30,
        "gradients                   102.40 MiB  " + "#" * 15,
        "optimizer                   204.80 MiB  " + "#" * 30,
        "total                       512.00 MiB",
    ]


def test_time_by_term_starts_with_the_work(make_prediction: Callable[..., Any]) -> None:
    lines = time_table(make_prediction()).splitlines()
    assert [line.split()[0] for line in lines[2:]] == [
        "compute",
        "tensor",
        "data",
        "bubble",
        "total",
    ]


def test_a_prediction_without_numbers_prints_dashes() -> None:
    text = prediction_text({})
    assert "step time              -\n" in text
    assert "MFU, HFU               -, -\n" in text


def test_stages_show_layers_and_degrees(run_folder: Path) -> None:
    plan = read_run(run_folder).plan
    assert plan is not None
    assert stages_table(plan).splitlines() == [
        "stage  layers  count  data  tensor  context  expert",
        "---------------------------------------------------",
        "    0  0 to 2      3     1       2        1       1",
        "    1  3 to 4      2     1       2        1       1",
    ]


def test_predicted_beside_measured(run_folder: Path) -> None:
    lines = comparison_table(read_run(run_folder)).splitlines()
    assert lines[2].split() == ["step", "time", "100", "ms", "200", "ms", "-50", "%"]
    assert lines[3].startswith("  compute ")
    assert lines[-1] == "measured: median of 16 steps after the warm-up"


def test_shares_differ_in_points(run_folder: Path) -> None:
    text = comparison_table(read_run(run_folder))
    (line,) = [line for line in text.splitlines() if line.startswith("bubble fraction")]
    assert line.endswith("+0.0 points")


def test_a_whole_run_as_text(run_folder: Path) -> None:
    (run_folder / "job.toml").unlink()
    text = run_text(read_run(run_folder))
    assert text.startswith("run first-run\n\nplan tp=2,pp=2,dp=1,zero=1")
    assert "loss 7.9 at step 1, 6 at step 20" in text
    assert "held-out loss 6.5 at step 20" in text
    assert text.endswith("job.toml: missing")


def test_an_empty_run_can_be_printed() -> None:
    assert "no step measured" in run_text(Run(name="x"))


def test_the_terminal_report_loads_no_terminal_library() -> None:
    code = (
        "import sys, triptych.report.terminal; "
        "print([m for m in ('rich', 'jinja2', 'torch', 'numpy', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
