"""The data of a job: one set or a mixture, text or dialogues; what does not go together is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_samples import JOB

from triptych.errors import JobError
from triptych.train.job_file import job_toml, read_job

ONE = 'train = ["{folder}/text"]\n'
MIXTURE = """\
[[data.mixture]]
train = "books"
weight = 3
[[data.mixture]]
train = "talk.jsonl"
format = "chat"
"""


def written(folder: Path, data: str = "", mixture: str = "", more: str = "") -> Path:
    path = folder / "job.toml"
    text = JOB.replace(ONE, data) + mixture + more
    path.write_text(text.format(folder=folder))
    return path


def problems(path: Path) -> str:
    with pytest.raises(JobError) as caught:
        read_job(path)
    return str(caught.value)


def test_a_mixture_is_read_and_written_with_absolute_paths(tmp_path: Path) -> None:
    job = read_job(written(tmp_path, mixture=MIXTURE))
    first, second = job.data.sources
    assert (first.weight, first.packing, second.weight, second.packing) == (3, "stream", 1, "whole")
    assert all(Path(name).is_absolute() for source in job.data.sources for name in source.train)
    (tmp_path / "again.toml").write_text(job_toml(job))
    assert read_job(tmp_path / "again.toml") == job


def test_one_data_set_is_a_mixture_of_one(tmp_path: Path) -> None:
    job = read_job(written(tmp_path, data=ONE + 'format = "chat"\nmessages_key = "talk"\n'))
    (source,) = job.data.sources
    assert (source.train, source.messages_key) == (job.data.train, "talk")


@pytest.mark.parametrize(
    ("data", "mixture", "words"),
    [
        ("", "", "[data] train is missing"),
        (ONE, MIXTURE, "both train and mixture"),
        ("", MIXTURE.replace("weight = 3", "wieght = 3"), "unknown key 'wieght' in [[data.mix"),
        ("", MIXTURE.replace("weight = 3", "weight = 1001"), "weight = 1.0 of 1002.0"),
        ("", MIXTURE.replace("weight = 3", 'weight = "x"'), "number 1: weight = 'x'"),
        ("", MIXTURE.replace('train = "books"\n', ""), "number 1: train is missing"),
        ("", MIXTURE + 'pack = "stream"\n', 'pack = "stream" with format = "chat"'),
        (ONE + 'pack = "hole"\n', "", "pack = 'hole'"),
    ],
)
def test_what_does_not_go_together_is_told(
    tmp_path: Path, data: str, mixture: str, words: str
) -> None:
    assert words in problems(written(tmp_path, data, mixture))


@pytest.mark.parametrize("section", ["lora", "peft"])
def test_adapters_are_refused_by_name_with_what_works(tmp_path: Path, section: str) -> None:
    found = problems(written(tmp_path, ONE, more=f"[{section}]\nrank = 8\n"))
    assert "adapters are not trained" in found and "freeze" in found


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("[optimizer]\ndecay_steps = 2\n", "it is of wsd only"),
        ('[optimizer]\nschedule = "wsd"\nwarmup_steps = 2\ndecay_steps = 3\n', "2 steps after"),
    ],
)
def test_a_decay_that_does_not_fit_is_refused(tmp_path: Path, more: str, words: str) -> None:
    assert words in problems(written(tmp_path, ONE, more=more))
