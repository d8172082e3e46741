"""`triptych validate` on a small table, and on what is no such table."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from runs import run, write

from triptych.cli.main import run as triptych


def table(folder: Path) -> Path:
    return write(
        folder / "runs.csv",
        run(id="lab-1", iteration_time_s=0.2),
        run(id="lab-2", tp=1, dp=8, iteration_time_s=0.15),
        run(id="lab-3", gpu="Z9000"),
        run(id="other-run-1", peak_mem_gb_per_gpu=10, iteration_time_s=0.2),
        run(id="oom-1", n_layers=96, hidden=12288, ffn_hidden=49152, iteration_time_s=""),
    )


def test_the_document_has_the_figures_of_the_design(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.csv"
    assert triptych(["validate", str(table(tmp_path)), "--rows", str(out), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["rows"], found["used"]) == (5, 4)
    assert found["skipped"] == {"GPU not in the catalogue": 1}
    five = {"median_abs_rel_error", "mean_abs_rel_error", "p90_abs_rel_error", "bias", "n"}
    for quantity in ("step_time", "memory"):
        assert found[quantity].keys() == five | {"by_source", "source_mean", "worst_source"}
    assert found["step_time"]["by_source"].keys() == {"lab", "other-run"}
    assert found["step_time"]["n"] == 3 and found["memory"]["n"] == 1
    assert found["ranking"]["pairs"] == 1
    assert found["oom"] == {"rows": 1, "predicted_oom": 1}
    assert found["ran"] == {"ran": 3, "predicted_to_fit": 3}
    assert 0 <= found["coverage_80"] <= 1 and 0 < found["half_width_median"] < 1
    with out.open() as file:
        rows = {row["id"]: row for row in csv.DictReader(file)}
    assert rows["lab-3"]["skipped"] == "GPU not in the catalogue"
    one = rows["lab-1"]
    assert float(one["low_s"]) < float(one["predicted_s"]) < float(one["high_s"])
    error = float(one["predicted_s"]) / 0.2 - 1
    assert float(one["time_error"]) == pytest.approx(error)


def test_the_text_names_sources_and_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert triptych(["validate", str(table(tmp_path))]) == 0
    printed = capsys.readouterr().out
    assert "4 of 5 rows compared" in printed and "1 skipped: GPU not in the catalogue" in printed
    assert "other-run" in printed and "mean of sources" in printed and "80 % error bars" in printed


def test_a_missing_file_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert triptych(["validate", str(tmp_path / "none.csv")]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "cannot read" in captured.err and "Traceback" not in captured.err


def test_all_missing_columns_are_named_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("id,gpus,n_gpus,seq_len,tp,pp,micro_batch_size\nlab-1,A100,8,1024,1,1,1\n")
    assert triptych(["validate", str(path)]) == 2
    printed = capsys.readouterr().err
    assert "no column gpu" in printed and "gpus" in printed
    assert "no column dp" in printed and "no column with a measurement" in printed


def test_a_table_without_rows_and_a_task_that_there_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert triptych(["validate", str(write(tmp_path / "empty.csv"))]) == 2
    assert "has no rows" in capsys.readouterr().err
    assert triptych(["validate", str(table(tmp_path)), "--task", "cook"]) == 2
    assert "--task cook" in capsys.readouterr().err


def test_rows_that_cannot_be_written_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert triptych(["validate", str(table(tmp_path)), "--rows", str(tmp_path)]) == 2
    assert "cannot write" in capsys.readouterr().err
