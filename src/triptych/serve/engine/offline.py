"""Offline generation under a plan: one prompt after the other, with a KV cache on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from triptych.errors import InputError, Problem
from triptych.model.model import Model
from triptych.plan.plan import Plan, Precision
from triptych.runtime.mesh import Mesh
from triptych.serve.engine.source import ModelSource
from triptych.serve.engine.stage import InferenceStage
from triptych.serve.engine.suitable import require_suitable
from triptych.serve.engine.text import TextStream

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The continuation of one prompt."""

    prompt: str
    text: str
    token_ids: tuple[int, ...]  # without the token that ended it
    finish: str  # "stop": the model ended the text; "length": the limit did


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen: greedily at temperature 0, else drawn with a seed."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        if self.max_new_tokens < 1:
            problems.append(Problem(f"max_new_tokens = {self.max_new_tokens}", works="from 1"))
        if not 0 <= self.temperature < float("inf"):
            works = "0 (greedy) or a positive number"
            problems.append(Problem(f"temperature = {self.temperature}", works=works))
        if problems:
            raise InputError(problems)


def generate(
    model_dir: Path,
    prompts: Sequence[str],
    plan: Plan | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    *,
    on_text: Callable[[int, str], None] | None = None,
    strict: bool = False,
) -> list[Generation]:
    """Continues each prompt; every rank of the plan calls this and returns the same.

    Args:
        model_dir: a Hugging Face directory, a checkpoint or a run folder.
        prompts: texts to continue.
        plan: tensor and pipeline degrees and the dtype; None: one process, dtype as stored.
        max_new_tokens: tokens per prompt at most.
        temperature: 0 takes the likeliest token; otherwise logits are divided by it.
        seed: of the draws.
        on_text: gets the number of a prompt and a piece of its text, as it becomes certain.
        strict: communicate under strict mode (tests).

    Raises:
        InputError: the model, the plan, the prompts or the settings do not work, all said at once
            for each of them.

    """
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    generator = Generator.open(model_dir, plan, strict=strict)
    for note in generator.source.notes:
        _log.warning("%s", note)
    encoded = generator.encode(prompts)
    return [
        generator.run(index, prompt, ids, sampling, on_text or _nobody_listens)
        for index, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True))
    ]


def _nobody_listens(_: int, __: str) -> None:
    return None


class Generator:
    """A loaded model that continues prompts, one at a time."""

    def __init__(
        self, source: ModelSource, model: Model, mesh: Mesh, stage: InferenceStage
    ) -> None:
        self.source = source
        self._model = model
        self._mesh = mesh
        self._stage = stage
        self._tokenizer = source.tokenizer()
        self._end_tokens = source.end_tokens()
        known = [i for i in self._tokenizer.get_vocab().values() if i < model.vocab]
        self._unknown_V = torch.ones(model.vocab, dtype=torch.bool, device=mesh.device)
        self._unknown_V[torch.tensor(known, device=mesh.device)] = False

    @classmethod
    def open(cls, model_dir: Path, plan: Plan | None = None, *, strict: bool = False) -> Generator:
        """Loads this rank's part of a model; collective over the ranks of the plan."""
        source = ModelSource.open(model_dir)
        model = source.model()
        plan = _inference_plan(plan, source, model)
        mesh = Mesh.create(plan, kv_heads=model.kv_heads, strict=strict)
        stage = InferenceStage(source.config, model, plan, mesh)
        source.load(stage.shards)
        return cls(source, model, mesh, stage)

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """Token ids of the prompts; raises InputError that lists every one that cannot be run."""
        encoded = [list(self._tokenizer.encode(prompt).ids) for prompt in prompts]
        problems = [
            Problem(f"prompt {index}: {problem}")
            for index, ids in enumerate(encoded)
            for problem in self._faults(ids)
        ]
        if problems:
            raise InputError(problems)
        return encoded

    def _faults(self, ids: Sequence[int]) -> Iterator[str]:
        if not ids:
            yield "is empty, there is nothing to continue"
        if len(ids) >= self._model.max_position:
            yield f"has {len(ids)} tokens, the model has {self._model.max_position} positions"
        if any(token_id >= self._model.vocab for token_id in ids):
            yield f"has token {max(ids)}, the model has {self._model.vocab} rows in its embedding"

    def run(
        self,
        index: int,
        prompt: str,
        ids: Sequence[int],
        sampling: Sampling,
        on_text: Callable[[int, str], None],
    ) -> Generation:
        """Continues one prompt. Collective over the ranks of the plan."""
        stream = TextStream(self._tokenizer, ids)
        new_ids: list[int] = []
        finish = "length"
        for token_id in self._tokens(index, ids, sampling):
            if token_id in self._end_tokens:
                finish = "stop"
                break
            new_ids.append(token_id)
            _say(on_text, index, stream.add(token_id))
        _say(on_text, index, stream.finish())
        return Generation(prompt=prompt, text=stream.text, token_ids=tuple(new_ids), finish=finish)

    def _tokens(self, index: int, ids: Sequence[int], sampling: Sampling) -> Iterator[int]:
        """Token after token, up to the limit and the model's positions; the same on all ranks."""
        draws = torch.Generator().manual_seed(sampling.seed * 1_000_003 + index)
        cache = self._stage.new_cache()
        fed_S = torch.tensor(ids, device=self._mesh.device)
        room = self._model.max_position - len(ids)
        for _ in range(min(sampling.max_new_tokens, room)):
            with torch.inference_mode():
                logits_V = self._stage.forward(fed_S, cache)
                fed_S = self._agreed(logits_V, sampling.temperature, draws)
            yield int(fed_S)

    def _agreed(
        self, logits_V: torch.Tensor | None, temperature: float, draws: torch.Generator
    ) -> torch.Tensor:
        """The next token [1]: one rank of the last stage chooses, all learn it by a sum."""
        chosen = torch.zeros(1, dtype=torch.int64, device=self._mesh.device)
        if logits_V is not None and self._mesh.tensor.index == 0:
            chosen += choose(logits_V.masked_fill(self._unknown_V, -torch.inf), temperature, draws)
        return self._mesh.world.all_reduce(chosen)


def choose(logits_V: torch.Tensor, temperature: float, draws: torch.Generator) -> int:
    """A token id: the likeliest at temperature 0, else drawn from softmax(logits / temperature)."""
    if temperature == 0:
        return int(logits_V.argmax())
    probabilities = torch.softmax(logits_V.double().cpu() / temperature, dim=0)
    return int(torch.multinomial(probabilities, 1, generator=draws))


def _say(on_text: Callable[[int, str], None], index: int, piece: str) -> None:
    if piece:
        on_text(index, piece)


def _inference_plan(plan: Plan | None, source: ModelSource, model: Model) -> Plan:
    """The plan as far as it matters without training; raises PlanError if it does not fit."""
    if plan is None:
        precision = Precision(parameter=source.dtype(), master=source.dtype())
        plan = Plan.uniform(model.num_layers, precision=precision)
    require_suitable(plan, model, dist.get_world_size() if dist.is_initialized() else 1)
    return plan.with_(zero=0, sequence_parallel=False, recompute="none", schedule="1f1b")
