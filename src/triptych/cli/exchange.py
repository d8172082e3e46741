"""Plans of other engines: `--export` writes ours for them, `--from` prices theirs beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from triptych.cli.answer import Answer, say
from triptych.cluster.cluster import Cluster
from triptych.cost.predict import predict
from triptych.cost.programs import BY_ENGINE, as_run, with_fused_loss
from triptych.errors import InputError, Problem
from triptych.export.imported import Asked, Imported
from triptych.export.target import Export, Subject
from triptych.export.targets import TARGETS, export, require_target
from triptych.model.model import Model
from triptych.plan.short import read_words
from triptych.report.beside import beside_text

FromOption = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="Price the plan in a Megatron-LM script or a DeepSpeed JSON beside ours.",
    ),
]
ExportOption = Annotated[
    str | None,
    typer.Option(
        "--export",
        metavar="ENGINE",
        help="Write the plan for another engine: " + ", ".join(TARGETS) + ".",
    ),
]
ExportToOption = Annotated[
    Path | None,
    typer.Option(
        "--export-to", metavar="FILE", help="Where --export writes; default: stdout, alone."
    ),
]


def check_export(name: str | None, path: Path | None) -> None:
    """Raises InputError for an unknown engine, or a file without one, before any work."""
    if name is not None:
        require_target(name)
    elif path is not None:
        works = " or ".join(f"--export {target}" for target in TARGETS)
        raise InputError(Problem(f"--export-to {path}", "it goes with --export", works))


def with_export(
    answer: Answer, subject: Subject, name: str | None, path: Path | None, as_json: bool
) -> Answer:
    """The answer with the exported plan in it.

    The exported text goes to its file. Without a file it is all of stdout, so that it can be
    redirected, and what would have stood there goes to stderr. Raises PlanError if the engine
    cannot express the plan at all.
    """
    return answer if name is None else exported_with(answer, export(subject, name), path, as_json)


def exported_with(answer: Answer, exported: Export, path: Path | None, as_json: bool) -> Answer:
    """As `with_export`, for what is written already."""
    if path:
        _write(path, exported.text)
    document = {**(answer.document or {}), "export": exported.to_json()}
    text = "\n\n".join(filter(None, (answer.text, _not_expressed(exported))))
    if not path and not as_json:
        say(text + "\n")
        text = exported.text
    return Answer(text=text, document=document, exit_code=answer.exit_code)


def _not_expressed(exported: Export) -> str:
    if not exported.notes:
        return f"exported to {TARGETS[exported.target].title}: all of the plan"
    lines = [f"  {note}" for note in exported.notes]
    return "\n".join([f"{TARGETS[exported.target].title} cannot express:", *lines])


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(Problem(f"cannot write {path}: {error.strerror}")) from error
    say(f"wrote {path}")


# --- imports -------------------------------------------------------------------------------------


def read_present(
    path: Path | None,
    model: Model,
    cluster: Cluster,
    sizes: tuple[int | None, int | None],
    fixed: Mapping[str, str],
) -> Imported | None:
    """The plan in the file of `--from`, if it is given. `sizes` are --seq and --batch."""
    if path is None:
        return None
    from triptych.export.read import read_foreign  # loads only if it is asked for

    pins = read_words(",".join(f"{key}={value}" for key, value in fixed.items()))
    sequence, batch = sizes
    return read_foreign(
        path,
        Asked(
            model=model,
            cluster=cluster,
            sequence_length=sequence,
            global_batch=batch,
            pins=pins,
        ),
    )


def with_present(
    answer: Answer, imported: Imported | None, model: Model, cluster: Cluster
) -> Answer:
    """The answer with the user's present plan priced beside the best of ours."""
    if imported is None:
        return answer
    price, program = _priced(imported, model, cluster)
    document = dict(answer.document or {})
    plans: Sequence[Mapping[str, Any]] = document.get("plans") or []
    present = {**imported.to_json(), "program": program, "prediction": price}
    if plans:
        present["difference"] = difference(price, plans[0])
    document["present"] = present
    text = f"{answer.text}\n\n{beside_text(present, plans[0] if plans else None)}"
    return Answer(text=text, document=document, exit_code=answer.exit_code)


def _priced(imported: Imported, model: Model, cluster: Cluster) -> tuple[Mapping[str, Any], str]:
    """A plan priced as its own engine runs it, and the name of that program."""
    software = BY_ENGINE[imported.engine]
    if imported.fuses_loss:
        software = with_fused_loss(software)
    found = predict(model, cluster, imported.workload, as_run(imported.plan, software), software)
    return replace(found, plan=imported.plan).to_json(), software.name


def difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Ours minus theirs, of the step and of each term."""
    terms = {
        name: {key: ours[name].get(key, 0.0) - value for key, value in theirs[name].items()}
        for name in ("time_s", "memory_gib")
    }
    totals = {key: ours[key] - theirs[key] for key in ("step_time_s", "peak_memory_gib")}
    return {**totals, "speedup": theirs["step_time_s"] / ours["step_time_s"], **terms}
