"""`triptych generate`: complete a text with a model directory, in one process or under a plan."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.cli.answer import Answer, say
from triptych.cli.options import JsonOption

if TYPE_CHECKING:
    from triptych.plan.plan import Plan
    from triptych.serve.engine.source import ModelSource


def command(
    folder: Annotated[
        Path, typer.Argument(metavar="MODEL_DIR", help="An HF directory, a checkpoint or a run.")
    ],
    prompt: Annotated[list[str], typer.Option(help="Text to continue; may be repeated.")],
    plan: Annotated[
        str | None, typer.Option(metavar="PLAN", help="A plan file or 'tp=2,pp=2'; default: none.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens a prompt, at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0: the likeliest token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Of the k likeliest only.")] = None,
    top_p: Annotated[float, typer.Option(help="Of the likeliest with this probability.")] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(help="A text that ends the answer; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    as_json: JsonOption = False,
) -> Answer:
    """Complete texts with the model in MODEL_DIR; the ranks of a plan start on this machine."""
    if plan:
        require_suitable_plan(folder, plan)
    say("loading torch ...")
    from triptych.serve.engine.offline import Wanted, generate
    from triptych.serve.engine.sampling import Sampling
    from triptych.serve.engine.source import ModelSource

    source = ModelSource.open(folder)
    for note in source.notes:
        say(note)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    found = generate(
        source.folder,
        prompt,
        plan_of(plan, source) if plan else None,
        Wanted(max_new_tokens=max_new_tokens, sampling=sampling, stop=tuple(stop or ())),
        on_text=None if as_json else _printer(prompt),
        is_fresh=True,
    )
    if not as_json:
        print(flush=True)
    return Answer(document={"generations": [asdict(generation) for generation in found]})


def require_suitable_plan(folder: Path, text: str) -> None:
    """Raises PlanError before torch loads if the config of the model rules the plan out."""
    from triptych.model.load import CONFIG, load_model
    from triptych.plan.toml import load_plan
    from triptych.serve.engine.suitable import require_suitable

    if (folder / CONFIG).is_file():
        model = load_model(str(folder))
        plan = load_plan(text, model)
        require_suitable(plan, model, plan.world_size)


def plan_of(text: str, source: ModelSource) -> Plan:
    """The plan that a text says; its dtype is that of the stored weights unless it says one."""
    from triptych.plan.plan import Precision
    from triptych.plan.short import read_words
    from triptych.plan.toml import is_plan_file, load_plan

    plan = load_plan(text, source.model())
    if is_plan_file(text) or "precision" in read_words(text):
        return plan
    stored = source.dtype()
    return plan.with_(precision=Precision(parameter=stored, master=stored))


def _printer(prompts: Sequence[str]) -> Callable[[int, str], None]:
    """Prints pieces of text as they come, each prompt before its continuation."""
    waiting = list(prompts)

    def show(index: int, piece: str) -> None:
        while len(prompts) - len(waiting) <= index:
            first = len(waiting) == len(prompts)
            sys.stdout.write(("" if first else "\n") + waiting.pop(0))
        sys.stdout.write(piece)
        sys.stdout.flush()

    return show
