"""DeepSpeed's ZeRO on CPU, in a virtual environment of its own on top of this one.

Its first run compiles a C++ operator for a minute or more: never kill it, since the lock that it
would leave makes every later run hang.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import venv
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sides.setting import OPTIMIZER, Setting, Trainer, WithLoss, make_adamw

VERSION = "0.19.8"
BUCKET = 1 << 20
"""Elements: as large as ours; by default its buffers are larger than the model."""


def enter_environment() -> None:
    """Starts this very command again where DeepSpeed is installed, after installing it."""
    if importlib.util.find_spec("deepspeed") is not None:
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "triptych-benchmarks" / f"deepspeed-{VERSION}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        _make(folder, python)
    os.execv(python, [str(python), *sys.argv])


def _make(folder: Path, python: Path) -> None:
    """The environment: what DeepSpeed brings comes first, all else from the present one."""
    venv.create(folder, with_pip=True, clear=True)
    packages = next((folder / "lib").glob("python*/site-packages"))
    present = sysconfig.get_path("purelib")
    (packages / "zz_present.pth").write_text(f"import site; site.addsitedir({present!r})\n")
    install = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, "setuptools>=77", "wheel"], check=True, stdout=sys.stderr)
    subprocess.run(
        [*install, "--no-build-isolation", f"deepspeed=={VERSION}"],
        check=True,
        stdout=sys.stderr,
        env={**os.environ, "DS_BUILD_OPS": "0"},
    )
    (folder / "complete").touch()


def deep_speed(setting: Setting, stage: int) -> Trainer:
    """DeepSpeed's engine around the same module and the same fused AdamW."""
    rank, ranks = dist.get_rank(), setting.ranks
    os.environ.update(
        {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
        | {name: str(ranks) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE")}
        | {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(os.getppid())}
    )
    library = import_module("deepspeed")
    library.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    parts = setting.sequences // ranks // setting.microbatch
    model = WithLoss(setting)
    engine, *_ = library.initialize(
        model=model,
        optimizer=make_adamw(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": setting.microbatch,
            "gradient_accumulation_steps": parts,
            "zero_optimization": {
                "stage": stage,
                "reduce_bucket_size": BUCKET,
                "allgather_bucket_size": BUCKET,
            },
            "gradient_clipping": OPTIMIZER.clip_norm,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        },
    )
    # It divides by the number of micro-batches and averages over ranks.
    factor = ranks * parts

    def step(index: int) -> float:
        total = torch.zeros(())
        for part in setting.share(index, ranks, rank):
            loss = engine(part.input_ids, part.labels, factor / setting.tokens)
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        return float(total) / factor

    return step


def peer_name() -> Any:
    """As it stands in the table."""
    return f"DeepSpeed {VERSION}"
