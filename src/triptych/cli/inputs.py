"""What several verbs read in the same way: the values behind MODEL, --cluster, --seq, --batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triptych.capture.late import captured
from triptych.cli.answer import say
from triptych.cluster.cluster import Cluster
from triptych.cluster.text import parse_cluster
from triptych.model.count import parameters
from triptych.model.load import load_model
from triptych.model.model import Model
from triptych.plan.workload import Workload
from triptych.units import format_bytes, format_count

USUAL_SEQUENCE = 4096
USUAL_BATCH_PER_DEVICE = 8


def training_workload(
    model: Model, cluster: Cluster, sequence: int | None, batch: int | None
) -> Workload:
    """The workload that options describe, their defaults filled in."""
    return Workload(
        sequence_length=sequence or min(USUAL_SEQUENCE, model.max_position),
        global_batch=batch or USUAL_BATCH_PER_DEVICE * cluster.num_devices,
    )


def read_model(text: str) -> Model:
    """The model behind MODEL; says so when it has to be read off its module first."""
    return load_model(text, capture=_captured)


def _captured(config: Mapping[str, Any], name: str) -> Model:
    family = config.get("model_type")
    say(f"model_type {family!r} is not described here: reading its graph off transformers ...")
    return captured(config, name)


def read_cluster_option(text: str) -> Cluster:
    """The cluster behind `--cluster`; says so when it has to measure this machine first."""
    if text == "local":
        say("looking at this machine ...")
    return parse_cluster(text)


def headline(model: Model, cluster: Cluster, workload: Workload) -> tuple[str, dict[str, object]]:
    """What a plan or a price is for, as text and as JSON."""
    count = parameters(model)
    devices = " + ".join(
        f"{group.num_devices} x {group.device.name} of {format_bytes(group.device.memory_bytes)}"
        for group in cluster.groups
    )
    lines = [
        f"model     {model.name}: {model.num_layers} layers, {format_count(count)} parameters",
        f"cluster   {cluster.name}: {devices}",
        f"step      {workload.global_batch} sequences of {workload.sequence_length} tokens",
    ]
    if model.ends:
        lines.append("graph     read off transformers' module: the family is not described here")
    lines += [f"unreliable: {reason}" for reason in model.unreliable]
    document: dict[str, object] = {
        "model": model.name,
        "parameters": count,
        "cluster": cluster.name,
        "num_devices": cluster.num_devices,
        "sequence_length": workload.sequence_length,
        "global_batch": workload.global_batch,
        "unreliable": list(model.unreliable),
    }
    return "\n".join(lines), document
