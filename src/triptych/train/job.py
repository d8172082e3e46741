"""The job file: what to train, on what, how long, split how. One class per TOML section.

Types are strict: `steps = 1e3` is an error, not 1000. `job_file.py` reads files and words the
messages; `job_reference.py` prints these descriptions as documentation.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from triptych.errors import Problem
from triptych.train.job_data import Data
from triptych.train.section import (
    AtLeastZero,
    Contradiction,
    Count,
    Fraction,
    Positive,
    Section,
    Texts,
    Whole,
)


class Run(Section):
    """Where the run lives."""

    folder: str | None = Field(
        default=None,
        description="Run folder: plan, metrics, errors. Default: `runs/NAME-OF-JOB-FILE`.",
    )
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        default=(),
        strict=False,
        description="Programs that get every metric besides `metrics.jsonl`: `tensorboard` (event "
        "files in the run folder's `tensorboard`), `wandb` (which its own environment variables "
        "set up). Their packages must be installed.",
        examples=['["tensorboard"]'],
    )
    trace_steps: tuple[Count, ...] = Field(
        default=(),
        strict=False,
        description="Steps whose spans on all ranks go into `trace.json` in the run folder, for "
        "ui.perfetto.dev.",
        examples=["[10, 11]"],
    )
    peak_tflops: Positive | None = Field(
        default=None,
        description="What a device computes at most, in TFLOP/s, dense, in the dtype of the run: "
        "what utilisation is measured against. Default: the catalogue's figure for a known GPU, "
        "the measured one for a CPU, else utilisation is unknown.",
    )


class ModelSection(Section):
    """What is trained: `path`, or `config` for a new model."""

    path: str | None = Field(
        default=None, description="A Hugging Face model directory, or a `config.json`."
    )
    config: dict[str, Any] | None = Field(
        default=None,
        description="Keys of a Hugging Face config, `model_type` among them, instead of `path`. "
        "`vocab_size` and the special token ids may be left to the tokenizer.",
        examples=['{model_type = "llama", hidden_size = 256}'],
    )
    init: Literal["random", "weights"] = Field(
        default="random",
        description="Start from random weights, or from the weights beside `path`, which may be "
        "a checkpoint of another run.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        works = '[model] path = "my-model" or [model.config] model_type = "llama", ...'
        if (self.path is None) == (self.config is None):
            given = "neither" if self.path is None else "both"
            what = f"[model] has {given} of path and config"
            raise Contradiction(Problem(what, "exactly one says what the model is", works))
        if self.config is not None and "model_type" not in self.config:
            what = "[model.config] has no model_type"
            raise Contradiction(Problem(what, "it names the architecture", 'model_type = "llama"'))
        if self.config is not None and self.init == "weights":
            rule = "weights come from a model directory"
            raise Contradiction(Problem('[model] init = "weights" with config', rule, works))
        return self


class TokenizerSection(Section):
    """How text becomes tokens."""

    path: str | None = Field(
        default=None,
        description="A directory with `tokenizer.json`. Default: the model directory.",
    )


class Train(Section):
    """How long, and in what portions."""

    steps: Count = Field(description="Optimizer steps in all.", examples=["1000"])
    global_batch: Count = Field(
        description="Sequences in one optimizer step, over all ranks. "
        "global_batch = microbatch x DP x accumulation.",
        examples=["32"],
    )
    microbatch: Count | None = Field(
        default=None, description="Sequences that a rank computes at a time. Default: the plan's."
    )
    accumulation: Count | None = Field(
        default=None,
        description="Micro-batches of each rank in one step. Default: what the rest leaves.",
    )
    seed: Whole = Field(default=0, description="Of the random weights and of the order of samples.")
    eval_every: Whole = Field(
        default=0, description="Steps between evaluations; 0: only at both ends."
    )
    eval_batches: Whole = Field(
        default=0, description="Global batches in one evaluation; 0: all of the evaluation text."
    )
    sample_prompts: Texts = Field(
        default=(),
        description="Texts that the model continues, greedily, when it evaluates: shown, and kept "
        "in `samples.jsonl` in the run folder.",
        examples=['["Once upon a time"]'],
    )
    sample_tokens: Count = Field(default=32, description="Tokens of each continuation.")
    freeze: list[str] = Field(
        default=[],
        description="Parameters that do not train: names, beginnings of names, or globs. They are "
        "saved and exported like all others.",
        examples=['["embed_tokens", "layers.0"]'],
    )
    check_replicas_every: Whole = Field(
        default=0,
        description="Steps between checks that ranks which hold the same parameters hold the same "
        "bits; 0: never. A difference ends the run before anything is saved.",
    )
    non_finite: Literal["stop", "skip"] = Field(
        default="stop",
        description="What happens when gradients are not finite; they are never applied. `skip`: "
        "training goes on with the next batch.",
    )
    max_skipped: Whole = Field(
        default=10,
        description="Steps in a row that may be skipped under `skip` before the run stops.",
    )
    log_every: Whole = Field(
        default=0,
        description="Steps between printed lines where there is no progress bar; 0: about 20 "
        "lines in all.",
    )


class Optimizer(Section):
    """The optimizer and its learning rate."""

    name: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="`muon`: the matrices of the layers have Muon, whose updates are scaled to the "
        "size of AdamW's; embedding, head, norms and biases have AdamW. Needs `tp=1` and `zero` 0 "
        "or 1: a rank updates whole matrices.",
    )
    learning_rate: Positive = Field(default=3e-4, description="The highest rate, after warm-up.")
    min_learning_rate: AtLeastZero = Field(default=0.0, description="The rate at the last step.")
    warmup_steps: Whole = Field(default=0, description="Steps of linear warm-up.")
    schedule: Literal["cosine", "linear", "wsd", "constant"] = Field(
        default="cosine",
        description="The way down from the highest rate to the lowest. `wsd` (warm-up, stable, "
        "decay) stays at the highest until the last `decay_steps`.",
    )
    decay_steps: Count | None = Field(
        default=None,
        description="Steps of the decay of `wsd`. Default: a fifth of all steps.",
        examples=["100"],
    )
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = Field(
        default=(0.9, 0.95), description="Decay of AdamW's two moments."
    )
    momentum: Fraction = Field(default=0.95, description="Decay of Muon's momentum.")
    eps: Positive = Field(default=1e-8, description="Added to the root of the second moment.")
    weight_decay: AtLeastZero = Field(
        default=0.1, description="Decoupled weight decay. Norms and biases have none."
    )
    no_decay: Texts = Field(
        default=(),
        description="More parameters without weight decay: names, beginnings of names, or globs.",
        examples=['["embed_tokens", "lm_head"]'],
    )
    clip_norm: AtLeastZero = Field(
        default=1.0, description="Largest norm of the whole gradient; 0: no clipping."
    )

    @model_validator(mode="after")
    def _ordered(self) -> Optimizer:
        if self.min_learning_rate > self.learning_rate:
            what = (
                f"[optimizer] min_learning_rate = {self.min_learning_rate} "
                f"> learning_rate = {self.learning_rate}"
            )
            works = f"min_learning_rate = {self.learning_rate / 10:g}"
            raise Contradiction(
                Problem(what, "the rate falls from the highest to the least", works)
            )
        return self


class Moe(Section):
    """Routers of a mixture of experts."""

    aux_loss: AtLeastZero | None = Field(
        default=None,
        description="Coefficient of the load-balancing loss, which is 1 a layer if tokens spread "
        "evenly over experts. Default: `router_aux_loss_coef` of the model's config if that sets "
        "`output_router_logits`, else 0.",
        examples=["0.01"],
    )
    z_loss: AtLeastZero = Field(
        default=0.0,
        description="Coefficient of the mean squared log-sum-exp of the router's logits.",
    )
    capacity_factor: Positive | None = Field(
        default=None,
        description="An expert takes at most this times its even share of a sequence's tokens, the "
        "first ones; the others pass it by and are counted in `metrics.jsonl` as `dropped_tokens`. "
        "Default: none are dropped.",
    )


class Checkpoint(Section):
    """When to save, and where to go on."""

    folder: str | None = Field(
        default=None,
        description="Folder of the checkpoints. Default: `checkpoints` in the run folder.",
    )
    every: Whole = Field(
        default=0, description="Steps between checkpoints; 0: only after the last step."
    )
    keep_last: Count = Field(default=2, description="Checkpoints of this run to keep.")
    keep_best: bool = Field(
        default=False,
        description="Keep besides the one with the lowest evaluation loss, of those saved where "
        "there was an evaluation.",
    )
    asynchronous: bool = Field(
        default=True,
        description="Write checkpoints beside the training, from a copy in host memory. The last "
        "one is written before the run ends either way.",
    )
    retries: Whole = Field(
        default=2, description="How often a failed write is tried again, after 1 s, 2 s, 4 s, ..."
    )
    failures: Whole = Field(
        default=1,
        description="Saves in a row that may fail, retries included, before the run stops. The "
        "last one may not.",
    )
    grace_s: Positive = Field(
        default=30.0,
        description="Seconds after SIGTERM or SIGUSR1 in which a run finishes its step, saves and "
        "ends with exit code 75.",
    )
    resume: Literal["auto", "weights", "never"] = Field(
        default="auto",
        description="`auto`: go on from the newest complete checkpoint if there is one. "
        "`weights`: likewise, but with its weights and its place in the data and the schedule "
        "only; the optimizer starts anew, and its files may be gone. `never`: refuse a folder that "
        "holds one.",
    )


class Parallel(Section):
    """How the work is split over ranks."""

    plan: str = Field(
        default="auto",
        description="`auto`: search for the fastest. Or a plan file, or a short form.",
        examples=['"tp=2,pp=2"'],
    )
    ranks: Count | None = Field(
        default=None, description="Processes. Default: the plan's, the launch's or one per device."
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto",
        description="Dtype of compute; master weights and moments are fp32. `auto`: what the plan "
        "says, else bf16 on GPUs and fp32 on CPUs.",
    )
    fix: dict[str, str | int] = Field(
        default={}, description="Settings that the search must keep.", examples=["{tp = 2}"]
    )
    timeout_s: Positive = Field(
        default=600.0, description="Seconds that a rank waits for the others before it gives up."
    )
    restarts: Whole = Field(
        default=0,
        description="How often ranks that failed are started again from the newest checkpoint. "
        "Under torchrun its `--max-restarts` counts instead.",
    )


class Job(Section):
    """A whole job file."""

    run: Run = Run()
    model: ModelSection
    tokenizer: TokenizerSection = TokenizerSection()
    data: Data
    train: Train
    optimizer: Optimizer = Optimizer()
    moe: Moe = Moe()
    checkpoint: Checkpoint = Checkpoint()
    parallel: Parallel = Parallel()

    @model_validator(mode="after")
    def _decay_fits(self) -> Job:
        decay, schedule = self.optimizer.decay_steps, self.optimizer.schedule
        most = self.train.steps - self.optimizer.warmup_steps
        if decay is not None and schedule != "wsd":
            what = f'[optimizer] decay_steps = {decay} with schedule = "{schedule}"'
            raise Contradiction(Problem(what, "it is of wsd only", 'schedule = "wsd"'))
        if decay is not None and decay > most:
            what = f"[optimizer] decay_steps = {decay} > {most} steps after warm-up"
            works = f"decay_steps = {max(1, self.train.steps // 5)}"
            raise Contradiction(Problem(what, "the decay is within the run", works))
        return self

    @model_validator(mode="after")
    def _warm_up_ends(self) -> Job:
        warmup, steps = self.optimizer.warmup_steps, self.train.steps
        if warmup > steps:
            what = f"[optimizer] warmup_steps = {warmup} > [train] steps = {steps}"
            works = f"warmup_steps = {max(1, steps // 10)}"
            raise Contradiction(Problem(what, "warm-up ends within the run", works))
        return self
