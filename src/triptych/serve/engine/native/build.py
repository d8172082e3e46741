"""The kernels as a shared library: compiled when first used, kept in the user's cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

_log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("kernels.cpp")
_FLAGS = (
    *("-O3", "-march=native", "-ffp-contract=off", "-std=c++17"),
    *("-fopenmp", "-shared", "-fPIC", "-Wno-psabi"),
)
_COMPILERS = ("g++", "clang++", "c++")
_LIMIT_S = 120.0


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where there is no compiler or it fails (which is logged).

    OpenMP is torch's own: it is loaded already, so that both share one pool of threads.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        _log.warning("no C++ compiler (%s): attention runs in torch", ", ".join(_COMPILERS))
        return None
    try:
        return ctypes.CDLL(str(_built(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        _log.warning("the kernels do not build, attention runs in torch: %s", said)
        return None


def _built(compiler: str) -> Path:
    """The library's path; made under a temporary name, so that no reader sees half of it."""
    folder = _cache_folder()
    path = folder / f"kernels-{_key(compiler)}.so"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as fresh:
            made = Path(fresh) / path.name
            command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_LIMIT_S)
            made.replace(path)
    return path


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "triptych"


def _key(compiler: str) -> str:
    """What a build depends on: source, flags, compiler, processor."""
    about = "|".join((*_FLAGS, compiler, platform.machine(), _processor()))
    return hashlib.blake2b(_SOURCE.read_bytes() + about.encode(), digest_size=8).hexdigest()


def _processor() -> str:
    """The model and features of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    words = ("model name", "flags", "Features")
    return "".join(line for line in lines[:40] if line.startswith(words))
