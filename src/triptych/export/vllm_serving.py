"""A serving plan as `vllm serve` with its engine arguments."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from triptych.errors import PlanError, Problem
from triptych.export.target import Export, Note, commented
from triptych.export.vllm import DTYPES, heads_problem
from triptych.model.model import Model
from triptych.plan.serving import ServingPlan, ServingWorkload

CACHES = {"fp8": "fp8", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSubject:
    """What is exported: a serving plan, and the model and workload that it is for."""

    plan: ServingPlan
    model: Model
    workload: ServingWorkload
    source: str = ""  # MODEL as the user gave it


def export_serving(subject: ServingSubject, target: str) -> Export:
    """The command of another engine. Raises PlanError for an engine that does not serve, and with
    every reason why the plan cannot be.
    """
    if target != "vllm":
        rule = "a serving plan is exported to vllm"
        raise PlanError(Problem(f"--export {target} with --task serve", rule, "--export vllm"))
    if problems := list(_impossible(subject)):
        raise PlanError(problems)
    plan, notes = subject.plan, tuple(_notes(subject))
    lines = " \\\n    ".join(shlex.join(words) for words in _words(subject))
    if not plan.is_even:
        lines = f"VLLM_PP_LAYER_PARTITION={','.join(map(str, plan.layers))} {lines}"
    heading = f"# Plan {plan.short()}\n# of {subject.model.name}\n"
    return Export(target="vllm", text=heading + commented(notes) + lines + "\n", notes=notes)


def _impossible(subject: ServingSubject) -> Iterator[Problem]:
    plan = subject.plan
    yield from heads_problem(subject.model, plan.tensor)
    if plan.cache not in (*CACHES, plan.weights):
        what, rule = f"cache={plan.cache}", "vLLM keeps keys and values as the weights or in fp8"
        yield Problem(what, rule, f"cache={plan.weights} or cache=fp8")


def _words(subject: ServingSubject) -> Iterator[tuple[str, ...]]:
    plan, workload = subject.plan, subject.workload
    longest = min(subject.model.max_position, int(workload.tokens) + 1)
    yield "vllm", "serve", subject.source or subject.model.name
    yield "--tensor-parallel-size", str(plan.tensor)
    yield "--pipeline-parallel-size", str(plan.pp)
    yield "--data-parallel-size", str(plan.replicas)
    yield "--max-num-seqs", str(plan.batch)
    yield "--max-num-batched-tokens", str(plan.chunk)
    yield ("--enable-chunked-prefill",)
    yield "--max-model-len", str(max(longest, 1))
    yield "--dtype", DTYPES[plan.weights]
    if plan.weights == "fp8":
        yield "--quantization", "fp8"
    if plan.cache != plan.weights or plan.cache == "fp8":
        yield "--kv-cache-dtype", CACHES[plan.cache]


def _notes(subject: ServingSubject) -> Iterator[Note]:
    workload = subject.workload
    for name, value in (("slo-ttft", workload.ttft_s), ("slo-tpot", workload.tpot_s)):
        if value is not None:
            why = "vLLM has no objective to keep: the plan was chosen for it"
            yield Note(field=name, value=f"{value:g} s", why=why)
