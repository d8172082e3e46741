"""A job made ready: nothing written before all is valid, everything a rank needs written after."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from job_samples import JOB, write_job

from triptych.errors import DataError, InputError, JobError, ModelError
from triptych.plan.toml import read_plan
from triptych.train import prepare
from triptych.train.environment import Place
from triptych.train.job_file import read_job
from triptych.train.planning import Found
from triptych.train.text import read_data

PLACE = Place(
    rank=0,
    world_size=2,
    local_rank=0,
    local_world_size=2,
    address="x",
    port=1,
    launcher="torchrun",
)  # a launched rank starts no fork server


class Prices:
    """A planner that only prices."""

    def search(self, *_: object) -> Found:
        raise AssertionError("the job names its plan")

    def price(self, *_: object) -> Mapping[str, Any]:
        return {"step_time_s": 1.0}


def draft(path: Path, *overrides: str) -> prepare.Draft:
    job = read_job(path, ["parallel.plan=dp=2", *overrides])
    return prepare.draft(job, PLACE, Prices(), lambda _: None)


@pytest.fixture
def job_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return write_job(tmp_path)


def test_the_run_folder_has_what_ranks_and_report_read(job_path: Path, tmp_path: Path) -> None:
    made = draft(job_path)
    run = prepare.write_run(made)
    assert run.path == tmp_path / "run"
    assert read_job(run.job) == made.job
    assert read_plan(run.plan) == made.choice.plan
    data, tokenizer = read_data(run)
    assert data == made.data and tokenizer == tmp_path / "tokenizer"
    assert json.loads((run.path / "prediction.json").read_text())["step_time_s"] == 1.0
    assert not (run.path / "search.json").exists()


def test_an_inline_config_is_completed_by_tokenizer_and_job(job_path: Path) -> None:
    config = draft(job_path).source.config
    assert config["vocab_size"] == 290
    assert config["eos_token_id"] == 0
    assert config["max_position_embeddings"] == 16


@pytest.mark.parametrize(
    ("override", "kind", "words"),
    [
        ("tokenizer.path=nowhere", DataError, "no tokenizer at"),
        ("data.train=nowhere/*.txt", DataError, "no file matches"),
        ("data.eval=nowhere.txt", DataError, "no file or directory"),
        ("model.config.vocab_size=280", JobError, "290 tokens, the model has 280"),
        ('model.config.model_type="mamba"', ModelError, "mamba"),
        ("train.global_batch=7", InputError, "global batch 7"),
        ("train.global_batch=100000", DataError, "the global batch is 100000"),
    ],
)
def test_bad_input_is_refused_with_nothing_written(
    job_path: Path, tmp_path: Path, override: str, kind: type[Exception], words: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(kind, match=words):
        draft(job_path, override)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("content", ["", "x", "alpha beta gamma"])
def test_a_data_set_smaller_than_a_batch_is_refused_with_counts(
    job_path: Path, tmp_path: Path, content: str
) -> None:
    """User case pub_063."""
    (tmp_path / "small.txt").write_text(content)
    with pytest.raises(DataError, match=r"tokens: \d samples of 16 tokens"):
        draft(job_path, f"data.train={tmp_path / 'small.txt'}")


def test_files_named_for_evaluation_are_kept_out_of_training(
    job_path: Path, tmp_path: Path
) -> None:
    (whole,) = draft(job_path).data.train
    split = draft(job_path, f"data.eval={tmp_path / 'text' / 'document-0[0-3].txt'}").data
    assert split.eval is not None
    held_out, (rest,) = split.eval.counts, split.train
    assert (held_out.documents, rest.counts.documents) == (4, 8)
    assert held_out.tokens + rest.counts.tokens == whole.counts.tokens


def test_no_text_left_for_training_is_refused(job_path: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file is left for training"):
        draft(job_path, f"data.eval={tmp_path / 'text'}")


def test_a_model_without_a_tokenizer_of_its_own_needs_one(tmp_path: Path) -> None:
    path = write_job(tmp_path, JOB.replace('path = "{folder}/tokenizer"', ""))
    with pytest.raises(JobError, match="tokenizer"):
        draft(path)


def test_a_model_directory_has_config_and_tokenizer(job_path: Path, tmp_path: Path) -> None:
    config = dict(draft(job_path).source.config)
    (tmp_path / "tokenizer" / "config.json").write_text(json.dumps(config))
    text = job_path.read_text()
    start, stop = text.index("[model.config]"), text.index("[data]")
    job_path.write_text(text[:start] + f'[model]\npath = "{tmp_path}/tokenizer"\n' + text[stop:])
    source = draft(job_path).source
    assert source.config == config and source.directory == tmp_path / "tokenizer"
    with pytest.raises(JobError, match="safetensors"):
        draft(job_path, "model.init=weights")


def test_a_model_that_is_not_there_is_refused(job_path: Path, tmp_path: Path) -> None:
    text = job_path.read_text()
    start, stop = text.index("[model.config]"), text.index("[tokenizer]")
    job_path.write_text(text[:start] + '[model]\npath = "nowhere"\n' + text[stop:])
    with pytest.raises(ModelError, match="no model at nowhere"):
        draft(job_path)
