"""Programs print and parse."""

from __future__ import annotations

import pytest
from schedule_samples import least

from triptych.errors import ScheduleError
from triptych.schedule.generate import SCHEDULES, build_program
from triptych.schedule.passes import with_communication
from triptych.schedule.text import parse_program, program_text


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 1), (2, 3), (4, 8), (11, 2)])
def test_a_program_survives_its_text_form(name: str, num_ranks: int, num_microbatches: int) -> None:
    program = with_communication(least(name, num_ranks, num_microbatches))
    assert parse_program(program_text(program)) == program


def test_the_text_form_of_a_small_program() -> None:
    assert program_text(build_program("1f1b", 2, 1)) == (
        "schedule 1f1b\nmicrobatches 1\nplacement 0 1\nrank 0: 0F0 0B0\nrank 1: 1F0 1B0\n"
    )


def test_comments_and_empty_lines_are_ignored() -> None:
    text = program_text(build_program("gpipe", 2, 2))
    noisy = "# by hand\n\n" + text.replace("\n", "  # remark\n\n")
    assert parse_program(noisy) == parse_program(text)


def test_every_bad_line_is_named() -> None:
    text = "schedule x\nmicrobatches two\nplacement 0\nrank 1: 0F0\nranks 0: 0B0\n"
    with pytest.raises(ScheduleError) as caught:
        parse_program(text)
    for part in ("line 2: 'two'", "line 4: rank 1 stands where rank 0", "line 5: 'ranks 0: 0B0'"):
        assert part in str(caught.value)


def test_a_bad_action_is_named_with_examples() -> None:
    text = program_text(build_program("1f1b", 1, 1)).replace("0B0", "0X0")
    with pytest.raises(ScheduleError, match=r"line 4: '0X0' is not an action; examples: 2F0"):
        parse_program(text)


def test_missing_parts_are_named() -> None:
    with pytest.raises(ScheduleError, match=r"missing: microbatches, rank 0:"):
        parse_program("schedule x\nplacement 0\n")
