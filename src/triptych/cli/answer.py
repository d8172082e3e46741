"""What a command says: one JSON document or one text on stdout, everything else on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from triptych.errors import RunError

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a verb: `document` with `--json`, `text` without.

    No document and no text is the answer of a process that has nothing to say, such as all ranks
    but one. The text of a failure goes to stderr.
    """

    text: str = ""
    document: Mapping[str, Any] | None = None
    exit_code: int = 0

    def print(self, stdout: TextIO, as_json: bool) -> None:
        """Writes the answer and nothing else. Raises RunError if it cannot be written.

        A reader that leaves early, as `head` does, is no error.
        """
        stream, text = stdout, ""
        if as_json and self.document is not None:
            document = {"schema_version": SCHEMA_VERSION, **self.document}
            text = json.dumps(document, indent=2) + "\n"
        elif self.text:
            stream = sys.stderr if self.exit_code else stdout
            text = self.text.rstrip("\n") + "\n"
        try:
            stream.write(text)
            stream.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # the rest goes nowhere
            if not isinstance(error, BrokenPipeError):
                raise RunError(f"cannot write the answer: {error.strerror}") from error


def say(text: str) -> None:
    """Writes a line to stderr at once: a sign of life before something slow."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def stdout_for(as_json: bool) -> Iterator[TextIO]:
    """The stream for the answer. With `--json`, all else that is written to stdout, by child
    processes too, goes to stderr for the time being.
    """
    if not as_json:
        yield sys.stdout
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(kept, "w", encoding="utf-8", closefd=False) as stdout:
            yield stdout
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
