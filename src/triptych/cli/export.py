"""`triptych export`: a checkpoint as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from triptych.cli.answer import Answer, say
from triptych.cli.options import JsonOption


def command(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="A checkpoint, or a run folder: its newest complete one."
        ),
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to make.")],
    dtype: Annotated[
        str | None, typer.Option(metavar="D", help="fp32, bf16 or fp16; default: as trained.")
    ] = None,
    max_shard_mib: Annotated[
        float, typer.Option(metavar="N", help="MiB of tensors after which a new file begins.")
    ] = 4768.0,
    as_json: JsonOption = False,
) -> Answer:
    """Write CHECKPOINT as a Hugging Face directory that stock `transformers` loads."""
    say("loading torch ...")
    from triptych.checkpoint.export import export

    notes = export(checkpoint, folder, dtype, max_shard_mib * 1024**2)
    text = "\n".join([*notes, f"wrote {folder}"])
    return Answer(text=text, document={"folder": str(folder), "notes": notes})
