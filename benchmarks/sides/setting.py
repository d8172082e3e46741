"""What both sides of a pair share: the model, its first weights, the batches, the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import transformers

from triptych.model.hf import from_config
from triptych.plan.families import family_of
from triptych.runtime.build.weights import initial_part
from triptych.runtime.comm import Communicator, Counters
from triptych.runtime.engine import MicroBatch, OptimizerSettings
from triptych.runtime.tensor.linear import Sink
from triptych.runtime.tensor.loss import Vocabulary, cross_entropy

Trainer = Callable[[int], float]
"""Does the training step of an index; the mean loss of its global batch."""

OPTIMIZER = OptimizerSettings(weight_decay=0.0)
LEARNING_RATE = 1e-4

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
"""10.1 million parameters."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model and a global batch of `sequences` on `ranks`."""

    ranks: int
    sequences: int
    microbatch: int
    length: int = 256
    config: dict[str, Any] = field(default_factory=lambda: CONFIG)

    @property
    def layers(self) -> int:
        """Decoder layers of the whole model."""
        return int(self.config["num_hidden_layers"])

    @property
    def tokens(self) -> int:
        """Trained tokens of the global batch."""
        return self.sequences * self.length

    def batch(self, step: int) -> MicroBatch:
        """The global batch of a step."""
        generator = torch.Generator().manual_seed(step)
        shape = (self.sequences, self.length + 1)
        ids = torch.randint(self.config["vocab_size"], shape, generator=generator)
        return MicroBatch(ids[:, :-1], ids[:, 1:])

    def share(self, step: int, parts: int, index: int) -> list[MicroBatch]:
        """The micro-batches of one of `parts` replicas."""
        whole, size = self.batch(step), self.sequences // parts
        rows = slice(index * size, (index + 1) * size)
        ids, labels = (x[rows].split(self.microbatch) for x in (whole.input_ids, whole.labels))
        return [MicroBatch(*part) for part in zip(ids, labels, strict=True)]

    def library_model(self) -> Any:
        """The library's module with our attention function and our first weights."""
        settings = {key: value for key, value in self.config.items() if key != "model_type"}
        config = transformers.LlamaConfig(**settings)
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="triptych")
        described = from_config(self.config, name="model")
        family = family_of(described.family)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                logical, shape = family.logical_name(name), tuple(parameter.shape)
                box = tuple((0, size) for size in shape)
                parameter.copy_(
                    initial_part(logical, shape, box, seed=0, std=config.initializer_range)
                )
        return model

    def loss(
        self,
        hidden: torch.Tensor,
        head: torch.Tensor,
        labels: torch.Tensor,
        scale: float,
        sink: Sink | None = None,
    ) -> torch.Tensor:
        """scale x the summed cross-entropy, by our chunked function."""
        alone = Communicator("tensor", (0,), 0, None, Counters())
        vocabulary = Vocabulary(0, self.config["vocab_size"], alone)
        rows = hidden.flatten(0, 1)
        return cross_entropy(rows, head, labels.flatten(), vocabulary, scale, sink)


class WithLoss(torch.nn.Module):
    """The library's model and the loss as one module, so that wrappers see one forward."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.setting, self.model = setting, setting.library_model()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, scale: float) -> torch.Tensor:
        """scale x the summed loss of a micro-batch."""
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        return self.setting.loss(hidden, self.model.lm_head.weight, labels, scale)


def compile_each(layers: Iterable[Any]) -> None:
    """Compiles each decoder layer for itself, as torchtitan does; all share one graph."""
    for layer in layers:
        layer.compile(fullgraph=True)


def make_adamw(parameters: Iterator[Any], kind: Any = torch.optim.AdamW) -> Any:
    """Fused AdamW with the settings of both sides."""
    return kind(
        parameters,
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
        fused=True,
        lr=LEARNING_RATE,
    )


def clip(parameters: list[Any], over_ranks: bool = False) -> None:
    """Global-norm clipping; `over_ranks` when each rank has other parameters."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm: Any = torch.nn.utils.get_total_norm(gradients, foreach=True)
    if hasattr(norm, "full_tensor"):
        norm = norm.full_tensor()
    if over_ranks:
        squared = norm.square()
        dist.all_reduce(squared)
        norm = squared.sqrt()
    torch.nn.utils.clip_grads_with_norm_(parameters, OPTIMIZER.clip_norm, norm, foreach=True)


def accumulate(
    parts: Callable[[int], list[MicroBatch]],
    loss: Callable[[MicroBatch], torch.Tensor],
    parameters: list[Any],
    optimizer: Any,
    around: Callable[[bool], AbstractContextManager[Any]] = lambda is_last: nullcontext(),
    divisor: int = 1,
) -> Trainer:
    """The loop of a peer's documentation: accumulation, clipping, update.

    `around(is_last)` is the context of a micro-batch. With a `divisor` the losses of the ranks
    are parts, which add up to that many times the mean.
    """

    def step(index: int) -> float:
        batches = parts(index)
        total = torch.zeros(())
        for number, part in enumerate(batches):
            with around(number == len(batches) - 1):
                value = loss(part)
                value.backward()
            total += value.detach()
        clip(parameters)
        optimizer.step()
        optimizer.zero_grad()
        if divisor > 1:
            dist.all_reduce(total)
        return float(total) / divisor

    return step
