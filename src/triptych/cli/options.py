"""Options that several verbs have, under the same name and with the same meaning."""

from __future__ import annotations

from typing import Annotated

import typer

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face directory, a config.json, a catalogue name or a hub id.",
        show_default=False,
    ),
]
ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="C",
        help="NODESxGPUSxDEVICE as 8x8xH100-SXM or 1x2xcpu, `local`, or a TOML file.",
        show_default=False,
    ),
]
SequenceOption = Annotated[
    int | None,
    typer.Option(
        "--seq", min=1, metavar="N", help="Tokens a sequence; default: 4096 or what fits."
    ),
]
BatchOption = Annotated[
    int | None,
    typer.Option("--batch", min=1, metavar="N", help="Sequences a step; default: 8 a device."),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="One JSON document on stdout, logs on stderr.")
]
