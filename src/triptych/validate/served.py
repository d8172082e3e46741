"""A serving row as a case to price: model, cluster, plan, engine, load, and what was measured."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from triptych.cluster.cluster import Cluster
from triptych.cost.serving.engine import Engine
from triptych.cost.serving.engines import FAMILIES, ROCM, ROCM_ROW_WISE
from triptych.model.model import Model
from triptych.plan.plan import even_split
from triptych.plan.serving import ServingPlan, ServingWorkload
from triptych.validate.machine import cluster_of
from triptych.validate.named import named_model
from triptych.validate.table import Row, Skip

DTYPES = {"fp8": "fp8", "fp16": "fp16", "bf16": "bf16", "": "bf16"}
"""Weights by what a row states; a blank cell is the model's own, 16 bit."""

WIDE_ATTENTION = ("fp8-meta",)
"""Words for checkpoints that keep attention in 16 bit (Meta's own fp8 of Llama 3.1 405B)."""

ALL_AT_ONCE = ("inf", "offline", "batch 1", "saturated")

ROUNDS = 10.0
"""Requests of each user of a closed-loop benchmark that states no number (AIPerf's default)."""

SERVED = 0.9
"""Share of the offered requests that a server answers which is not overloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One row, ready to be priced. What it does not measure, or has a queue in, is None."""

    row: Row
    model: Model
    cluster: Cluster
    workload: ServingWorkload
    plan: ServingPlan
    engine: Engine
    ttft_s: float | None
    tpot_s: float | None
    tokens_per_s: float | None  # of answers


def served(row: Row) -> Served:
    """The case of a row. Raises Skip with the reason if it cannot be priced or compared."""
    model, engine = named_model(row), engine_of(row)
    workload = _workload(row)
    plan = plan_of(row, model, engine, workload)
    measured = _measured(row, workload)
    if not any(measured):
        raise Skip("nothing measured")
    ttft, tpot, tokens = measured
    return Served(
        row=row,
        model=model,
        cluster=_cluster(row, plan.tensor),
        workload=workload,
        plan=plan,
        engine=engine,
        ttft_s=ttft,
        tpot_s=tpot,
        tokens_per_s=tokens,
    )


def plan_of(row: Row, model: Model, engine: Engine, workload: ServingWorkload) -> ServingPlan:
    """The plan of a row under an engine. Raises Skip if its degrees are not known."""
    dtype = _weights(row)
    tensor, stages, count = row.count("tp"), row.count("pp") or 1, row.count("n_gpus")
    if not tensor or not count:
        raise Skip("degrees not stated")
    if count % (tensor * stages):
        raise Skip("degrees and number of GPUs disagree")
    return ServingPlan(
        layers=even_split(model.num_layers, stages),
        tensor=tensor,
        replicas=count // (tensor * stages),
        batch=_stated(row, r"max_num_seqs (\d+)") or engine.max_batch,
        chunk=_chunk(row, engine, workload),
        weights=dtype,
        cache="fp8" if dtype == "fp8" and engine.narrow_cache else "bf16",
        wide_attention=row.says(*WIDE_ATTENTION),
    )


def _cluster(row: Row, tensor: int) -> Cluster:
    """The row's cluster, tensor ranks in one node: boards of one device are joined by its link."""
    cluster = cluster_of(row)
    nodes = cluster.groups[0]
    if tensor <= nodes.devices_per_node:
        return cluster
    joined = replace(nodes, nodes=nodes.num_devices // tensor, devices_per_node=tensor)
    return replace(cluster, groups=(joined,))


# --- what was asked ------------------------------------------------------------------------------


def _weights(row: Row) -> str:
    stated = row.text("precision").lower()
    quantised = re.search(r"gemm_quant=(nvfp4|fp4|int\d+\w*|w4\w*)", row.text("notes"))
    if stated not in DTYPES or quantised:
        raise Skip(f"weights in {quantised.group(1) if quantised else stated} are not priced")
    return DTYPES[stated]


def _workload(row: Row) -> ServingWorkload:
    rate = row.text("request_rate").lower()
    if rate and not _is_number(rate) and not rate.startswith(ALL_AT_ONCE):
        raise Skip("arrivals not stated")
    offered = float(rate) if _is_number(rate) else None
    users = None if offered else _users(row)
    return ServingWorkload(
        input_tokens=_length(row, "input_len"),
        output_tokens=max(1.0, _length(row, "output_len")),
        rate=offered,
        concurrency=users,
        rounds=ROUNDS if users and not rate else None,
        streams=not rate or offered is not None,
    )


def _length(row: Row, column: str) -> float:
    text = row.text(column)
    if not _is_number(text):
        raise Skip("lengths not stated")
    return float(text)


def _users(row: Row) -> float | None:
    """Requests in flight; None: as many as there is room for."""
    text = row.text("batch_or_concurrency").lower().removeprefix("num_prompts=")
    if row.text("request_rate").lower() == "batch 1":
        return 1.0
    if not _is_number(text):
        return None
    ranks = (row.count("tp") or 1) * (row.count("pp") or 1)
    is_each = row.text("request_rate").lower() == "offline"  # the batch of one engine
    return float(text) * ((row.count("n_gpus") or 1) // ranks if is_each else 1)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?", text) is not None


def _chunk(row: Row, engine: Engine, workload: ServingWorkload) -> int:
    """Most tokens of a step; a prompt that is not cut needs one as long."""
    chunk = _stated(row, r"max_num_batched_tokens (\d+)") or engine.chunk_tokens
    return chunk if engine.is_chunked else max(chunk, round(workload.input_tokens))


def _stated(row: Row, pattern: str) -> int | None:
    found = re.search(pattern, row.text("notes"))
    return int(found.group(1)) if found else None


# --- what was measured ---------------------------------------------------------------------------


def _measured(
    row: Row, workload: ServingWorkload
) -> tuple[float | None, float | None, float | None]:
    ttft, tpot = row.number("ttft_ms"), row.number("tpot_ms")
    finished = row.number("requests_per_s")
    overloaded = bool(workload.rate and finished and finished < SERVED * workload.rate)
    has_queue = row.text("request_rate").lower() == "inf" or overloaded
    tokens = _tokens_per_s(row, workload) if workload.rate is None or overloaded else None
    return (
        None if ttft is None or has_queue else ttft / 1e3,
        None if tpot is None else tpot / 1e3,
        tokens,
    )


def _tokens_per_s(row: Row, workload: ServingWorkload) -> float | None:
    """Tokens of answers a second, stated or by the requests or all tokens."""
    if tokens := row.number("output_tokens_per_s"):
        return tokens
    if tokens := row.number("total_tokens_per_s"):
        return tokens * workload.output_tokens / workload.tokens
    if requests := row.number("requests_per_s"):
        return requests * workload.output_tokens
    return None


# --- engines -------------------------------------------------------------------------------------


EAGER_S = 1.6e-5
"""Host seconds of a kernel that no graph launches."""


def engine_of(row: Row, families: Mapping[str, Engine] = FAMILIES) -> Engine:
    """The engine of a row by family and version, with what its notes say of the run."""
    engine = families[family_of(row)]
    changes: dict[str, Any] = {}
    if row.says("enforce-eager", "h100sxm5_vs_mi300x"):  # the comparison's README
        changes["eager_s"] = EAGER_S
    if row.text("gpu").startswith(("MI", "AMD")):
        changes |= ROCM
        changes |= ROCM_ROW_WISE if row.says("fp8-meta") else {}
    if row.says("chunked_prefill true"):
        changes["is_chunked"] = True
    if row.text("request_rate") in ("offline static batch", "batch 1"):
        changes |= {"is_chunked": False, "chunk_tokens": STATIC_TOKENS}
    return replace(engine, **changes)


STATIC_TOKENS = 65536
"""Most prompt tokens at once of an engine that computes a whole batch's prompts in one step."""


def family_of(row: Row) -> str:
    """The key of `FAMILIES` that a row's engine and version mean."""
    name, version = row.text("engine").lower(), _version(row.text("date_or_version"))
    if "tgi" in name or "sglang" in name:
        return "tgi" if "tgi" in name else "sglang"
    if "vllm" in name:
        is_new = version >= (0, 8) if version else row.text("date_or_version")[:4] > "2024"
        return "vllm" if is_new else "vllm 0"
    if any(word in name for word in ("trtllm", "tensorrt", "nim", "lmdeploy")):
        return _tensorrt(name, version)
    return "triptych"


def _tensorrt(name: str, version: tuple[int, int] | None) -> str:
    """TensorRT-LLM and its like (NIM and LMDeploy have versions of their own)."""
    if "nim" in name or "lmdeploy" in name or version is None:
        return "tensorrt-llm" if "pytorch" in name or "trtllm" in name else "tensorrt-llm c++"
    if "pytorch" in name or version >= (0, 18):
        return "tensorrt-llm"
    if version < (0, 9):
        return "tensorrt-llm static"
    return "tensorrt-llm early" if version < (0, 11) else "tensorrt-llm c++"


def _version(text: str) -> tuple[int, int] | None:
    """Major and minor of the version in a text; a date is none."""
    plain = re.sub(r"\d{4}-\d{2}(-\d{2})?", "", text)
    found = re.search(r"(\d+)\.(\d+)", plain)
    return (int(found.group(1)), int(found.group(2))) if found else None
