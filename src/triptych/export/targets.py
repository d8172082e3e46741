"""The engines that a plan can be exported to, and the one function that does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from triptych.errors import PlanError, Problem, nearest
from triptych.export.deepspeed import export_deepspeed, impossible_in_deepspeed
from triptych.export.fsdp2 import export_fsdp2, impossible_in_fsdp2
from triptych.export.megatron import export_megatron, impossible_in_megatron
from triptych.export.target import Export, Subject
from triptych.export.torchtitan import export_torchtitan, impossible_in_torchtitan
from triptych.export.vllm import export_vllm, impossible_in_vllm


@dataclass(frozen=True, slots=True)
class Target:
    """An engine: what it cannot run at all, and how a plan is written for it."""

    title: str
    impossible: Callable[[Subject], Iterator[Problem]]
    write: Callable[[Subject], Export]


TARGETS = {
    "megatron": Target("Megatron-LM", impossible_in_megatron, export_megatron),
    "deepspeed": Target("DeepSpeed", impossible_in_deepspeed, export_deepspeed),
    "torchtitan": Target("torchtitan", impossible_in_torchtitan, export_torchtitan),
    "fsdp2": Target("accelerate with FSDP2", impossible_in_fsdp2, export_fsdp2),
    "vllm": Target("vLLM", impossible_in_vllm, export_vllm),
}


def require_target(name: str) -> None:
    """Raises PlanError, with the close names, if there is no such target."""
    if name not in TARGETS:
        close = nearest(name, TARGETS) or list(TARGETS)
        rule = "a plan is exported to one of " + ", ".join(TARGETS)
        raise PlanError(Problem(f"--export {name}", rule, " or ".join(close)))


def export(subject: Subject, name: str) -> Export:
    """A legal plan for another engine. Raises PlanError with every reason why it cannot be."""
    require_target(name)
    target = TARGETS[name]
    if not subject.plan.is_uniform:
        raise PlanError(
            Problem(
                f"{subject.plan.short()} cannot be exported to {target.title}",
                f"{target.title} has one set of degrees for all stages, in the order of the ranks",
                "a plan with one tp, dp, cp and ep, and no devices of its own",
            )
        )
    problems = list(target.impossible(subject))
    if problems:
        raise PlanError(problems)
    return target.write(subject)
