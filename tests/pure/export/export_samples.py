"""Legal plans for the tests of exports, drawn whole and kept when `rules.verify` has no word."""

from __future__ import annotations

from hypothesis import assume
from hypothesis import strategies as st

from triptych.cluster.cluster import Cluster, Device, Link, NodeGroup
from triptych.export.target import Subject, used
from triptych.model.model import Attention, Block, Experts, Mlp, Model
from triptych.plan.plan import Plan, Precision, even_split
from triptych.plan.rules import verify
from triptych.plan.workload import Workload
from triptych.schedule.traits import SCHEDULES, TRAITS


def model(experts: Experts | None = None, layers: int = 12) -> Model:
    attention = Attention(query_heads=8, kv_heads=4, head_dim=16)
    block = Block(attention=attention, mlp=experts or Mlp(width=352))
    return Model(
        name="small",
        family="llama",
        hidden=128,
        blocks=(block,) * layers,
        vocab=2048,
        tied=False,
        max_position=4096,
    )


DENSE = model()
SPARSE = model(Experts(count=8, top_k=2, width=64))


def cluster(devices: int) -> Cluster:
    device = Device(
        name="gpu",
        kind="cuda",
        memory_bytes=8e9,
        memory_bytes_per_s=2e12,
        peak_flops={"bf16": 300e12, "fp32": 20e12, "fp16": 300e12, "fp8": 600e12},
    )
    link = Link(name="inside", latency_s=2e-6, bytes_per_s=300e9)
    per_node = 8 if devices % 8 == 0 else devices
    group = NodeGroup(
        nodes=devices // per_node, devices_per_node=per_node, device=device, link=link
    )
    return Cluster(name=f"{devices} gpus", groups=(group,), network=link)


def subject(plan: Plan, of: Model = DENSE, batch: int = 0, length: int = 1024) -> Subject:
    rows = plan.round_rows
    workload = Workload(sequence_length=length, global_batch=batch or rows * 2 * plan.pp)
    return Subject(
        plan=plan, model=of, cluster=cluster(plan.world_size), workload=workload, source="small"
    )


def uniform(**settings: object) -> Plan:
    """A plan of the small model with some settings, bf16 over fp32."""
    given = {"precision": Precision.mixed(), **settings}
    return Plan.uniform(DENSE.num_layers, **given)  # type: ignore[arg-type]


DTYPES = st.sampled_from(["fp32", "bf16", "fp16", "fp8"])


@st.composite
def subjects(draw: st.DrawFn) -> Subject:
    """Any legal uniform plan of a small dense or sparse model, with its workload."""
    of = draw(st.sampled_from([DENSE, SPARSE]))
    degree = st.sampled_from([1, 2, 4])
    schedule = draw(st.sampled_from(SCHEDULES))
    least, most = TRAITS[schedule].least_chunks, TRAITS[schedule].most_chunks
    chunks = draw(st.integers(least, most or 3))
    dp, pp = draw(degree), draw(st.integers(1, 3))
    zero = draw(st.integers(0, 3))
    plan = Plan.uniform(
        of.num_layers,
        pp=pp,
        dp=dp,
        tp=draw(degree),
        cp=draw(st.sampled_from([1, 1, 2])),
        ep=draw(st.sampled_from([1, 2])) if of is SPARSE else 1,
        chunks=chunks,
        layers=draw(layer_counts(of.num_layers, pp * chunks)),
        schedule=schedule,
        zero=zero,
        hybrid_shard=draw(st.sampled_from([0, dp])) if zero else 0,
        accumulation=draw(st.sampled_from(["auto", "reduce_last", "reduce_each"])),
        bucket_bytes=draw(st.sampled_from([1 << 20, 1 << 25])),
        prefetch=draw(st.integers(0, 2)),
        microbatch=draw(st.sampled_from([1, 2, 3])),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        recompute_every=draw(st.sampled_from([1, 1, 2])),
        shard_activations=draw(st.booleans()),
        sequence_parallel=draw(st.booleans()),
        offload=draw(st.sampled_from(["none", "none", "optimizer", "activations", "parameters"])),
        attention=draw(st.sampled_from(["sdpa", "eager", "flash"])),
        context_method=draw(st.sampled_from(["ring", "ulysses"])),
        compile=draw(st.booleans()),
        precision=draw(precisions()) if draw(st.booleans()) else Precision(parameter=draw(DTYPES)),
    )
    drawn = subject(plan, of)
    assume(not verify(plan, of, drawn.cluster, drawn.workload))
    return drawn


@st.composite
def layer_counts(draw: st.DrawFn, total: int, stages: int) -> tuple[int, ...] | None:
    """Layers by stage: as even as can be, or one moved from the first stage to the last."""
    counts = list(even_split(total, stages))
    if stages > 1 and counts[0] > 1 and draw(st.booleans()):
        counts[0] -= 1
        counts[-1] += 1
    return tuple(counts)


def differing(ours: Plan, theirs: Plan, noted: set[str]) -> dict[str, tuple[object, object]]:
    """Settings with an effect in which two plans differ, those that are `noted` apart.

    Another ZeRO stage brings settings of its own.
    """
    noted = noted | ({"hybrid_shard", "accumulation", "prefetch"} if "zero" in noted else set())
    first, second = used(ours), used(theirs)
    names = (first.keys() | second.keys()) - noted
    return {n: (first.get(n), second.get(n)) for n in names if first.get(n) != second.get(n)}


def precisions() -> st.SearchStrategy[Precision]:
    names = ("parameter", "gradient", "reduction", "master", "moments")
    return st.builds(Precision, **dict.fromkeys(names, DTYPES))
