"""The job file: what is refused, with which words; what is read back as it was written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from triptych.errors import JobError
from triptych.train.job import Job
from triptych.train.job_file import SECTIONS, job_toml, read_job
from triptych.train.job_reference import job_reference

GOOD = """\
[model]
path = "some-model"
[data]
train = "text"
sequence_length = 64
[train]
steps = 10
global_batch = 8
"""


def read(folder: Path, text: str = GOOD, *overrides: str) -> Job:
    path = folder / "job.toml"
    path.write_text(text)
    return read_job(path, overrides)


def refusal(folder: Path, text: str = GOOD, *overrides: str) -> str:
    with pytest.raises(JobError) as caught:
        read(folder, text, *overrides)
    return str(caught.value)


def test_a_good_job_has_all_defaults_filled_in(tmp_path: Path) -> None:
    job = read(tmp_path)
    assert job.train.steps == 10
    assert job.data.train == (str(Path("text").absolute()),)
    assert job.run.folder == str(Path("runs/job").absolute())
    assert job.checkpoint.folder == str(Path("runs/job/checkpoints").absolute())
    assert job.data.cache == str(Path("runs/job/tokens").absolute())


def test_the_printed_job_reads_back_as_the_same_job(tmp_path: Path) -> None:
    job = read(
        tmp_path, GOOD, "parallel.plan=tp=2,pp=2", "parallel.fix={tp = 2}", "optimizer.eps=1e-9"
    )
    again = tmp_path / "printed.toml"
    again.write_text(job_toml(job))
    assert read_job(again) == job


@pytest.mark.parametrize("section", SECTIONS)
def test_an_unknown_key_names_section_and_nearest_key_in_every_section(
    tmp_path: Path, section: str
) -> None:
    """User case pub_020."""
    key = next(iter(SECTIONS[section].model_fields))
    text = refusal(tmp_path, GOOD, f"{section}.{key}x=1")
    assert f"unknown key '{key}x' in [{section}]" in text
    assert f"[{section}] {key}" in text


def test_a_key_of_another_section_is_told_its_home(tmp_path: Path) -> None:
    """User case pub_020."""
    text = refusal(tmp_path, GOOD, "train.learning_rate=0.1")
    assert "unknown key 'learning_rate' in [train]" in text
    assert "[optimizer] learning_rate" in text


@pytest.mark.parametrize(
    ("key", "home"),
    [
        ("train.lr=0.1", "[optimizer] learning_rate"),
        ("parallel.tensor_paralel=2", "[parallel] plan"),
        ("optimizer.batch_size=2", "[train] global_batch"),
    ],
)
def test_names_of_other_tools_lead_to_ours(tmp_path: Path, key: str, home: str) -> None:
    assert home in refusal(tmp_path, GOOD, key)


@pytest.mark.parametrize("value", ["1e3", "10.0", "true", '"10"', "0", "-3"])
def test_a_count_must_be_a_positive_whole_number(tmp_path: Path, value: str) -> None:
    """User case pub_020."""
    text = refusal(tmp_path, GOOD, f"train.steps={value}")
    assert "[train] steps = " in text
    assert "works: steps = 1000" in text


@pytest.mark.parametrize("value", ["nan", "inf", "0.0", "-1e-3", '"0.1"'])
def test_a_learning_rate_must_be_a_positive_finite_number(tmp_path: Path, value: str) -> None:
    assert "[optimizer] learning_rate = " in refusal(
        tmp_path, GOOD, f"optimizer.learning_rate={value}"
    )


def test_a_duplicate_key_is_named_with_its_line(tmp_path: Path) -> None:
    """User case pub_020."""
    text = refusal(tmp_path, GOOD + "steps = 20\n[optimizer]\n")
    assert "line 9" in text and "`steps = 20`" in text
    assert "given once" in text


def test_a_duplicate_key_in_the_last_line_is_named_with_its_line(tmp_path: Path) -> None:
    text = refusal(tmp_path, GOOD + "steps = 20")
    assert "line 9, column" in text and "`steps = 20`" in text


def test_broken_syntax_is_named_with_line_and_column(tmp_path: Path) -> None:
    """User case pub_020."""
    text = refusal(tmp_path, GOOD + "  indented: 3\n")
    assert "line 9, column" in text and "`indented: 3`" in text


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    text = refusal(
        tmp_path,
        GOOD,
        "train.stepz=1",
        "optimizer.min_learning_rate=1",
        "checkpoint.resume=auot",
        "model.init=weight",
        "trian.x=1",
    )
    for part in ("stepz", "min_learning_rate", "'auot'", "'weight'", "unknown section [trian]"):
        assert part in text


def test_missing_keys_are_told_with_an_example(tmp_path: Path) -> None:
    text = refusal(tmp_path, '[model]\npath = "m"\n[data]\ntrain = "t"\n')
    assert "[data] sequence_length is missing" in text
    assert "section [train] is missing" in text
    assert "[train] steps, [train] global_batch" in text


def test_a_key_outside_any_section_is_told_its_home(tmp_path: Path) -> None:
    text = refusal(tmp_path, "steps = 3\n" + GOOD)
    assert "key 'steps' outside any section" in text and "[train] steps" in text


def test_a_model_is_given_once(tmp_path: Path) -> None:
    assert "has both of path and config" in refusal(
        tmp_path, GOOD, "model.config={model_type = 'llama'}"
    )
    assert "has neither of path and config" in refusal(tmp_path, GOOD.replace("path", "# path"))


def test_an_override_that_is_not_one_is_refused(tmp_path: Path) -> None:
    for override in ("steps=1", "train.steps", ".steps=1", "train.steps.x=1"):
        assert f"--set {override}" in refusal(tmp_path, GOOD, override)


def test_a_job_file_that_is_not_there_is_named_with_close_ones(tmp_path: Path) -> None:
    read(tmp_path)
    with pytest.raises(JobError, match="no job file") as caught:
        read_job(tmp_path / "jop.toml")
    assert "job.toml" in str(caught.value)


def test_a_bad_job_is_refused_without_torch(tmp_path: Path) -> None:
    """User case pub_020."""
    path = tmp_path / "job.toml"
    path.write_text(GOOD + "stepz = 1\n")
    code = (
        "import sys\nfrom triptych.train.job_file import read_job\n"
        f"try: read_job({str(path)!r})\nfinally: assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0 and "stepz" in done.stderr and "AssertionError" not in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["job.toml"]


def test_the_documentation_is_that_of_the_schema() -> None:
    written = Path(__file__).parents[3] / "docs" / "job.md"
    assert written.read_text("utf-8") == job_reference()
