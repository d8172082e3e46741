"""A serving plan in one line: `tp=4,pp=2,batch=128,chunk=4096,weights=fp8`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from triptych.cluster.cluster import Cluster
from triptych.errors import PlanError, Problem, nearest
from triptych.model.model import Model
from triptych.plan.plan import Plan, even_split
from triptych.plan.rules import verify
from triptych.plan.serving import ServingPlan
from triptych.plan.short import default_precision

COUNTS = ("tp", "pp", "replicas", "batch", "chunk")
DTYPES = ("bf16", "fp16", "fp8", "fp32")
KEYS = (*COUNTS, "layers", "weights", "cache")
EXAMPLE = "tp=4,pp=2,batch=128,chunk=4096"


def read_settings(text: str) -> dict[str, str]:
    """Settings and values by their names. Raises PlanError with every word that is wrong."""
    settings: dict[str, str] = {}
    problems: list[Problem] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (piece.strip() for piece in word.partition("="))
        if not equals or not value:
            problems.append(Problem(f"'{word}' in the plan", "a plan is key=value,...", EXAMPLE))
        elif key not in KEYS:
            close = nearest(key, KEYS) or KEYS
            what = f"'{key}' in a serving plan"
            problems.append(Problem(what, "is not a setting of one", ", ".join(close)))
        elif key in settings:
            problems.append(Problem(f"'{word}' in the plan", f"{key} is given once"))
        else:
            settings[key] = value
            problems += _value_problems(key, value)
    if problems:
        raise PlanError(problems)
    return settings


def _value_problems(key: str, value: str) -> list[Problem]:
    if key in ("weights", "cache"):
        if value in DTYPES:
            return []
        return [Problem(f"{key}={value}", "is a dtype that is priced", ", ".join(DTYPES))]
    parts = value.split("+") if key == "layers" else [value]
    if all(part.isdigit() and int(part) > 0 for part in parts):
        return []
    rule = (
        "layers are counts from 1 joined by '+'" if key == "layers" else "is a whole number from 1"
    )
    return [Problem(f"{key}={value}", rule, "layers=17+15" if key == "layers" else f"{key}=1")]


def layers_of(settings: Mapping[str, str], num_layers: int) -> tuple[int, ...]:
    """Layers by stage: as given, or as even as can be over `pp` stages."""
    if "layers" in settings:
        return tuple(map(int, settings["layers"].split("+")))
    return even_split(num_layers, min(int(settings.get("pp", 1)), num_layers))


def parse_serving_plan(
    text: str, model: Model, cluster: Cluster, *, batch: int, chunk: int
) -> ServingPlan:
    """The plan that a line describes; replicas fill the cluster unless given.

    Raises PlanError with every broken rule.
    """
    settings = read_settings(text)
    layers = layers_of(settings, model.num_layers)
    tensor = int(settings.get("tp", 1))
    left = cluster.num_devices // (tensor * len(layers))
    plan = ServingPlan(
        layers=layers,
        tensor=tensor,
        replicas=int(settings.get("replicas", max(1, left))),
        batch=int(settings.get("batch", batch)),
        chunk=int(settings.get("chunk", chunk)),
        weights=settings.get("weights", default_precision(cluster)),
        cache=settings.get("cache", settings.get("weights", default_precision(cluster))),
    )
    problems = list(broken_rules(plan, model, cluster))
    if "pp" in settings and int(settings["pp"]) != plan.pp:
        what = f"pp={settings['pp']} with {plan.pp} parts of layers"
        problems.append(Problem(what, "a stage has a part of the layers", f"pp={plan.pp}"))
    if problems:
        raise PlanError(problems)
    return plan


def broken_rules(plan: ServingPlan, model: Model, cluster: Cluster) -> list[Problem]:
    """What `plan/rules.py` says of its degrees; a replica may leave devices idle, not lack them."""
    left, rest = divmod(cluster.num_devices, plan.tensor * plan.pp)
    if left and not rest:  # the rules count with devices that are all used
        problems = verify(as_plan(replace(plan, replicas=left)), model, cluster)
    else:
        problems = verify(as_plan(plan), model)
    if plan.world_size > cluster.num_devices:
        ranks = f"tp={plan.tensor} x pp={plan.pp} x replicas={plan.replicas} = {plan.world_size}"
        problems.append(
            Problem(
                f"{ranks} ranks, but cluster '{cluster.name}' has {cluster.num_devices} devices",
                "all replicas together use the devices of the cluster at most",
                f"a cluster of {plan.world_size} devices",
            )
        )
    return problems


def as_plan(plan: ServingPlan) -> Plan:
    """The same layout as a plan that the runtime reads: replicas along the data axis."""
    return Plan.uniform(
        sum(plan.layers), layers=plan.layers, tp=plan.tensor, pp=plan.pp, dp=plan.replicas
    )
