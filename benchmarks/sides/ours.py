"""Our engine under a plan."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from sides.setting import LEARNING_RATE, OPTIMIZER, Setting, Trainer
from triptych.plan.plan import Plan
from triptych.plan.ranks import coordinates
from triptych.runtime.engine import Engine
from triptych.runtime.mesh import Mesh

BUCKET_BYTES = 4 << 20
"""A tenth of the model: about a unit of the peers that divide state."""


def ours(setting: Setting, **plan: Any) -> Trainer:
    """A step of our engine under the uniform plan of these settings; dp is what is left."""
    degrees = plan.get("tp", 1) * plan.get("pp", 1)
    full = Plan.uniform(
        setting.layers,
        dp=setting.ranks // degrees,
        microbatch=setting.microbatch,
        bucket_bytes=BUCKET_BYTES,
        **plan,
    )
    engine = Engine.build(full, setting.config, Mesh.create(full), optimizer=OPTIMIZER)
    replica = coordinates(full, dist.get_rank()).dp
    return lambda step: engine.step(setting.share(step, full.dp, replica), LEARNING_RATE).loss
