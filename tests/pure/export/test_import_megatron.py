"""A Megatron-LM command line as a plan: what it says, what is assumed, what contradicts itself."""

from __future__ import annotations

import pytest
from export_samples import DENSE, SPARSE, cluster

from triptych.errors import InputError, PlanError
from triptych.export.imported import Asked, Imported
from triptych.export.read import imported_from
from triptych.export.read_megatron import layout_counts
from triptych.model.model import Model
from triptych.plan.short import parse_plan

BASE = "--micro-batch-size 1 --global-batch-size 32 --seq-length 1024 --bf16"


def read(arguments: str, ranks: int = 8, of: Model = DENSE, head: str = "") -> Imported:
    text = f"{head}torchrun pretrain_gpt.py {BASE} {arguments}\n"
    return imported_from(text, "run.sh", Asked(model=of, cluster=cluster(ranks)))


def refusals(arguments: str, ranks: int = 8, head: str = "") -> list[str]:
    with pytest.raises(PlanError) as caught:
        read(arguments, ranks, head=head)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("arguments", "plan"),
    [
        ("", "dp=8"),
        ("--tensor-model-parallel-size 2 --sequence-parallel", "tp=2,sp=1"),
        ("--sequence-parallel", "dp=8"),
        ("--tensor-model-parallel-size=2 --pipeline-model-parallel-size=2", "tp=2,pp=2"),
        ("--context-parallel-size 2 --cp-comm-type a2a", "cp=2,context_method=ulysses"),
        ("--use-distributed-optimizer", "zero=1"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "zero=2"),
        ("--use-megatron-fsdp", "zero=3"),
        ("--use-torch-fsdp2", "zero=3"),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 2",
         "zero=1,hybrid_shard=4"),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
         "pp=2,chunks=2,schedule=interleaved"),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*5|(t)*7L'",
         "pp=2,layers=5+7"),
        ("--pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 2",
         "pp=4,layers=4+3+3+2"),
        ("--recompute-activations", "recompute=selective"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
         "recompute=full"),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 6",
         "recompute=full,recompute_every=2"),
        ("--attention-backend flash", "attention=flash"),
    ],
)  # fmt: skip
def test_arguments_are_these_settings(arguments: str, plan: str) -> None:
    wanted = parse_plan(plan, DENSE, cluster(8))
    wanted = wanted.with_(bucket_bytes=read(arguments).plan.bucket_bytes)
    assert read(arguments).plan == wanted


def test_dtypes() -> None:
    kinds = read("--grad-reduce-in-bf16").plan.precision
    assert (kinds.parameter, kinds.gradient, kinds.reduction) == ("bf16", "bf16", "bf16")
    aware = "--use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype bf16"
    assert read(f"{aware} --exp-avg-sq-dtype bf16").plan.precision.moments == "bf16"


def test_a_fused_loss_is_read() -> None:
    usual = "--tensor-model-parallel-size 2"
    assert not read(usual).fuses_loss
    assert read(f"{usual} --cross-entropy-loss-fusion").fuses_loss


def test_experts() -> None:
    found = read("--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 4", of=SPARSE)
    assert found.plan.ep == 4 and found.differs == ()


def test_ranks_come_from_the_launcher_from_slurm_or_from_the_cluster() -> None:
    text = f"torchrun --nproc_per_node 4 --nnodes=2 t.py {BASE}"
    asked = Asked(model=DENSE, cluster=cluster(8))
    assert not any("ranks" in line for line in imported_from(text, "x", asked).assumed)
    assert any("8 ranks" in line for line in read("").assumed)
    slurm = "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\n"
    assert "starts 16 ranks" in refusals("", head=slurm)[0]


def test_all_contradictions_are_told_at_once() -> None:
    told = refusals("--tensor-model-parallel-size 3 --pipeline-model-parallel-size 5 --fp16")
    assert len(told) >= 3
    for part in ("3 x 5 x 1 = 15", "both --bf16 and --fp16", "12 layers of small on PP = 5"):
        assert any(part in line for line in told), told


def test_a_batch_that_does_not_divide_is_told_with_the_ranks() -> None:
    (line,) = refusals("--tensor-model-parallel-size 4 --global-batch-size 33")
    assert "global batch 33 with micro-batch 1 and dp=2" in line and "multiple of 2" in line


def test_rules_of_plans_hold_for_scripts_too() -> None:
    assert any("KV heads" in line for line in refusals("--tensor-model-parallel-size 16", ranks=16))


def test_a_variable_without_a_value_is_named() -> None:
    assert any("$TP" in line for line in refusals("--tensor-model-parallel-size $TP"))


def test_unknown_arguments_are_listed_and_known_idle_ones_are_not() -> None:
    found = read("--magic 1 2 --tp-comm-overlap --lr 1e-4 --save ck --log-interval 10 2>&1 | tee x")
    assert found.not_understood == ("--magic 1 2", "--tp-comm-overlap")


def test_a_script_of_another_model_says_where_it_differs() -> None:
    shape = "--num-layers 24 --hidden-size 128 --num-attention-heads 16 --vocab-size $V"
    assert read(shape).differs == (
        "--num-layers 24 in the file, 12 in small",
        "--num-attention-heads 16 in the file, 8 in small",
        "--num-query-groups 16 by default in the file, 4 in small",
    )


def test_the_command_line_wins_over_the_file_and_says_so() -> None:
    asked = Asked(model=DENSE, cluster=cluster(8), sequence_length=2048, global_batch=64)
    found = imported_from(f"t.py {BASE}", "x", asked)
    assert (found.workload.sequence_length, found.workload.global_batch) == (2048, 64)
    assert {"--seq 2048, not 1024", "--batch 64, not 32"} <= set(found.assumed)


def test_layouts_are_unrolled() -> None:
    assert layout_counts("Ettt|(tt|)*3,L") == [3, 2, 2, 2, 0]


@pytest.mark.parametrize("text", ["echo hello", "", "{]", "[1]"])
def test_a_file_of_nobody_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        imported_from(text, "notes.txt", Asked(model=DENSE, cluster=cluster(8)))


def test_buckets_are_megatrons_own_unless_given() -> None:
    assert read("").plan.bucket_bytes == 160_000_000
    assert read("--ddp-bucket-size 1000").plan.bucket_bytes == 4000
    assert read("--ddp-bucket-size 1000 --grad-reduce-in-bf16").plan.bucket_bytes == 2000
