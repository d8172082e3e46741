"""Plans as text: the short form and TOML say the same plan, and misspelt words are named."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_samples import make_cluster, make_model

from triptych.errors import PlanError
from triptych.plan.context import heads_problems
from triptych.plan.fields import DTYPES, SETTINGS
from triptych.plan.plan import Plan, Precision, Stage
from triptych.plan.rules import verify
from triptych.plan.short import parse_plan
from triptych.plan.toml import load_plan, plan_from_toml, plan_toml, read_plan
from triptych.schedule.traits import TRAITS

MODEL = make_model(layers=12, kv_heads=8)


def setting_values(key: str) -> st.SearchStrategy[object]:
    field = SETTINGS[key]
    if field.kind is bool:
        return st.booleans()
    if field.kind is str:
        return st.sampled_from(field.values)
    return st.integers(field.minimum, field.maximum or 64)


FREE = [key for key in SETTINGS if key not in {"chunks", "hybrid_shard"}]
PRECISIONS = st.builds(
    Precision,
    **{key: st.sampled_from(DTYPES) for key in ("parameter", "gradient", "master", "moments")},
)
LAYOUTS = st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=2)
OTHERS = st.fixed_dictionaries({key: setting_values(key) for key in FREE})


@st.composite
def legal_plans(draw: st.DrawFn) -> Plan:
    """Any plan that is legal for MODEL: uniform or with stages of their own."""
    cuts = draw(st.sets(st.integers(1, 11), max_size=5))
    edges = [0, *sorted(cuts), 12]
    bounds = list(pairwise(edges))
    degrees = st.fixed_dictionaries(
        {axis: st.integers(1, 4) for axis in ("data", "tensor", "context")}
    )
    shared = draw(degrees)
    each = draw(st.booleans())
    stages = tuple(Stage(start=a, stop=b, **(draw(degrees) if each else shared)) for a, b in bounds)
    if each and draw(st.booleans()):
        taken = 0
        listed = []
        for stage in stages:
            ranks = tuple(range(taken, taken + stage.num_devices))
            taken += stage.num_devices
            listed.append((stage, ranks))
        stages = tuple(
            Stage(start=s.start, stop=s.stop, data=s.data, tensor=s.tensor, context=s.context,
                  devices=ranks)
            for s, ranks in listed
        )  # fmt: skip
    extra = draw(OTHERS) | {"precision": draw(PRECISIONS), "layouts": draw(LAYOUTS)}
    if extra["accumulation"] == "reduce_each":
        extra["zero"] = draw(st.integers(2, 3))
    if extra["recompute"] == "none":
        extra["recompute_every"] = 1
    if extra["offload"] == "activations":
        extra["recompute"] = "full"
    if extra["shard_activations"]:
        extra |= {"recompute": "full", "sequence_parallel": False}
        stages = tuple(replace(s, tensor=2, data=1, context=1, devices=()) for s in stages)
    chunks = TRAITS[extra["schedule"]].least_chunks
    if len(stages) % chunks or (each and chunks > 1):
        chunks, extra["schedule"] = 1, "1f1b"
    if each:  # a micro-batch divides over the data ranks of every stage
        extra["microbatch"] = math.lcm(*(stage.data for stage in stages))
    plan = Plan(stages=stages, chunks=chunks, **extra)
    return plan.with_(context_method="ring") if any(heads_problems(plan, MODEL)) else plan


@settings(max_examples=150, deadline=None)
@given(legal_plans())
def test_every_legal_plan_survives_the_way_through_toml(plan: Plan) -> None:
    assert verify(plan, MODEL) == []
    assert plan_from_toml(plan_toml(plan)) == plan


def test_a_uniform_plan_is_written_in_the_short_form_and_others_by_stage() -> None:
    uniform = Plan.uniform(12, tp=2, pp=2)
    assert "stages" not in plan_toml(uniform) and "layers = [6, 6]" in plan_toml(uniform)
    own = Plan(stages=(Stage(start=0, stop=5, tensor=2), Stage(start=5, stop=12, data=2)))
    assert plan_toml(own).count("[[stages]]") == 2


def test_every_default_is_written_out() -> None:
    text = plan_toml(Plan.uniform(12))
    for key in (*SETTINGS, "version", "parameter", "moments", "tp", "ep"):
        assert f"{key} = " in text


def test_a_plan_file_is_read_back_from_disk(tmp_path: Path) -> None:
    plan = Plan.uniform(12, tp=2, pp=3, layers=(5, 4, 3), zero=1)
    path = tmp_path / "plan.toml"
    path.write_text(plan_toml(plan))
    assert read_plan(path) == plan
    assert load_plan(str(path), MODEL) == plan


def test_a_hand_written_file_may_be_short() -> None:
    assert plan_from_toml("version = 1\nlayers = 12\ntp = 2\npp = 3\n") == Plan.uniform(
        12, tp=2, pp=3
    )
    text = 'version = 1\nlayers = [7, 5]\nprecision = "bf16"\n'
    assert plan_from_toml(text) == Plan.uniform(
        12, pp=2, layers=(7, 5), precision=Precision.mixed()
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("layers = 12", ["version = missing", "version = 1"]),
        ("version = 7\nlayers = 12", ["version = 7", "version = 1"]),
        ("version = 1\nlayers = 12\ntensor_paralel = 2", ["tensor_paralel"]),
        ("version = 1\nlayers = 12\nmicrobach = 2", ["microbach", "microbatch"]),
        ("version = 1\nlayers = 12\nzero = 1.0", ["zero = 1.0", "0, 1, 2, 3"]),
        ("version = 1\nlayers = 12\nzero = true", ["zero = True"]),
        ("version = 1\nlayers = 12\ntp = 0", ["tp = 0", "from 1"]),
        ("version = 1\nlayers = 12\nschedule = '1f1c'", ["1f1c", "1f1b"]),
        ("version = 1\nlayers = 12\n[precision]\nparam = 'bf16'", ["param", "parameter"]),
        ("version = 1\nlayers = 12\nprecision = 'bf61'", ["bf61", "bf16"]),
        ("version = 1\ntp = 2", ["layers = missing", "layers = 32"]),
        ("version = 1\nlayers = [6, 6]\npp = 3", ["pp = 3", "pp = 2"]),
        ("version = 1\nlayers = []", ["layers = []"]),
        ("version = 1\nlayers = 12\nlayouts = 3", ["layouts = 3"]),
        ("version = 1\ntp = 2\n[[stages]]\nstart = 0\nstop = 12", ["without tp"]),
        ("version = 1\n[[stages]]\nstart = 0\nstop = 12\ntensr = 2", ["tensr", "tensor"]),
        ("version = 1\n[[stages]]\nstart = 0", ["stop is missing"]),
        ("version = 1\n[[stages]]\nstart = 0\nstop = 9\ndevices = ['a']", ["devices"]),
        ("version = 1\nstages = []", ["stages = []"]),
        ("version = 1\nversion = 1\n", ["not TOML", "overwrite"]),
        ("version = \ntp = 2", ["not TOML", "line 1"]),
    ],
)
def test_a_wrong_plan_file_names_key_value_and_remedy(text: str, words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        plan_from_toml(text, where="plan.toml")
    for word in words:
        assert word in str(caught.value)


def test_all_faults_of_a_plan_file_are_listed_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        plan_from_toml("version = 1\nlayers = 12\nzero = 9\nmicrobach = 1\ntp = '2'")
    assert len(caught.value.problems) == 3


def test_a_plan_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"plan\.toml.*No such file"):
        load_plan(str(tmp_path / "plan.toml"), MODEL)


def test_the_short_form_reads_every_word() -> None:
    text = "tp=2, pp=3,dp=2,zero=1,microbatch=4,recompute=full,sp=1,schedule=gpipe,layers=3+4+5"
    assert parse_plan(text + ",precision=fp32", MODEL) == Plan.uniform(
        12,
        tp=2,
        pp=3,
        dp=2,
        layers=(3, 4, 5),
        zero=1,
        microbatch=4,
        recompute="full",
        sequence_parallel=True,
        schedule="gpipe",
    )


@settings(max_examples=100, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "tp": st.integers(1, 8),
            "pp": st.integers(1, 4),
            "dp": st.integers(1, 8),
            "zero": st.integers(0, 3),
            "microbatch": st.integers(1, 8),
            "sequence_parallel": st.booleans(),
            "recompute": st.sampled_from(["none", "selective", "full"]),
            "compile": st.booleans(),
            "precision": st.sampled_from([Precision(), Precision.mixed()]),
        }
    )
)
def test_the_short_line_that_a_plan_prints_is_read_back(values: dict[str, object]) -> None:
    plan = Plan.uniform(12, **values)  # type: ignore[arg-type]
    assert parse_plan(plan.short(), MODEL) == plan


def test_a_missing_data_degree_is_what_the_cluster_leaves() -> None:
    assert parse_plan("tp=2,pp=2", MODEL, make_cluster(16)).dp == 4
    assert parse_plan("tp=2,pp=2", MODEL).dp == 1


def test_a_missing_precision_suits_the_device() -> None:
    assert parse_plan("tp=2", MODEL, make_cluster(2)).precision == Precision()
    assert parse_plan("tp=2", MODEL, make_cluster(2, kind="cuda")).precision == Precision.mixed()
    assert parse_plan("precision=fp64", MODEL).precision.moments == "fp64"


def test_a_missing_pipeline_degree_is_the_number_of_layer_counts() -> None:
    assert parse_plan("layers=5+7", MODEL).pp == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tensor_parallel=2", ["tensor_parallel"]),
        ("microbach=2", ["microbach", "microbatch"]),
        ("tp=two", ["tp = 'two'", "a whole number from 1"]),
        ("tp=0", ["tp = 0"]),
        ("tp=1.5", ["tp = '1.5'"]),
        ("zero=4", ["zero = 4", "0, 1, 2, 3"]),
        ("sp=yes", ["sequence_parallel = 'yes'", "true or false"]),
        ("recompute=ful", ["'ful'", "recompute = full"]),
        ("tp", ["'tp'", "key=value"]),
        ("tp=2,tp=4", ["tp is given once"]),
        ("layers=3+x", ["layers=3+x", "layers=8+8"]),
        ("layers=12+0", ["counts from 1"]),
        ("layers=6+6,pp=3", ["2 parts with pp=3", "pp=2"]),
    ],
)
def test_a_wrong_word_is_named_with_what_works(text: str, words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        parse_plan(text, MODEL)
    for word in words:
        assert word in str(caught.value)


def test_all_wrong_words_are_listed_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        parse_plan("tp=two,zer=1,recompute=some", MODEL)
    assert len(caught.value.problems) == 3


@settings(max_examples=100, deadline=None)
@given(legal_plans())
def test_the_short_form_says_the_degrees_of_every_stage(plan: Plan) -> None:
    read = parse_plan(plan.short(), MODEL)
    degrees = [(s.start, s.stop, s.data, s.tensor, s.context) for s in plan.stages]
    assert [(s.start, s.stop, s.data, s.tensor, s.context) for s in read.stages] == degrees
    assert (read.zero, read.microbatch, read.chunks) == (plan.zero, plan.microbatch, plan.chunks)


def test_degrees_by_pipeline_rank_follow_the_placement_of_a_v() -> None:
    plan = parse_plan("tp=2+1,dp=1+2,schedule=zb-v,chunks=2,microbatch=2", MODEL)
    assert [(stage.tensor, stage.data) for stage in plan.stages] == [(2, 1), (1, 2), (1, 2), (2, 1)]
    assert verify(plan, MODEL) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tp=2+1,dp=1+2+1", ["pp=3", "one for each"]),
        ("tp=2+1,pp=3", ["pp=3", "pp=2"]),
        ("tp=2+0", ["tp = 0", "whole number from 1"]),
        ("zero=1+2", ["zero"]),
    ],
)
def test_degrees_that_disagree_are_refused(text: str, words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        parse_plan(text, MODEL)
    assert all(word in str(caught.value) for word in words)
