"""Degrees near the ones that were asked for, which do work: the remedy in a message about a plan.

Not a search for speed: it only walks over the few degrees that may change and keeps what the
counting rules allow, the nearest first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from triptych.cluster.cluster import Cluster
from triptych.model.model import Attention, Experts, Model
from triptych.plan.plan import Plan
from triptych.plan.workload import Workload

AXES = ("tp", "pp", "cp", "dp", "ep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A plan with all that it is asked for: the model, and where and for what, if known."""

    plan: Plan
    model: Model
    cluster: Cluster | None = None
    workload: Workload | None = None

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees and the micro-batch of the plan, by their short names."""
        return {axis: getattr(self.plan, axis) for axis in AXES} | {
            "microbatch": self.plan.microbatch
        }


def splits_heads(attention: Attention, tensor: int) -> bool:
    """True if whole KV-head groups can be dealt to `tensor` ranks.

    Up to the number of KV heads every degree works, unevenly if need be. Beyond it KV heads are
    repeated, the same number of times each, and their query heads are divided.
    """
    if tensor <= attention.kv_heads:
        return True
    copies, rest = divmod(tensor, attention.kv_heads)
    return rest == 0 and (attention.query_heads // attention.kv_heads) % copies == 0


def tensor_limit(model: Model) -> int:
    """The largest tensor degree that leaves every rank some MLP width and some vocabulary."""
    widths = [model.vocab]
    for block in model.blocks:
        widths.append(block.mlp.width)
        if isinstance(block.mlp, Experts) and block.mlp.shared_width:
            widths.append(block.mlp.shared_width)
    return min(widths)


def usable_tensor_degrees(model: Model, limit: int) -> list[int]:
    """Every tensor degree up to `limit` that the model's heads, widths and vocabulary allow."""
    attentions = {block.attention for block in model.blocks}
    highest = min(limit, tensor_limit(model), max(a.query_heads for a in attentions))
    return [
        tensor
        for tensor in range(1, highest + 1)
        if all(splits_heads(attention, tensor) for attention in attentions)
    ]


def divisors(count: int) -> list[int]:
    """The divisors of a positive count, ascending."""
    small = [d for d in range(1, math.isqrt(count) + 1) if count % d == 0]
    return sorted({*small, *(count // d for d in small)})


def nearest_multiples(value: int, unit: int) -> list[int]:
    """The multiples of `unit` around a value that is not one: `(30, 8)` -> `[24, 32]`."""
    below = max(0, value - value % unit)
    return [count for count in (below, below + unit) if count > 0]


def listed(values: list[int] | range, most: int = 16) -> str:
    """Numbers with commas, the middle left out when there are many."""
    shown = [str(value) for value in values]
    if len(shown) > most:
        shown = [*shown[: most - 1], "...", shown[-1]]
    return ", ".join(shown)


def works(asked: Asked, *frees: tuple[str, ...], most: int = 3) -> str:
    """The nearest settings that work, changing only some axes: the first of `frees` that can.

    Each setting names the axes that may change: `tp=2,dp=2 | tp=1,dp=4`. Empty if none works.
    """
    for free in frees:
        found = sorted(_settings(asked, free), key=lambda setting: _distance(asked, setting))
        if found:
            texts = (",".join(f"{key}={s[key]}" for key in free) for s in found)
            return " | ".join(list(dict.fromkeys(texts))[:most])
    return ""


def _distance(asked: Asked, setting: dict[str, int]) -> float:
    return sum(
        abs(math.log(setting[key] / value)) for key, value in asked.degrees.items() if value > 0
    )


def _settings(asked: Asked, free: tuple[str, ...]) -> Iterator[dict[str, int]]:
    """Every combination of the free axes that the counting rules allow."""
    values = asked.degrees
    keys = [key for key in free if key not in {"dp", "microbatch"}]
    for chosen in product(*(_choices(asked, key) for key in keys)):
        setting = values | dict(zip(keys, chosen, strict=True))
        for dp in _data_degrees(asked, setting, "dp" in free):
            for microbatch in _microbatches(asked, dp, "microbatch" in free):
                whole = setting | {"dp": dp, "microbatch": microbatch}
                if _is_allowed(asked, whole):
                    yield whole


def _choices(asked: Asked, axis: str) -> Iterable[int]:
    model, cluster = asked.model, asked.cluster
    devices = cluster.num_devices if cluster else model.query_heads
    if axis == "tp":
        return usable_tensor_degrees(model, devices)
    if axis == "ep":
        return divisors(model.experts.count) if model.experts else (1,)
    if axis == "pp":
        return range(1, min(devices, model.num_layers // asked.plan.chunks) + 1)
    return divisors(devices)


def _data_degrees(asked: Asked, setting: dict[str, int], is_free: bool) -> Iterable[int]:
    if not is_free:
        return (setting["dp"],)
    if asked.cluster is None:
        top = asked.workload.global_batch if asked.workload else setting["dp"]
        return divisors(top)
    dp, rest = divmod(asked.cluster.num_devices, setting["tp"] * setting["pp"] * setting["cp"])
    return (dp,) if rest == 0 else ()


def _microbatches(asked: Asked, dp: int, is_free: bool) -> Iterable[int]:
    if not is_free or asked.workload is None:
        return (asked.plan.microbatch,)
    share, rest = divmod(asked.workload.global_batch, dp)
    return divisors(share) if rest == 0 else ()


def _is_allowed(asked: Asked, setting: dict[str, int]) -> bool:
    tp, pp, cp, dp = (setting[axis] for axis in ("tp", "pp", "cp", "dp"))
    model, experts = asked.model, asked.model.experts
    return (
        tp in usable_tensor_degrees(model, tp)
        and pp * asked.plan.chunks <= model.num_layers
        and (asked.cluster is None or tp * pp * cp * dp == asked.cluster.num_devices)
        and (experts.count if experts else 1) % setting["ep"] == 0
        and (dp * cp) % setting["ep"] == 0
        and (asked.workload is None or _divides(asked.plan, asked.workload, setting))
    )


def _divides(plan: Plan, workload: Workload, setting: dict[str, int]) -> bool:
    unit = setting["cp"] * (setting["tp"] if plan.sequence_parallel else 1)
    return (
        workload.global_batch % (setting["microbatch"] * setting["dp"]) == 0
        and workload.sequence_length % unit == 0
    )
