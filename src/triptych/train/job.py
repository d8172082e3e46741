"""The job file: what to train, on what, how long, split how. One class per TOML section.

Types are strict: `steps = 1e3` is an error, not 1000. `job_file.py` reads files and words the
messages; `job_reference.py` prints these descriptions as documentation.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from triptych.errors import Problem


class Contradiction(ValueError):
    """Keys of one section that do not go together; reaches the user as a Problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.what)
        self.problem = problem


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Texts = Annotated[
    tuple[str, ...], BeforeValidator(_as_list), Field(strict=False)
]  # TOML arrays are lists; a single text is a list of one
Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
AtLeastZero = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A section of the job file: no unknown keys, no conversion of types, never changed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Run(Section):
    """Where the run lives."""

    folder: str | None = Field(
        default=None,
        description="Run folder: plan, metrics, errors. Default: `runs/NAME-OF-JOB-FILE`.",
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
        description="Start from random weights, or from the weights beside `path`.",
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


class DataFormat(Section):
    """How the rows of a data set are read."""

    format: Literal["text", "chat"] = Field(
        default="text",
        description="`text`: documents, every token of which is trained. `chat`: dialogues, which "
        "become text by the tokenizer's own template and of which the answers are trained, each "
        "with the token that ends it.",
    )
    text_key: str = Field(
        default="text", description="The key of a document in a row of JSON lines or Parquet."
    )
    messages_key: str = Field(
        default="messages",
        description="The key of a dialogue in a row: a list of messages with `role` and `content`.",
    )
    pack: Literal["stream", "documents", "whole", "single"] | None = Field(
        default=None,
        description="`stream`: sequences are cut from one stream of text, documents see those "
        "before them in the sequence. `documents`: cut from one stream and kept apart: attention "
        "and positions start anew in each, and none predicts the first token of the next. `whole`: "
        "a sequence holds whole documents, kept apart; one longer than a sequence is truncated. "
        "`single`: as `whole`, with one document in a sequence. Default: `stream` for text, "
        "`whole` for chat.",
    )

    @property
    def packing(self) -> str:
        """How documents share sequences."""
        return self.pack or ("whole" if self.format == "chat" else "stream")

    @model_validator(mode="after")
    def _whole_dialogues(self) -> DataFormat:
        if self.format == "chat" and self.pack in ("stream", "documents"):
            what = f'[data] pack = "{self.pack}" with format = "chat"'
            raise Contradiction(Problem(what, "dialogues are not cut", 'pack = "whole"'))
        return self


class Source(DataFormat):
    """One data set of a mixture: an entry of `[[data.mixture]]`."""

    train: Texts = Field(
        min_length=1,
        description="Its files, as in `[data] train`.",
        examples=['["text/**/*.txt"]'],
    )
    weight: Positive = Field(
        default=1.0,
        description="Its share of the sequences is its weight over the sum of all weights, exactly "
        "so in every 1000 sequences; a data set that is used up starts again.",
    )


class Data(DataFormat):
    """The text."""

    train: Texts = Field(
        default=(),
        description="Files, directories or globs (`**` included): text, one document a file; "
        "`.jsonl` and `.parquet`, one document or dialogue a row; folders that "
        "`datasets.Dataset.save_to_disk` wrote. Required, unless there is a mixture.",
        examples=['["text/**/*.txt"]'],
    )
    mixture: tuple[Source, ...] = Field(
        default=(),
        strict=False,
        description="Several data sets with weights, instead of `train`: `[[data.mixture]]` with "
        "`train` and `weight`, and of this section `format`, `text_key`, `messages_key` and "
        "`pack`.",
        examples=['[{train = "books", weight = 3}, {train = "web", weight = 1}]'],
    )
    eval: Texts = Field(
        default=(),
        description="The same as `train`, for evaluation; files named here are kept out of "
        "training.",
    )
    exclude: Texts = Field(default=(), description="Globs of files to leave out of all.")
    sequence_length: Count = Field(description="Tokens in one training sequence.", examples=["512"])
    cache: str | None = Field(
        default=None, description="Folder of the token cache. Default: `tokens` in the run folder."
    )

    @property
    def sources(self) -> tuple[Source, ...]:
        """The data sets of the mixture; that of `train` alone without one."""
        if self.mixture:
            return self.mixture
        names = ("format", "text_key", "messages_key", "pack", "train")
        return (Source(**{name: getattr(self, name) for name in names}),)

    @model_validator(mode="after")
    def _one_or_a_mixture(self) -> Data:
        rule = "training data is either `train` or a mixture"
        works = 'train = ["text/**/*.txt"]'
        if not self.train and not self.mixture:
            raise Contradiction(Problem("[data] train is missing", rule, works))
        if self.train and self.mixture:
            raise Contradiction(Problem("[data] has both train and mixture", rule, works))
        total = sum(source.weight for source in self.mixture)
        small = [s.weight for s in self.mixture if s.weight < total / 1000]
        if small:
            what = f"[[data.mixture]] weight = {small[0]} of {total} in all"
            least = f"weight = {total / 1000:g} or more"
            raise Contradiction(Problem(what, "a weight is a thousandth of their sum", least))
        return self


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
    schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="The way down from the highest rate to the lowest."
    )
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = Field(
        default=(0.9, 0.95), description="Decay of AdamW's two moments."
    )
    momentum: Fraction = Field(default=0.95, description="Decay of Muon's momentum.")
    eps: Positive = Field(default=1e-8, description="Added to the root of the second moment.")
    weight_decay: AtLeastZero = Field(default=0.1, description="Decoupled weight decay.")
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
    resume: Literal["auto", "never"] = Field(
        default="auto",
        description="`auto`: go on from the newest complete checkpoint if there is one. "
        "`never`: refuse a folder that holds one.",
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
    def _warm_up_ends(self) -> Job:
        warmup, steps = self.optimizer.warmup_steps, self.train.steps
        if warmup > steps:
            what = f"[optimizer] warmup_steps = {warmup} > [train] steps = {steps}"
            works = f"warmup_steps = {max(1, steps // 10)}"
            raise Contradiction(Problem(what, "warm-up ends within the run", works))
        return self
