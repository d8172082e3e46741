"""From a job to the parts of a run: settings of the engine, the rate, the data of a rank."""

from __future__ import annotations

from pathlib import Path

from triptych.model.model import Model
from triptych.plan.freeze import known_names, matching_names
from triptych.plan.share import Share
from triptych.runtime.engine import OptimizerSettings, RouterSettings
from triptych.tokenizer.load import load_tokenizer
from triptych.train.data import EvaluationData, Rows, TrainingData
from triptych.train.job import Job
from triptych.train.learning_rate import LearningRate
from triptych.train.text import DataSet, Part, source_seed


def optimizer_settings(job: Job, model: Model) -> OptimizerSettings:
    """The engine's optimizer settings of a job."""
    no_decay = matching_names("no_decay", job.optimizer.no_decay, known_names(model), model)
    return OptimizerSettings(
        name=job.optimizer.name,
        momentum=job.optimizer.momentum,
        betas=job.optimizer.betas,
        eps=job.optimizer.eps,
        weight_decay=job.optimizer.weight_decay,
        no_decay=no_decay,
        clip_norm=job.optimizer.clip_norm,
    )


def router_settings(job: Job) -> RouterSettings:
    """The settings of a job's routers."""
    return RouterSettings(
        aux_loss=job.moe.aux_loss,
        z_loss=job.moe.z_loss,
        capacity_factor=job.moe.capacity_factor,
    )


def learning_rate(job: Job) -> LearningRate:
    """The learning-rate schedule of a job."""
    return LearningRate(
        peak=job.optimizer.learning_rate,
        minimum=job.optimizer.min_learning_rate,
        warmup_steps=job.optimizer.warmup_steps,
        total_steps=job.train.steps,
        schedule=job.optimizer.schedule,
        decay_steps=job.optimizer.decay_steps or max(1, job.train.steps // 5),
    )


def training_data(
    job: Job, data: DataSet, share: Share, tokenizer: Path | None = None, *, ahead: bool = False
) -> TrainingData:
    """The training data of one data rank.

    Files that become tokens one by one need the folder of the `tokenizer`; one rank of all makes
    the next one `ahead`.
    """
    length = job.data.sequence_length

    def rows(index: int, part: Part) -> Rows:
        if not part.shards:
            return part.samples(length)
        assert tokenizer is not None
        seed = source_seed(job.train.seed, index)
        return part.stream(load_tokenizer(tokenizer), length, seed, ahead=ahead)

    return TrainingData(
        [rows(index, part) for index, part in enumerate(data.train)],
        weights=data.weights,
        global_batch=job.train.global_batch,
        share=share,
        seed=job.train.seed,
    )


def evaluation_data(job: Job, data: DataSet, share: Share) -> EvaluationData | None:
    """The evaluation data of one data rank, if the job has any."""
    if data.eval is None:
        return None
    return EvaluationData(
        data.eval.samples(job.data.sequence_length),
        global_batch=job.train.global_batch,
        share=share,
        num_batches=job.train.eval_batches,
    )
