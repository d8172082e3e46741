"""Every rule fires with the values of its case, and what the message offers then passes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from plan_samples import make_cluster, make_model

from triptych.cluster.cluster import Cluster
from triptych.errors import PlanError, Problem
from triptych.model.model import Experts, Mlp, Model
from triptych.plan.batch import batch_problem
from triptych.plan.plan import Plan, Precision, Stage
from triptych.plan.routing import routing_problems
from triptych.plan.rules import require_legal, unrunnable, usable_tensor_degrees, verify
from triptych.plan.short import parse_plan
from triptych.plan.workload import Workload


def only(problems: list[Problem]) -> Problem:
    assert len(problems) == 1, "\n".join(map(str, problems))
    return problems[0]


def offered(problem: Problem) -> list[str]:
    """The settings `key=value,...` that a message offers, one text for each alternative."""
    found = re.findall(r"[a-z_]+=[\w+-]+(?:,[a-z_]+=[\w+-]+)*", problem.works)
    assert found, problem
    return found


def work(batch: int, length: int = 64) -> Workload:
    return Workload(sequence_length=length, global_batch=batch)


def test_a_legal_plan_breaks_no_rule() -> None:
    plan = Plan.uniform(4, tp=2, pp=2, dp=2, zero=1, sequence_parallel=True)
    assert verify(plan, make_model(), make_cluster(8), work(8)) == []
    require_legal(plan, make_model(), make_cluster(8), work(8))


def test_all_broken_rules_are_listed_at_once() -> None:
    plan = Plan.uniform(4, tp=3, pp=2, zero=5, recompute="ful", schedule="1f1c")
    text = "\n".join(map(str, verify(plan, make_model(), make_cluster(4), work(3))))
    for word in ("tp=3", "zero = 5", "'ful'", "recompute = full", "'1f1c'", "1f1b", "devices"):
        assert word in text
    with pytest.raises(PlanError) as caught:
        require_legal(plan, make_model(), make_cluster(4), work(3))
    assert len(caught.value.problems) >= 5


@pytest.mark.parametrize(
    ("heads", "kv", "tp", "is_legal"),
    [
        (8, 2, 4, True),
        (8, 2, 8, True),
        (9, 3, 2, True),
        (9, 3, 9, True),
        (12, 4, 3, True),
        (14, 2, 14, True),
        (14, 2, 4, False),
        (14, 2, 3, False),
        (12, 4, 8, False),
        (9, 3, 6, False),
        (52, 4, 8, False),
    ],
)
def test_tensor_degrees_share_whole_kv_head_groups(
    heads: int, kv: int, tp: int, is_legal: bool
) -> None:
    """User case pub_001."""
    model = make_model(query_heads=heads, kv_heads=kv)
    plan = Plan.uniform(4, tp=tp)
    problems = verify(plan, model)
    assert (problems == []) == is_legal
    assert (tp in usable_tensor_degrees(model, tp)) == is_legal
    if not is_legal:
        text = str(only(problems))
        for value in (f"{heads} query heads", f"{kv} KV heads", f"tp={tp}"):
            assert value in text


@pytest.mark.parametrize("devices", [4, 8, 12, 28])
def test_every_tensor_degree_that_a_message_offers_is_legal(devices: int) -> None:
    """User case pub_001."""
    model, cluster = make_model(query_heads=14, kv_heads=2), make_cluster(devices)
    problem = only(verify(Plan.uniform(4, tp=4, dp=devices // 4), model, cluster, work(168)))
    listed = re.search(r"tp in ([\d, ]+) on", problem.works)
    assert listed
    for tp in map(int, listed.group(1).split(",")):
        assert verify(parse_plan(f"tp={tp}", model, cluster), model, cluster, work(168)) == []
    for text in offered(problem):
        assert verify(parse_plan(text, model, cluster), model, cluster, work(168)) == []


def test_every_rank_needs_some_mlp_width_and_some_vocabulary() -> None:
    model = make_model(query_heads=8, kv_heads=8, mlp=Mlp(width=4))
    assert "4" in str(only(verify(Plan.uniform(4, tp=8), model)))
    assert usable_tensor_degrees(model, 8) == [1, 2, 3, 4]
    assert usable_tensor_degrees(make_model(kv_heads=8, vocab=2), 8) == [1, 2]


@pytest.mark.parametrize(("layers", "pp"), [(10, 3), (10, 4), (7, 2), (3, 3)])
def test_layers_that_do_not_divide_are_split_unevenly_and_none_is_lost(
    layers: int, pp: int
) -> None:
    """User case pub_033."""
    plan = Plan.uniform(layers, pp=pp)
    assert verify(plan, make_model(layers=layers)) == []
    assert plan.num_layers == layers


def test_more_stages_than_layers_are_refused_with_the_depths_that_work() -> None:
    """User case pub_033."""
    problem = only(verify(Plan.uniform(3, pp=4), make_model(layers=3)))
    assert "3 layers" in problem.what and "1, 2, 3" in problem.works


@pytest.mark.parametrize(
    "stages",
    [
        [(0, 2), (2, 3)],  # one layer short
        [(0, 2), (3, 4)],  # a gap
        [(0, 3), (2, 4)],  # an overlap
        [(1, 2), (2, 4)],  # does not start at 0
        [(0, 4), (4, 4)],  # an empty stage
        [(0, 2), (2, 6)],  # more than the model
    ],
)
def test_stages_that_lose_or_repeat_layers_are_refused(stages: list[tuple[int, int]]) -> None:
    """User case pub_033."""
    plan = Plan(stages=tuple(Stage(start=a, stop=b) for a, b in stages))
    problem = only(verify(plan, make_model()))
    assert "4 layers" in problem.what
    fixed = parse_plan(only_text(problem), make_model())
    assert verify(fixed, make_model()) == []


def only_text(problem: Problem) -> str:
    texts = offered(problem)
    assert len(texts) == 1
    return texts[0]


def test_a_plan_without_stages_and_degrees_below_one_are_told_without_a_crash() -> None:
    assert "no stages" in str(verify(Plan(stages=()), make_model())[0])
    assert "data=0" in str(verify(Plan.uniform(4, dp=0), make_model())[0])
    assert "microbatch = 0" in str(verify(Plan.uniform(4, microbatch=0), make_model())[0])
    assert "chunks = 0" in str(verify(Plan.uniform(4).with_(chunks=0), make_model())[0])


def test_an_optimizer_of_whole_matrices_needs_them_whole() -> None:
    workload = replace(work(8), optimizer="muon")
    assert verify(Plan.uniform(4, dp=2, zero=1), make_model(), workload=workload) == []
    problem = only(verify(Plan.uniform(4, dp=2, tp=2), make_model(), workload=workload))
    assert "optimizer=muon with tp=2" in problem.what and "tp=1" in problem.works


def test_a_world_that_is_not_the_cluster_shows_the_equation_and_the_data_degree() -> None:
    cluster = make_cluster(8)
    problem = only(verify(Plan.uniform(4, tp=2, pp=2, dp=3), make_model(), cluster, work(12)))
    assert "tp=2 x pp=2 x cp=1 x dp=3 = 12" in problem.what and "8 devices" in problem.what
    assert problem.works.startswith("dp=2;")


@pytest.mark.parametrize("text", ["tp=2,pp=2,dp=2", "tp=2,pp=4,dp=2", "tp=1,pp=1,dp=5"])
@pytest.mark.parametrize("devices", [1, 3, 4, 6, 16])
def test_the_degrees_offered_for_another_cluster_fit_it(text: str, devices: int) -> None:
    model, cluster = make_model(), make_cluster(devices)
    plan = parse_plan(text, model)
    problems = verify(plan, model, cluster, work(10))
    for problem in problems:
        if "devices of the cluster" in problem.rule:
            for alternative in offered(problem):
                words = dict(word.split("=") for word in f"{text},{alternative}".split(","))
                better = ",".join(f"{key}={value}" for key, value in words.items())
                assert verify(parse_plan(better, model), model, cluster, work(10)) == []


def test_a_batch_that_does_not_divide_shows_world_degrees_equation_and_neighbours() -> None:
    """User case pub_007."""
    plan = Plan.uniform(4, tp=2, dp=2, microbatch=4)
    problem = only(verify(plan, make_model(), make_cluster(4), work(30)))
    for word in ("world=4", "TP=2", "PP=1", "DP=2", "30 / (microbatch 4 x DP 2) = 3.75"):
        assert word in problem.what
    assert problem.works == "microbatch 3 | microbatch 5 | global batch 24 | global batch 32"
    for microbatch in (3, 5):
        assert verify(plan.with_(microbatch=microbatch), make_model(), None, work(30)) == []
    for batch in (24, 32):
        assert verify(plan, make_model(), None, work(batch)) == []


def test_an_accumulation_that_contradicts_the_batch_shows_both_sides() -> None:
    """User case pub_007."""
    plan = Plan.uniform(4, tp=2, dp=2, microbatch=4)
    problem = batch_problem(plan, 8, accumulation=3)
    assert problem is not None
    assert "microbatch 4 x DP 2 x accumulation 3 = 24, but the global batch is 8" in problem.what
    assert "world=4" in problem.what and problem.works.startswith(
        "global batch 24 | accumulation 1"
    )
    assert batch_problem(plan, 24, accumulation=3) is None
    assert batch_problem(plan, 8, accumulation=1) is None


def test_without_an_accumulation_it_is_derived() -> None:
    """User case pub_007."""
    plan = Plan.uniform(4, dp=2, microbatch=4)
    assert batch_problem(plan, 24) is None and plan.num_microbatches(24) == 3


@pytest.mark.parametrize("batch", [0, -8, 1])
def test_a_batch_smaller_than_one_round_is_refused(batch: int) -> None:
    problem = batch_problem(Plan.uniform(4, dp=2, microbatch=4), batch)
    assert problem is not None and "global batch 8" in problem.works


@pytest.mark.parametrize(("tp", "cp", "length"), [(4, 1, 66), (1, 4, 66), (2, 2, 30), (2, 1, 1)])
def test_sequences_divide_over_context_and_sequence_parallel_ranks(
    tp: int, cp: int, length: int
) -> None:
    plan = Plan.uniform(4, tp=tp, cp=cp, sequence_parallel=True)
    problem = only(verify(plan, make_model(), None, work(2, length)))
    lengths = re.findall(r"sequence length (\d+)", problem.works)
    assert lengths and str(length) in problem.what
    for better in map(int, lengths):
        assert verify(plan, make_model(), None, work(2, better)) == []


def test_without_sequence_parallelism_the_tensor_degree_does_not_bind_the_sequence() -> None:
    assert verify(Plan.uniform(4, tp=4), make_model(), None, work(2, 66)) == []


def test_learned_positions_bound_the_sequence_and_rotary_ones_do_not() -> None:
    learned = make_model(learned_positions=True)
    assert "128" in only(verify(Plan.uniform(4), learned, None, work(1, 256))).works
    assert verify(Plan.uniform(4), make_model(), None, work(1, 256)) == []


@pytest.mark.parametrize(("ep", "dp", "is_legal"), [(2, 4, True), (4, 4, False), (3, 4, False)])
def test_experts_and_the_ranks_that_share_them_divide(ep: int, dp: int, is_legal: bool) -> None:
    model = make_model(mlp=Experts(count=6, top_k=2, width=32))
    assert (verify(Plan.uniform(4, ep=ep, dp=dp), model) == []) == is_legal


def test_a_shard_set_holds_every_expert() -> None:
    model = make_model(mlp=Experts(count=8, top_k=2, width=32))
    plan = Plan.uniform(4, ep=4, dp=8, zero=3, hybrid_shard=2)
    assert "a multiple of 4" in only(verify(plan, model)).works
    assert verify(plan.with_(hybrid_shard=4), model) == []
    assert verify(plan.with_(zero=0), model) == []


def test_routers_have_settings_where_there_are_any() -> None:
    plain, sparse = make_model(), make_model(mlp=Experts(count=8, top_k=2, width=32))
    ring = Plan.uniform(4, cp=2)
    for model, plan, losses, factor, word in (
        (plain, Plan.uniform(4), True, None, "no [moe] section"),
        (plain, Plan.uniform(4), False, 2.0, "no [moe] section"),
        (sparse, ring, True, 1.0, "cp=1"),
        (sparse, ring, True, None, ""),
        (sparse, Plan.uniform(4), True, 1.0, ""),
    ):
        found = [*routing_problems(plan, model, has_losses=losses, capacity_factor=factor)]
        assert word in found[0].works if word else not found


def test_expert_and_head_limits_are_listed_together_with_pairs_that_work() -> None:
    model = make_model(kv_heads=8, mlp=Experts(count=6, top_k=2, width=32))
    cluster = make_cluster(12)
    problems = verify(Plan.uniform(4, ep=4, tp=12), model, cluster, work(24))
    texts = [str(problem) for problem in problems]
    assert any("6 experts" in text for text in texts)
    assert any("8 query heads and 8 KV heads" in text for text in texts)
    pairs = [text for p in problems if "experts" in p.what for text in offered(p)]
    assert pairs
    for text in pairs:
        assert "ep=" in text and "tp=" in text
        assert verify(parse_plan(text, model, cluster), model, cluster, work(24)) == []


def test_a_dense_model_has_no_expert_parallelism() -> None:
    assert only(verify(Plan.uniform(4, ep=2, dp=2), make_model())).works == "ep=1"


def test_chunks_need_a_schedule_that_has_them() -> None:
    problem = only(verify(Plan.uniform(4, pp=2, chunks=2), make_model()))
    assert "chunks=2 with schedule=1f1b" in problem.what
    assert problem.works == "chunks=1, or schedule in interleaved, breadth-first, zb-v, dualpipe-v"
    for schedule in ("interleaved", "breadth-first", "zb-v", "dualpipe-v"):
        assert verify(Plan.uniform(4, pp=2, chunks=2, schedule=schedule), make_model()) == []


def test_a_schedule_with_too_few_micro_batches_names_both_numbers() -> None:
    plan = Plan.uniform(4, pp=4, schedule="zb-h2", microbatch=2)
    problem = only(verify(plan, make_model(), workload=work(12)))
    assert problem.what == "6 micro-batches on 4 pipeline ranks with schedule=zb-h2"
    assert "7 micro-batches or more" in problem.works
    assert verify(plan, make_model(), workload=work(14)) == []


def test_the_stages_of_a_v_that_share_a_rank_have_the_same_degrees() -> None:
    outer, inner = Stage(start=0, stop=1, data=2), Stage(start=1, stop=2, tensor=2)
    stages = (outer, inner, replace(inner, start=2, stop=3), replace(outer, start=3, stop=4))
    assert verify(Plan(stages=stages, chunks=2, schedule="zb-v"), make_model()) == []
    text = str(verify(Plan(stages=stages, chunks=2, schedule="interleaved"), make_model()))
    assert "stage 2 has other degrees or devices than stage 0" in text


def test_chunks_of_one_pipeline_rank_have_the_same_degrees() -> None:
    stages = tuple(Stage(start=i, stop=i + 1, data=data) for i, data in enumerate((2, 1, 1, 1)))
    text = str(verify(Plan(stages=stages, chunks=2, schedule="interleaved"), make_model()))
    assert "stage 2 has other degrees or devices than stage 0" in text


def test_listed_devices_cover_every_rank_once() -> None:
    def stages(*devices: tuple[int, ...]) -> Plan:
        return Plan(
            stages=tuple(
                Stage(start=2 * i, stop=2 * i + 2, tensor=2, devices=d)
                for i, d in enumerate(devices)
            )
        )

    assert verify(stages((0, 2), (1, 3)), make_model()) == []
    assert "(0, 1), (1, 2)" in only(verify(stages((0, 1), (1, 2)), make_model())).what
    assert "devices" in only(verify(stages((0,), (1, 2, 3)), make_model())).what


def test_hybrid_shards_divide_the_data_axis() -> None:
    assert "0, 1, 2, 4" in only(verify(Plan.uniform(4, dp=4, hybrid_shard=3), make_model())).works


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_all_zero_stages_exist(zero: int) -> None:
    assert verify(Plan.uniform(4, dp=2, zero=zero), make_model()) == []


def test_an_unknown_version_and_unknown_dtypes_are_refused() -> None:
    plan = Plan.uniform(4, version=2, precision=Precision(moments="bf17"))
    text = "\n".join(map(str, verify(plan, make_model())))
    assert "version = 2" in text and "moments = bf16" in text


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_fewer_micro_batches_than_stages_are_legal(microbatches: int, schedule: str) -> None:
    """User case pub_034."""
    plan = Plan.uniform(4, pp=4, schedule=schedule)
    assert verify(plan, make_model(), None, work(microbatches)) == []


@pytest.mark.parametrize(
    ("plan", "word"),
    [
        (Plan.uniform(4, offload="parameters"), "offload=parameters"),
        (Plan.uniform(4, precision=Precision(parameter="fp8")), "parameter in fp8"),
    ],
)
def test_what_is_priced_but_not_run_says_why(plan: Plan, word: str) -> None:
    assert any(word in reason for reason in unrunnable(plan, make_model()))
    assert verify(plan, make_model()) == []


def test_gradients_reduced_each_micro_batch_need_zero_2() -> None:
    plan = Plan.uniform(4, dp=2, accumulation="reduce_each", zero=1)
    assert "zero=2 or 3" in only(verify(plan, make_model())).works
    assert verify(plan.with_(zero=2), make_model()) == []


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_zero_stage_runs(zero: int) -> None:
    plan = Plan.uniform(4, dp=4, zero=zero, hybrid_shard=2, offload="optimizer")
    assert unrunnable(plan, make_model()) == []


def test_plans_of_the_three_parallelisms_run() -> None:
    plan = Plan.uniform(4, tp=2, pp=2, dp=2, zero=1, sequence_parallel=True)
    assert unrunnable(plan, make_model()) == []
    assert unrunnable(plan.with_(precision=Precision.mixed()), make_model()) == []


def large(model: Model, cluster: Cluster) -> list[Problem]:
    return verify(Plan.uniform(model.num_layers, tp=7, pp=5), model, cluster, work(1024))


def test_messages_about_large_clusters_are_short() -> None:
    model = make_model(layers=96, query_heads=96, kv_heads=8, mlp=Mlp(width=8192))
    for problem in large(model, make_cluster(4096, per_node=8)):
        assert len(str(problem)) < 600


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_windows_and_bent_scores_run_over_context_ranks(method: str) -> None:
    model = replace(make_model(), family="gemma2")
    attention = replace(model.blocks[0].attention, window=8)
    windowed = replace(model, blocks=(replace(model.blocks[0], attention=attention),) * 4)
    assert unrunnable(Plan.uniform(4, cp=2, context_method=method), windowed) == []


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "cp", "usable"),
    [
        (8, 2, 1, 2, None),
        (8, 2, 1, 8, None),  # a KV head on 4 ranks each
        (8, 2, 2, 4, None),
        (8, 2, 4, 2, None),  # two ranks have each KV head already
        (8, 2, 4, 4, "1, 2"),
        (6, 3, 1, 2, "1, 3, 6"),
        (6, 3, 2, 2, None),  # shares of 4 and 2 query heads, 2 and 1 KV heads
        (6, 3, 2, 4, "1, 2"),
    ],
)
def test_ulysses_deals_whole_heads(
    heads: int, kv_heads: int, tp: int, cp: int, usable: str | None
) -> None:
    model = make_model(query_heads=heads, kv_heads=kv_heads)
    plan = Plan.uniform(4, tp=tp, cp=cp)
    assert verify(plan, model) == []
    broken = verify(plan.with_(context_method="ulysses"), model)
    if usable is None:
        assert broken == []
        return
    problem = only(broken)
    assert f"{heads} query heads" in problem.what and f"cp={cp}" in problem.what
    assert problem.works == f"context_method=ring, or cp in {usable}"


def own(*degrees: dict[str, int], **settings: object) -> Plan:
    stages = (Stage(start=i, stop=i + 1, **degree) for i, degree in enumerate(degrees))
    return Plan(stages=tuple(stages), **settings)


def test_stages_with_their_own_degrees_run() -> None:
    plan = own({"tensor": 2}, {"data": 2}, {"context": 2}, {}, microbatch=2)
    assert verify(plan, make_model(), make_cluster(7), work(8)) == []
    assert unrunnable(plan, make_model()) == []


@pytest.mark.parametrize("microbatch", [1, 2, 4, 5])
def test_a_micro_batch_divides_over_the_data_ranks_of_every_stage(microbatch: int) -> None:
    plan = own({"data": 2}, {"data": 3}, {"data": 4}, {}, microbatch=microbatch)
    problem = only(verify(plan, make_model()))
    assert "data=3 of stage 1" in problem.what and f"microbatch={microbatch} x" in problem.what
    for text in offered(problem):
        better = plan.with_(microbatch=int(text.removeprefix("microbatch=")))
        assert verify(better, make_model(), None, work(2 * better.microbatch)) == []


def test_the_global_batch_is_whole_rounds_of_the_first_stage() -> None:
    plan = own({"data": 2}, {"tensor": 2}, {}, {}, microbatch=2)
    assert verify(plan, make_model(), None, work(8)) == []
    assert plan.num_microbatches(8) == 2
    assert [plan.microbatch_of(stage) for stage in plan.stages] == [2, 4, 4, 4]
    assert "global batch" in only(verify(plan, make_model(), None, work(6))).what


def test_every_stage_divides_the_sequence_and_the_shard_sets() -> None:
    plan = own({"tensor": 2}, {"context": 3, "tensor": 2}, {}, {}, sequence_parallel=True)
    problems = verify(plan, make_model(), None, work(2, length=33))
    assert [p.what for p in problems] == [
        "sequence length 33 over cp=1 x tp=2",
        "sequence length 33 over cp=3 x tp=2",
    ]
    shards = own({"data": 4}, {"data": 2}, {"data": 4}, {"data": 4}, zero=1, hybrid_shard=4)
    assert "hybrid_shard in 0, 1, 2" in only(verify(shards, make_model())).works


def test_devices_are_in_ascending_order() -> None:
    plan = own({"tensor": 2, "devices": (1, 0)}, {"devices": (2,)}, {"devices": (3,)}, {})
    plan = plan.with_(stages=(*plan.stages[:3], replace(plan.stages[3], devices=(4,))))
    assert "[0, 1] and [2]" in only(verify(plan, make_model())).works


def test_all_that_stages_break_is_listed_at_once() -> None:
    plan = own({"tensor": 3, "data": 2}, {"data": 3}, {}, {}, hybrid_shard=2, schedule="1f1c")
    text = "\n".join(map(str, verify(plan, make_model(), make_cluster(4), work(3, length=129))))
    for word in ("tp=3", "data=3 of stage 1", "hybrid_shard", "1f1c", "devices", "global batch 3"):
        assert word in text
