"""Launch scripts as people write them: variables, arrays, quotes, continued lines."""

from __future__ import annotations

import pytest

from triptych.export.shell import commands


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run --a 1 \\\n  --b 2\n", ["run", "--a", "1", "--b", "2"]),
        ("TP=8\nrun --tp $TP ${TP} '$TP'", ["run", "--tp", "8", "8", "$TP"]),
        ('A=(\n --x 1 # one\n --y "2 3"\n)\nrun "${A[@]}"', ["run", "--x", "1", "--y", "2 3"]),
        ("A=(--x 1)\nA+=(--y 2)\nrun ${A[@]} z", ["run", "--x", "1", "--y", "2", "z"]),
        ('O="--x 1 \\\n --y 2"\nrun $O', ["run", "--x", "1", "--y", "2"]),
        ("N=2; G=8\nW=$(($N*$G))\nV=$((N * (G + 1)))\nrun $W $V", ["run", "16", "18"]),
        ('run ${N:-4} ${M:-"5"} $UNSET', ["run", "4", "5", "$UNSET"]),
        ("export TP=2\nif [ $X ]; then TP=4; fi\nrun $TP", ["run", "4"]),
        ("TP=2 run --tp=$TP # --pp 3", ["run", "--tp=2"]),
        ("run a#b 'c d' \"e f\"", ["run", "a#b", "c d", "e f"]),
        ("L=Et*3|t\nL='Et*3|tL'\nrun $L", ["run", "Et*3|tL"]),
        ("D=$(dirname $0)\nrun --d $D/x", ["run", "--d", "$(dirname $0)/x"]),
        ('bash -c "python t.py --a 1 --b 2"', ["bash", "-c", "python", "t.py", "--a", "1", "--b",
                                                "2"]),
    ],
)  # fmt: skip
def test_the_last_command_has_these_words(text: str, words: list[str]) -> None:
    assert commands(text)[-1] == words


def test_commands_end_where_the_shell_ends_them() -> None:
    text = "a 1; b 2 && c 3 | tee x\nd 4 &"
    assert commands(text) == [["a", "1"], ["b", "2"], ["c", "3"], ["tee", "x"], ["d", "4"]]


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "A=1\n", "run 'open", 'run "open', "A=(1 2", ")"]
)
def test_broken_and_empty_scripts_do_not_fail(text: str) -> None:
    assert isinstance(commands(text), list)
