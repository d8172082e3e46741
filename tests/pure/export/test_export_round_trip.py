"""What a target can express comes back equal; what it cannot is named, for any legal plan."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from export_samples import differing, subject, subjects, uniform
from hypothesis import HealthCheck, assume, given, settings

from triptych.errors import PlanError
from triptych.export.imported import Asked
from triptych.export.read import imported_from
from triptych.export.target import Export, Subject, used
from triptych.export.targets import TARGETS, export

PATIENT = settings(
    max_examples=50, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)


def exported(drawn: Subject, name: str) -> Export:
    """The export, or a rejected example where the engine cannot run the plan at all."""
    try:
        return export(drawn, name)
    except PlanError:
        assume(False)
        raise


def noted(result: Export) -> set[str]:
    return {note.field for note in result.notes}


@PATIENT
@given(drawn=subjects())
def test_megatron_gives_back_all_that_it_does_not_name(drawn: Subject) -> None:
    result = exported(drawn, "megatron")
    asked = Asked(model=drawn.model, cluster=drawn.cluster)
    back = imported_from(result.text, "run.sh", asked)
    assert differing(drawn.plan, back.plan, noted(result)) == {}
    assert back.workload == drawn.workload
    assert back.not_understood == () and back.differs == ()


@PATIENT
@given(drawn=subjects())
def test_deepspeed_gives_back_all_that_it_does_not_name(drawn: Subject) -> None:
    result = exported(drawn, "deepspeed")
    plan = drawn.plan
    pins = {"pp": plan.pp, "tp": plan.tp, "recompute": plan.recompute}
    asked = Asked(
        model=drawn.model,
        cluster=drawn.cluster,
        sequence_length=drawn.workload.sequence_length,
        pins={**pins, "layers": tuple(stage.num_layers for stage in plan.stages)},
    )
    back = imported_from(result.text, "ds.json", asked)
    in_code = {"pp", "layers", "recompute"}
    assert differing(plan, back.plan, noted(result) - in_code) == {}
    assert back.workload == drawn.workload and back.not_understood == ()


@pytest.mark.parametrize("name", TARGETS)
@settings(PATIENT, max_examples=15)
@given(drawn=subjects())
def test_every_setting_is_said_or_named(name: str, drawn: Subject) -> None:
    result = exported(drawn, name)
    assert all(note.why and note.value for note in result.notes)
    assert noted(result) <= {*used(drawn.plan)} | {
        n.field for n in result.notes if n.field.startswith("model.")
    }
    assert len(noted(result)) == len(result.notes), "a setting is named once"


CHANGES = {
    "tp": 4, "dp": 2, "zero": 2, "bucket_bytes": 1 << 20, "microbatch": 4, "recompute": "full",
    "attention": "flash", "sequence_parallel": True, "prefetch": 3, "compile": True,
    "hybrid_shard": 2, "offload": "optimizer", "layouts": {"a": "b"},
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", TARGETS)
def test_a_setting_changes_the_text_or_is_named(name: str, change: str) -> None:
    base = {"tp": 2, "dp": 4, "zero": 3}
    before = export(subject(uniform(**base), batch=64), name)
    after = export(subject(uniform(**{**base, change: CHANGES[change]}), batch=64), name)
    assert change in noted(before) | noted(after) or _body(after) != _body(before)


def _body(result: Export) -> list[str]:
    return [line for line in result.text.splitlines() if not line.startswith("#")]


def test_the_script_is_a_program_of_bash() -> None:
    plan = uniform(tp=2, pp=2, dp=2, zero=1, sequence_parallel=True)
    text = export(subject(plan), "megatron").text
    bash = shutil.which("bash")
    assert bash is not None
    stub = "torchrun() { printf '%s\\n' \"$@\"; }\n"
    done = subprocess.run(
        [bash, "-c", stub + text, "run.sh", "--mock-data"],
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.split("\n")
    assert words[words.index("--tensor-model-parallel-size") + 1] == "2"
    assert words[words.index("--nnodes") + 1] == "1" and "--mock-data" in words


def test_deepspeed_text_is_json_with_the_batch_equation() -> None:
    plan = uniform(dp=4, zero=2, microbatch=2)
    document = json.loads(export(subject(plan, batch=64), "deepspeed").text)
    sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    assert [document[name] for name in sizes] == [2, 8, 64]


def test_the_arguments_of_torchtitan_0_3_have_its_names_and_say_which_job_is_not_there() -> None:
    case = subject(uniform(tp=2, pp=2, dp=2, zero=2, sequence_parallel=True))
    text = export(case, "torchtitan").text
    (line,) = (line for line in text.splitlines() if "--module" in line)
    assert line.count("norm,lm_head") == 1 and ",output" not in line
    assert "--parallelism.enable-sequence-parallel" in line
    assert '"norm", "output"' in text  # of 0.2
    assert "is in no registry: write that function first" in text
