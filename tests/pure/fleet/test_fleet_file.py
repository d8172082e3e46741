"""Fleet files: read, refused with every fault, placed, written back, simulated."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from triptych.cli.main import run
from triptych.errors import InputError
from triptych.fleet.advice import Limit, limits
from triptych.fleet.file import read_fleet
from triptych.fleet.judge import Judge, busy_shares
from triptych.fleet.models import Shape
from triptych.simulate.single_shot import simulate

TEXT = """
# a comment that stays
[devices]
count = 4
memory_gib = 2.0

[[models]]
name = "m"
copies = 3
weights_gib = 1.0
slo_s = 0.5
stage_s = { 1x1 = [0.1], 2x1 = [0.05, 0.052] }

[[models]]
name = "slow"
weights_gib = 1.0
slo_s = 0.2
stage_s = { 1x1 = [0.3] }

[requests]
rate_per_s = 10.0
cv = 2.0
duration_s = 30.0
seed = 3
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text(TEXT)
    return path


def test_read(fleet: Path) -> None:
    given = read_fleet(fleet)
    assert [m.name for m in given.fleet.models] == ["m-0", "m-1", "m-2", "slow"]
    assert given.fleet.bytes_of(0, Shape(2)) == 0.5 * 2**30
    trace = given.draw()
    assert set(trace.slo_s.tolist()) == {0.5, 0.2}
    assert (trace.slo_s == np.array(given.slo_s)[trace.model]).all()


def test_every_fault_at_once(fleet: Path) -> None:
    wrong = TEXT.replace("count = 4", "counts = 4").replace("2x1 = [0.05, 0.052]", "2x1 = [0.1]")
    fleet.write_text(wrong + '[[groups]]\nshape = "2"\nmodels = ["m-9"]\n')
    with pytest.raises(InputError) as error:
        read_fleet(fleet)
    message = str(error.value)
    for part in ("count is missing", "'counts'", "2 positive numbers", "'2'", "'m-9'", "m-0"):
        assert part in message


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[devices]\ncount = 4\nmemory_gib = 2.0", 'devices = "four"', "devices must be a table"),
        ("stage_s = { 1x1 = [0.3] }", 'stage_s = "fast"', "stage_s must be a table"),
        ("[requests]", "[request]", "requests is missing"),
    ],
)
def test_what_is_no_table(fleet: Path, old: str, new: str, words: str) -> None:
    fleet.write_text(
        new + "\n" + TEXT.replace(old, "") if "devices" in new else TEXT.replace(old, new)
    )
    with pytest.raises(InputError, match=words):
        read_fleet(fleet)


def test_a_shape_larger_than_all_devices_is_no_place(fleet: Path) -> None:
    fleet.write_text(
        TEXT.replace("{ 1x1 = [0.3] }", "{ 8x1 = [0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3] }")
    )
    with pytest.raises(InputError, match=r"slow: stage_s of 8x1(.|\n)*at most 4 devices"):
        read_fleet(fleet).fleet.check()


def test_place_then_simulate(fleet: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = fleet.with_name("placed.toml")
    assert run(["place", str(fleet), "--out", str(out), "--trials", "20", "--json"]) == 0
    placed = json.loads(capfd.readouterr().out)
    assert "# a comment that stays" in out.read_text()
    assert sum(group["devices"] for group in placed["groups"]) <= 4
    assert placed["advice"]["limits"]["slow"] == Limit.OBJECTIVE.value
    assert run(["simulate", str(out), "--json"]) == 0
    seen = json.loads(capfd.readouterr().out)
    assert seen["attainment"] == placed["attainment"]["this placement"]
    assert seen["groups"] == placed["groups"]


def test_pages_show_every_group_and_model_and_the_same_attainment(
    fleet: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    placed, page = fleet.with_name("placed.toml"), fleet.with_name("pages") / "place.html"
    options = ["--trials", "5", "--no-advice", "--out", str(placed), "--report", str(page)]
    assert run(["place", str(fleet), *options]) == 0
    text = page.read_text()
    assert all(f"<code>{name}</code>" in text for name in ("m-0", "m-1", "m-2", "slow"))
    capfd.readouterr()
    assert run(["simulate", str(placed), "--report", str(page), "--json"]) == 0
    seen = json.loads(capfd.readouterr().out)
    assert page.read_text().count('class="busy"') == len(seen["groups"]) == len(seen["busy"])
    (as_it_is,) = (
        y for x, y in seen["curves"]["objectives, in those of the file"]["this placement"] if x == 1
    )
    assert as_it_is == seen["attainment"]


def test_busy_shares_are_the_time_of_the_last_stage(fleet: Path) -> None:
    fleet.write_text(TEXT + '[[groups]]\nshape = "2x1"\nmodels = ["m-0", "m-1"]\n')
    given = read_fleet(fleet)
    assert given.placement is not None
    trace = given.draw()
    edges_s, (shares,) = busy_shares(given.fleet, given.placement, trace, 50)
    outcome = simulate(
        trace.arrival_s, trace.model, given.placement.lines(given.fleet), trace.slo_s
    )
    ends_s = outcome.finish_s[outcome.group == 0]
    for low_s, high_s, busy in zip(edges_s[:-1], edges_s[1:], shares, strict=True):
        inside_s = np.minimum(ends_s, high_s) - np.maximum(ends_s - 0.052, low_s)
        assert busy * (high_s - low_s) == pytest.approx(inside_s.clip(0).sum(), abs=1e-9)


def test_a_fleet_without_groups_says_how_to_get_them(
    fleet: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", str(fleet)]) == 2
    assert "triptych place" in capfd.readouterr().err


def test_what_limits(fleet: Path) -> None:
    fleet.write_text(TEXT + '[[groups]]\nshape = "1x1"\nmodels = ["m-0", "slow"]\n')
    given = read_fleet(fleet)
    assert given.placement is not None
    trace = given.draw()
    verdict = Judge(given.fleet, [trace]).of(given.placement)
    found = limits(given.fleet, given.placement, verdict, trace)
    assert found["slow"] is Limit.OBJECTIVE
    assert found["m-1"] is Limit.MEMORY  # no group holds it
