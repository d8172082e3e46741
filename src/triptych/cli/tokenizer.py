"""`triptych tokenizer`: train a byte-level BPE tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from triptych.cli.answer import Answer, say
from triptych.cli.options import JsonOption


def command(
    files: Annotated[
        list[str], typer.Argument(metavar="FILES...", help="Files, folders or globs of text.")
    ],
    vocab_size: Annotated[
        int, typer.Option(min=257, help="Tokens: the end of text, 256 bytes, and merges.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where tokenizer.json goes.")],
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Files to leave out.")
    ] = None,
    as_json: JsonOption = False,
) -> Answer:
    """Train a byte-level BPE tokenizer on text; stock `transformers` loads what it writes."""
    say("reading text ...")
    from triptych.train.tokenizer_training import train_tokenizer

    folder = train_tokenizer(files, vocab_size, out, exclude=exclude or ())
    return Answer(
        text=f"wrote {folder} with {vocab_size} tokens",
        document={"folder": str(folder), "vocab_size": vocab_size},
    )
