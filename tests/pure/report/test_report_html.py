"""The page is whole, stands alone, and shows what the run has."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from triptych.report.chart import MOST_POINTS, Series, line_chart
from triptych.report.html import html, write_report
from triptych.report.run import Run, Step, read_run

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Headings, and whether every element is closed by its own end tag."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.references: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.references += [value or "" for key, value in attrs if key in ("href", "src")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(data)


def test_a_whole_run_has_every_section(run_folder: Path) -> None:
    page = Page(html(read_run(run_folder)))
    assert page.open == []
    assert page.headings == [
        "first-run",
        "Training",
        "The plan",
        "Memory of the largest rank, predicted",
        "Step time by term",
        "Communication by axis, predicted",
        "Pipeline timeline",
        "Predicted beside measured",
        "Ranked plans",
        "What binds the first plan",
        "Sensitivity",
        "Time against memory",
    ]


def test_the_page_needs_nothing_from_outside(run_folder: Path) -> None:
    text = html(read_run(run_folder))
    assert Page(text).references == []
    assert "url(" not in text
    assert "<script" not in text
    outside = set(re.findall(r"https?://[^\"' ]+", text))
    assert outside == {"http://www.w3.org/2000/svg"}  # a namespace, not an address


def test_texts_of_the_run_are_escaped(run_folder: Path) -> None:
    text = html(replace(read_run(run_folder), name="<b>run</b>"))
    assert "<b>run</b>" not in text
    assert "fastest: &lt;TP&gt; stays in the node" in text


def test_memory_bars_have_values_and_the_measured_peak(run_folder: Path) -> None:
    text = html(read_run(run_folder))
    assert "204.80 MiB" in text
    assert "measured peak" in text


def test_predicted_timeline_stands_above_the_recorded_one(run_folder: Path) -> None:
    text = html(read_run(run_folder))
    assert text.index("predicted: 80 ms, bubble 25.0%") < text.index("recorded: ")


def test_the_loss_curve_has_training_and_held_out_text(run_folder: Path) -> None:
    text = html(read_run(run_folder))
    assert 'class="line train"' in text
    assert "held-out text 6.5 at step 20" in text


def test_ranked_plans_come_with_reasons(run_folder: Path) -> None:
    text = html(read_run(run_folder))
    assert "2 times slower" in text
    assert "42 legal plans in 250 ms: 2 simulated" in text
    assert "7 memory: state" in text


def test_a_plan_that_has_not_run_gets_a_page(run_folder: Path) -> None:
    run = replace(read_run(run_folder), steps=(), evaluations=(), timeline=None)
    page = Page(html(run))
    assert "Training" not in page.headings
    assert "Predicted beside measured" not in page.headings
    assert "Pipeline timeline" in page.headings


def test_what_is_absent_is_named_on_the_page(run_folder: Path) -> None:
    (run_folder / "timeline.json").unlink()
    assert "timeline.json: missing" in html(read_run(run_folder))


@pytest.mark.parametrize(
    "run",
    [
        Run(name="empty"),
        Run(name="one step", steps=(Step(step=1, loss=8.0),)),
        Run(name="no number", steps=(Step(step=1, loss=float("nan")),)),
        Run(name="bare", prediction={}, search={"plans": [{}]}),
    ],
    ids=lambda run: run.name,
)
def test_little_to_show_is_no_error(run: Run) -> None:
    assert Page(html(run)).headings[0] == run.name


def test_write_report_makes_the_folder(tmp_path: Path) -> None:
    out = write_report(Run(name="x"), tmp_path / "new" / "report.html")
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_long_curves_are_thinned_and_keep_their_last_point() -> None:
    points = [(step, float(step)) for step in range(10 * MOST_POINTS + 7)]
    chart = line_chart("loss", [Series("x", "train", points)], width=400, height=200)
    (path,) = re.findall(r'points="([^"]+)"', chart)
    assert len(path.split()) <= MOST_POINTS + 1
    assert path.split()[-1].startswith("384.0,")  # the right edge: 400 - 16


def test_values_that_are_no_number_are_left_out_of_a_curve() -> None:
    points: list[tuple[float, float]] = [(1, 1.0), (2, float("nan")), (3, float("inf")), (4, 2.0)]
    chart = line_chart("loss", [Series("x", "train", points)], width=400, height=200)
    (path,) = re.findall(r'points="([^"]+)"', chart)
    assert len(path.split()) == 2


def test_step_axes_have_whole_numbers() -> None:
    points = [(1.0, 5.0), (2.0, 4.0)]
    chart = line_chart("loss", [Series("x", "train", points)], width=1120, height=320)
    middle = re.findall(r'text-anchor="middle">([^<]+)<', chart)
    assert middle == ["1", "2"]


def test_figures_prefer_what_was_measured(run_folder: Path) -> None:
    text = html(read_run(run_folder))
    assert "<span>step time</span><b>200 ms</b><span>predicted 100 ms</span>" in text
