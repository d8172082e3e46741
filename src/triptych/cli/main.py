"""The command `triptych`: finds the verb, runs it, and turns its result into text and exit code.

Exit codes: 0 done, 1 failed run, 2 bad input. Verbs load when they are called, so that the
first line of each comes at once.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn, TextIO

from triptych import __version__
from triptych.cli.answer import Answer, say, stdout_for
from triptych.cli.tasks import module_of
from triptych.cli.usage import expand_lists, unknown_verb, usage_error
from triptych.errors import InputError, Problem, TriptychError

VERBS = {
    "plan": "find the fastest way to split a model over a cluster (--task serve: to serve it)",
    "predict": "price one plan: step time, memory, traffic (--task serve: latencies)",
    "validate": "predicted beside measured for a table of runs",
    "measure": "calibrate this machine or cluster: what its kernels and links attain",
    "schedule": "print, check and draw a pipeline program",
    "train": "train a model as a job file says",
    "verify": "is this layout numerically the same as one process?",
    "export": "write a checkpoint as a Hugging Face directory",
    "serve": "a model behind an OpenAI-compatible HTTP server",
    "bench-serve": "load on an OpenAI-compatible server, and what its clients saw",
    "generate": "complete a text with a model directory",
    "place": "several models on groups of devices, chosen by simulation",
    "simulate": "the requests of a fleet through its placement",
    "report": "draw a run folder as an HTML page",
    "tokenizer": "train a byte-level BPE tokenizer on text files",
}
SIGNS_OF_LIFE = {
    "plan": "pricing plans ...",
    "place": "placing models ...",
    "predict": "pricing the plan ...",
    "report": "reading the run ...",
    "simulate": "drawing requests ...",
    "validate": "pricing the runs ...",
}
"""Said before a verb loads, where loading takes longer than a reader's patience."""
INTERRUPTED = 130
MANY_OBJECTS = 50_000
"""New ones between two looks for garbage: imports make hundreds of thousands, and no garbage."""
EXTRA_OF = {
    **dict.fromkeys(("torch", "transformers", "safetensors", "tokenizers"), "run"),
    **dict.fromkeys(("fastapi", "uvicorn", "starlette", "prometheus_client", "httpx2"), "serve"),
    "ray": "ray",
}
"""Packages that not everybody has, and what to install."""


def main() -> None:
    """Runs the command line of this process and exits."""
    gc.set_threshold(MANY_OBJECTS)
    _leave(run(sys.argv[1:]))


def _leave(code: int) -> NoReturn:
    """Ends the process without taking torch apart, which takes seconds on a busy machine."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(args: Sequence[str]) -> int:
    """Runs one command line; returns its exit code."""
    as_json = "--json" in args
    with stdout_for(as_json) as stdout:
        try:
            answer = _dispatch(list(args))
            answer.print(stdout, as_json)
        except TriptychError as error:
            return _failed(error, stdout, as_json)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return INTERRUPTED
        return answer.exit_code


def _dispatch(args: list[str]) -> Answer:
    if not args or args[0] in {"-h", "--help", "help"}:
        return Answer(text=_overview())
    if args[0] in {"-V", "--version"}:
        return Answer(text=f"triptych {__version__}", document={"version": __version__})
    if args[0] not in VERBS:
        raise unknown_verb(args[0], VERBS)
    return call_verb(args[0], args[1:])


def call_verb(verb: str, args: Sequence[str]) -> Answer:
    """Loads a verb and calls it. Raises InputError for a wrong command line."""
    if verb in SIGNS_OF_LIFE and not {"-h", "--help"} & set(args):
        say(SIGNS_OF_LIFE[verb])
    import typer

    module, args = module_of(verb, args)
    command: Callable[..., Answer] = import_module(f"triptych.cli.{module}").command
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(context_settings={"help_option_names": ["-h", "--help"]})(command)
    parser = typer.main.get_command(app)
    try:
        result = parser.main(
            expand_lists(args), prog_name=f"triptych {verb}", standalone_mode=False
        )
    except typer.TyperException as error:
        options = [name for parameter in parser.params for name in parameter.opts]
        raise usage_error(error, [name for name in options if name.startswith("-")]) from error
    except ModuleNotFoundError as error:
        if error.name not in EXTRA_OF:
            raise
        works = f"pip install 'triptych[{EXTRA_OF[error.name]}]'"
        raise InputError(Problem(f"`triptych {verb}` needs {error.name}", works=works)) from error
    if result == INTERRUPTED:  # what Typer makes of Ctrl-C
        raise KeyboardInterrupt
    return result if isinstance(result, Answer) else Answer()


def _failed(error: TriptychError, stdout: TextIO, as_json: bool) -> int:
    """Says what went wrong, on stderr and with `--json` on stdout too; returns the exit code."""
    print(f"error:\n{error}", file=sys.stderr, flush=True)
    problems = error.problems if isinstance(error, InputError) else (Problem(str(error)),)
    listed = [{"what": p.what, "rule": p.rule, "works": p.works} for p in problems]
    if as_json:
        document = {"error": {"kind": type(error).__name__, "problems": listed}}
        Answer(document=document).print(stdout, as_json)
    return error.exit_code


def _overview() -> str:
    width = max(map(len, VERBS))
    verbs = [f"  {verb:{width}}  {line}" for verb, line in VERBS.items()]
    return "\n".join(
        [
            "Triptych plans, trains and serves large language models with hybrid parallelism.",
            "",
            "triptych VERB --help      the options of a verb",
            "triptych VERB ... --json  one JSON document on stdout, logs on stderr",
            "triptych --version",
            "",
            *verbs,
            "",
            "Exit codes: 0 done, 1 failed run, 2 bad input.",
        ]
    )
