"""`triptych verify`: is this layout numerically the same as one process?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from triptych.cli.answer import Answer, say
from triptych.cli.options import JsonOption, ModelArgument
from triptych.errors import ModelError, PlanError, Problem

if TYPE_CHECKING:
    from triptych.plan.plan import Plan
    from triptych.plan.workload import Workload
    from triptych.runtime.parity import Difference, Trace

TOLERANCES = {"fp64": 1e-10, "fp32": 1e-4, "bf16": 0.05}
"""Largest relative differences that the order of sums explains. In bf16, over fp32 master weights,
one rounding is 0.4 % and a gradient has passed dozens: fp64 tells a fault from rounding."""


def command(
    model: ModelArgument,
    plan: Annotated[
        str, typer.Option(metavar="PLAN", help="A plan file or 'tp=2,pp=2'.", show_default=False)
    ],
    seq: Annotated[int, typer.Option(min=1, help="Tokens a sequence.")] = 64,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences a step; default: 4 micro-batches a rank.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 3,
    precision: Annotated[str, typer.Option(help="fp64, fp32 or bf16.")] = "fp64",
    as_json: JsonOption = False,
) -> Answer:
    """Train a few steps under a plan and in one process; compare losses and every gradient.

    Weights and tokens are random. Both runs happen on this machine: choose a small model, or a
    config.json with few layers.
    """
    say("loading torch ...")
    from triptych.plan.workload import Workload

    chosen, config = _chosen(model, plan, precision)
    workload = Workload(
        sequence_length=seq, global_batch=batch or 4 * chosen.microbatch * chosen.dp
    )
    _require_runnable(chosen, config, workload)
    tolerance = TOLERANCES[precision]
    one, other = _traces(chosen, config, workload, steps)
    from triptych.runtime.parity import difference

    return _answer(chosen, workload, other, difference(one, other, tolerance), tolerance)


def _chosen(model: str, text: str, word: str) -> tuple[Plan, Mapping[str, Any]]:
    """The plan in the asked precision, and the config of the model."""
    from triptych.model.hf import from_config
    from triptych.plan.short import precision
    from triptych.plan.toml import load_plan

    if word not in TOLERANCES:
        raise PlanError(Problem(f"--precision {word}", works=" or ".join(TOLERANCES)))
    config = _config(model)
    plan = load_plan(text, from_config(config, model))
    return plan.with_(precision=precision(word)), config


def _config(model: str) -> Mapping[str, Any]:
    """The Hugging Face config behind MODEL; that of a catalogue row if it names one."""
    from triptych.model.catalogue import config_of, rows
    from triptych.model.load import load_model

    name = load_model(model).name  # says what is wrong with MODEL, if anything
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    if path.is_file():
        config: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return config
    if name not in rows():
        raise ModelError(Problem(f"no config.json for {model}", works="the path of a config.json"))
    return config_of(rows()[name])


def _require_runnable(plan: Plan, config: Mapping[str, Any], workload: Workload) -> None:
    from triptych.model.hf import from_config
    from triptych.plan.rules import unrunnable, verify

    shape = from_config(config, "the model")
    problems = verify(plan, shape, workload=workload)
    problems += [Problem(reason, "a plan runs today") for reason in unrunnable(plan, shape)]
    if problems:
        raise PlanError(problems)


def _traces(
    plan: Plan, config: Mapping[str, Any], workload: Workload, steps: int
) -> tuple[Trace, Trace]:
    from triptych.plan.plan import Plan
    from triptych.runtime.local import local_ranks
    from triptych.runtime.parity import trace

    say(f"{plan.world_size} ranks ...")
    work = partial(trace, plan, config, workload, steps=steps)
    if plan.world_size == 1:
        found = work()
    else:
        with local_ranks(plan.world_size, work, is_fresh=True):
            found = work()
    say("one process ...")
    alone = Plan.uniform(plan.num_layers, precision=plan.precision, microbatch=plan.microbatch)
    return trace(alone, config, workload, steps=steps), found


def _answer(
    plan: Plan, workload: Workload, trace: Trace, found: Difference, tolerance: float
) -> Answer:
    is_same = found.largest <= tolerance and not trace.replicas
    losses = ", ".join(f"{loss:.6f}" for loss in trace.losses)
    replicas = "\n            ".join(trace.replicas) or "bitwise equal"
    text = f"""{plan.short()}
{workload.global_batch} sequences of {workload.sequence_length} tokens a step, random weights
losses      {losses}; largest relative difference {found.loss:.1e}
norms       largest relative difference {found.norm:.1e}
gradients   {len(trace.gradients)} parameters; largest relative difference {found.gradient:.1e}
            (in {found.worst})
weights     after {len(trace.losses)} steps; largest relative difference {found.weight:.1e}
replicas    {replicas}
{"the same" if is_same else "NOT the same"} as one process, to {tolerance:g}"""
    if found.first is not None:
        text += f"\nfirst parameter that differs: {found.first}"
    document = {
        "plan": plan.short(),
        "same": is_same,
        "tolerance": tolerance,
        "losses": list(trace.losses),
        "relative_difference": {
            "loss": found.loss,
            "grad_norm": found.norm,
            "gradients": found.gradient,
            "weights": found.weight,
        },
        "worst_parameter": found.worst,
        "first_that_differs": found.first,
        "differing_replicas": list(trace.replicas),
    }
    return Answer(text=text, document=document, exit_code=0 if is_same else 1)
