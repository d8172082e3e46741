"""Drawings are made from the timeline and from nothing else."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from triptych.schedule.action import Action, Kind
from triptych.schedule.draw import draw_text
from triptych.schedule.generate import build_program
from triptych.schedule.simulate import simulate
from triptych.schedule.svg import svg, tick_step
from triptych.schedule.timeline import Span, Timeline


def unit(action: Action) -> float:
    return 1.0 if action.kind is Kind.F else 2.0


def unit_halves(action: Action) -> float:
    return 2.0 if action.kind is Kind.B else 1.0


def test_1f1b_on_two_ranks_as_text() -> None:
    assert draw_text(simulate(build_program("1f1b", 2, 3), unit)).splitlines() == [
        "rank 0  0>1>....0<<<2>1<<<..2<<<",
        "rank 1  ..0>0<<<1>1<<<2>2<<<....",
        "> forward  < backward  . idle   one column = 500 ms",
    ]


def test_text_stays_within_its_width_and_says_what_it_cut() -> None:
    lines = draw_text(simulate(build_program("1f1b", 4, 64), unit), width=60).splitlines()
    assert all(len(line) == 60 for line in lines[:4])
    assert "first 52 s of 0:03:21" in lines[-1]


def test_text_has_a_legend_of_the_work_that_occurs() -> None:
    spans = (Span(0, "0F0", 0, 1), Span(0, "data_comm", 1, 2), Span(0, "optimizer", 2, 3))
    text = draw_text(Timeline(spans, 1))
    assert text.splitlines()[0] == "rank 0  0>==##"
    assert "= communication  # optimizer  . idle" in text


def test_zb_v_on_two_ranks_as_text() -> None:
    assert draw_text(simulate(build_program("zb-v", 2, 3, 2), unit_halves)).splitlines() == [
        "rank 0  0>1>2>0}0j0x1}1j1x0i0w2}2j2x1i1w2i2w..",
        "rank 1  ..0>0}1>1}0j0x2>0i0w2}1j1x1i2j2i1w2x2w",
        ">} forward  ij input gradient  wx weight gradient  (a character for each chunk)  . idle"
        "   one column = 500 ms",
    ]


def test_svg_has_stripes_on_later_chunks_only() -> None:
    for name, chunks, lines in (("1f1b", 1, 0), ("zb-v", 2, 18), ("interleaved", 3, 36)):
        drawing = svg(simulate(build_program(name, 2, 3, chunks), unit_halves), name)
        assert drawing.count("M") == lines, name


def test_svg_has_a_colour_for_each_half_of_a_backward() -> None:
    drawing = svg(simulate(build_program("zb-h1", 2, 2), unit_halves), "zb-h1")
    assert drawing.count('rect class="input-gradient"') == 4 + 1
    assert drawing.count('rect class="weight-gradient"') == 4 + 1


def test_an_empty_timeline_can_be_drawn() -> None:
    empty = Timeline((), num_ranks=1)
    assert draw_text(empty).startswith("rank 0")
    assert svg(empty, "nothing").startswith("<svg")


@pytest.mark.parametrize("num_ranks", [1, 2, 8, 16])
def test_svg_is_well_formed_with_a_box_an_action(num_ranks: int) -> None:
    timeline = simulate(build_program("1f1b", num_ranks, 6), unit)
    root = ElementTree.fromstring(svg(timeline, "1f1b & <more>"))
    boxes = [node for node in root.iter() if node.find("{*}title") is not None]
    assert len(boxes) == len(timeline.spans)


def test_svg_boxes_carry_microbatch_numbers() -> None:
    drawing = svg(simulate(build_program("1f1b", 2, 3), unit), "title")
    numbers = re.findall(r'class="on \w+"[^>]*>(\d+)<', drawing)
    assert sorted(numbers) == sorted("012" * 4)


def test_svg_of_two_timelines_shares_one_axis() -> None:
    predicted = simulate(build_program("1f1b", 2, 3), unit)
    recorded = simulate(build_program("1f1b", 2, 3), lambda action: 2 * unit(action))
    drawing = svg(predicted, "both", recorded=recorded)
    assert "predicted: 12 s, bubble 25.0%" in drawing
    assert "recorded: 24 s, bubble 25.0%" in drawing
    lanes = [
        float(width)
        for width in re.findall(r'class="lane" x="64" [^>]*width="([\d.]+)" h', drawing)
    ]
    assert lanes[0] * 2 == pytest.approx(lanes[2], rel=1e-3)


def test_svg_starts_a_late_timeline_at_the_left_edge() -> None:
    timeline = Timeline((Span(0, "0F0", 100.0, 101.0),), 1)
    assert '<rect class="forward" x="64.0"' in svg(timeline, "late")


def test_svg_escapes_labels_and_title() -> None:
    drawing = svg(Timeline((Span(0, "<b>", 0, 1),), 1), 'a "<i>" title')
    assert "<b>" not in drawing
    assert "<i>" not in drawing


def test_svg_needs_nothing_from_outside() -> None:
    drawing = svg(simulate(build_program("1f1b", 2, 3), unit), "title")
    assert "href" not in drawing
    assert "url(" not in drawing


@pytest.mark.parametrize(
    ("extent", "step"), [(8.0, 1.0), (33.0, 5.0), (0.9, 0.2), (0.0015, 0.0002), (100.0, 20.0)]
)
def test_ticks_stand_at_round_numbers(extent: float, step: float) -> None:
    assert tick_step(extent, 8) == pytest.approx(step)
