"""The command line itself: wrong options are named with what was meant, and exit codes say why."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from triptych import __version__
from triptych.cli.main import VERBS, run
from triptych.cli.usage import expand_lists
from triptych.errors import InputError


def triptych(*args: str) -> subprocess.CompletedProcess[str]:
    code = "from triptych.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60
    )


def test_the_overview_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    printed = capsys.readouterr().out
    assert all(verb in printed for verb in VERBS)
    assert run(["--help"]) == 0
    assert capsys.readouterr().out == printed


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"triptych {__version__}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself_and_takes_json(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([verb, "--help"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"Usage: triptych {verb}") and "--json" in printed


def test_a_misspelt_verb_gets_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["scheduel"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "triptych schedule" in captured.err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["schedule", "1f1b", "--stges", "4"], ["--stges", "--stages"]),
        (["schedule", "1f1b", "--stages", "x", "--microbatches", "4"], ["--stages", "x"]),
        (["schedule", "1f1b", "--stages", "4"], ["--microbatches"]),
        (["schedule", "--stages", "4", "--microbatches", "4"], ["NAME"]),
        (["schedule", "1f1c", "--stages", "4", "--microbatches", "4"], ["1f1c", "1f1b"]),
        (["schedule", "gpipe", "--stages", "0", "--microbatches", "0"], ["ranks", "micro"]),
        (["plan", "tiny", "--claster", "local"], ["--claster", "--cluster"]),
    ],
)
def test_a_wrong_command_line_ends_with_code_2_and_one_list(
    args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(args) == 2
    captured = capsys.readouterr()
    said = captured.err.removeprefix("pricing plans ...\n")  # the sign of life comes first
    assert captured.out == "" and said.startswith("error:\n- ")
    assert "Traceback" not in captured.err
    assert all(word in captured.err for word in words)


def test_lists_after_set_and_fix_may_be_repeated_or_not() -> None:
    assert expand_lists(["job.toml", "--set", "a=1", "b=2", "--json"]) == [
        "job.toml", "--set", "a=1", "--set", "b=2", "--json"
    ]  # fmt: skip
    assert expand_lists(["--fix", "tp=8,pp=4", "--set", "x=1", "y=2"]) == [
        "--fix", "tp=8,pp=4", "--set", "x=1", "--set", "y=2"
    ]  # fmt: skip
    assert expand_lists(["--plan", "tp=2", "x=1"]) == ["--plan", "tp=2", "x=1"]


def test_json_prints_one_document_and_nothing_else() -> None:
    done = triptych("schedule", "1f1b", "--stages", "2", "--microbatches", "3", "--json")
    assert done.returncode == 0
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    assert document["actions"][1] == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]


def test_json_prints_errors_as_a_document_too() -> None:
    done = triptych("schedule", "1f1b", "--stages", "2", "--microbatchs", "3", "--json")
    assert done.returncode == 2
    (problem,) = json.loads(done.stdout)["error"]["problems"]
    assert "--microbatchs" in problem["what"] and problem["works"] == "--microbatches"
    assert "Traceback" not in done.stderr


def test_what_else_prints_goes_to_stderr_with_json(capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "import os, subprocess\n"
        "from triptych.cli.answer import Answer, stdout_for\n"
        "with stdout_for(True) as out:\n"
        "    print('log')\n"
        "    subprocess.run(['echo', 'child'], check=True)\n"
        "    Answer(document={'a': 1}).print(out, True)\n"
        "print('after')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    document, rest = done.stdout.rsplit("\n", 2)[0], done.stdout.rsplit("\n", 2)[1]
    assert json.loads(document) == {"schema_version": 1, "a": 1} and rest == "after"
    assert "log" in done.stderr and "child" in done.stderr


def test_a_schedule_is_drawn_into_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.svg"
    assert (
        run(["schedule", "gpipe", "--stages", "2", "--microbatches", "2", "--svg", str(path)]) == 0
    )
    assert path.read_text().startswith("<svg") and "rank 1: 1F0 1F1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("interleaved", "chunks of micro-batches held at once, by rank: 5, 3"),
        ("zb-v", "0.0% between the first and the last action of the busiest rank"),
        ("dualpipe-v", "rank 1: 1F0 2F0 1F1"),
        ("zb-auto", "with those that wait for their weight gradients: 3, 3"),
    ],
)
def test_every_schedule_is_printed_with_as_few_chunks_as_it_has(
    name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["schedule", name, "--stages", "2", "--microbatches", "4"]) == 0
    out = capsys.readouterr().out
    assert said in out and "legal: " in out


def test_the_first_line_needs_no_other_package() -> None:
    """It comes at once: 0.05 s on an idle machine."""
    code = (
        "import sys; installed = set(sys.modules)\n"
        "from triptych.cli.main import run; run(['--help'])\n"
        "print({name.partition('.')[0] for name in {*sys.modules} - installed}"
        " - {*sys.stdlib_module_names})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "{'triptych'}"


def test_errors_keep_their_exit_codes() -> None:
    assert InputError("x").exit_code == 2
