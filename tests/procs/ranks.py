"""Runs a function on N gloo ranks, forked from this process, which has imported torch once.

Children never return: they report through a pipe and leave by `os._exit`. A rank that fails ends
the others, and its own traceback is what the test shows.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import gc
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import (  # noqa: F401  (lazy modules: loaded once here, not once a rank)
    AutoConfig,
    AutoModelForCausalLM,
    CohereForCausalLM,
    DeepseekV3ForCausalLM,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Glm4ForCausalLM,
    GPT2LMHeadModel,
    GPTNeoXForCausalLM,
    GptOssForCausalLM,
    GraniteForCausalLM,
    Llama4ForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    Olmo2ForCausalLM,
    OlmoeForCausalLM,
    Phi3ForCausalLM,
    Qwen2ForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
    SmolLM3ForCausalLM,
    Starcoder2ForCausalLM,
)

torch.set_num_threads(1)
PR_SET_PDEATHSIG = 1  # ranks of ranks go with them
STRICT = os.environ.get("TRIPTYCH_STRICT_COMM") == "1"


def run_ranks(
    world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 90.0
) -> list[Any]:
    """The results of `function(*args)` on each rank, with gloo initialised if there are several."""
    with tempfile.TemporaryDirectory() as folder:
        gc.freeze()  # what a rank inherits waits for threads it has not: it must not free it
        children = [_start(rank, world, folder, function, args) for rank in range(world)]
        gc.unfreeze()
        try:
            return _collect(children, folder, time.monotonic() + timeout_s)
        finally:
            for pid, _ in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)


def _start(
    rank: int, world: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[int, int]:
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    os.close(read)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    code = 0
    stack = open(f"{folder}/stack-{rank}", "w")  # noqa: SIM115 (faulthandler writes to it)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    try:
        warnings.simplefilter("error")
        if world > 1:
            store = dist.FileStore(f"{folder}/store", world)
            timeout = datetime.timedelta(seconds=60)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world, timeout=timeout
            )
        answer = (True, function(*args))
    except BaseException:
        answer, code = (False, traceback.format_exc()), 1
    with os.fdopen(write, "wb") as pipe:
        pickle.dump(answer, pipe)
    os._exit(code)


def _collect(children: list[tuple[int, int]], folder: str, deadline_s: float) -> list[Any]:
    """Reads answers as they come; the first failure in time is raised."""
    data = {rank: b"" for rank in range(len(children))}
    answers: dict[int, Any] = {}
    for _, read in children:
        os.set_blocking(read, False)
    while len(answers) < len(children):
        if time.monotonic() > deadline_s:
            missing = sorted(set(data) - set(answers))
            stacks = [_stack(rank, children[rank][0], folder) for rank in missing]
            raise TimeoutError(f"ranks {missing} did not answer in time\n" + "\n".join(stacks))
        for rank, (_, read) in enumerate(children):
            if rank in answers:
                continue
            with contextlib.suppress(BlockingIOError):
                while chunk := os.read(read, 1 << 20):
                    data[rank] += chunk
                os.close(read)
                ok, value = pickle.loads(data[rank]) if data[rank] else (False, "died silently")
                if not ok:
                    raise AssertionError(f"rank {rank} failed:\n{value}")
                answers[rank] = value
        time.sleep(0.005)
    return [answers[rank] for rank in range(len(children))]


def _stack(rank: int, pid: int, folder: str) -> str:
    """Where a rank stands that does not answer."""
    os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5)
    with open(f"{folder}/stack-{rank}") as file:
        return f"rank {rank}: {file.read()}"
