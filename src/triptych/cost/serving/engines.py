"""Serving engines that others run, in the words of `cost/serving/engine.py`.

A family of engines is a set of features at the time of its runs. What differs from run to run
(eager execution, token budget) is put on top by whoever reads the run. Rates and host times were
searched on half of the published rows that `benchmarks/serving_halves.py` scores; SGLang's are
assumed, as no dense run of it was at hand.
"""

from __future__ import annotations

from collections.abc import Mapping

from triptych.cost.serving.engine import TRIPTYCH, Engine
from triptych.errors import InputError, Problem

VLLM_0 = Engine(
    name="vLLM 0.6-0.7",
    host_s=2.8e-3,
    sequence_s=9e-5,
    chunk_tokens=32768,
    is_chunked=False,
    max_batch=256,
    flash=3,
    lag_steps=1.0,
    workspace_bytes=3.3e9,
    decode_rate=1.0,
    weight_rate=1.1,
)

VLLM = Engine(
    name="vLLM V1",
    kernels=8.0,
    host_s=4e-4,
    sequence_s=5e-6,
    chunk_tokens=8192,
    max_batch=1024,
    flash=3,
    lag_steps=0.5,
    request_s=1e-3,
    fp8_rate=0.95,
    decode_rate=1.0,
    weight_rate=1.1,
)

SGLANG = Engine(
    name="SGLang",
    host_s=5e-4,
    sequence_s=5e-6,
    is_chunked=False,
    max_batch=2048,
    memory_share=0.88,
    lag_steps=1.5,
)

TENSORRT_LLM_STATIC = Engine(
    name="TensorRT-LLM 0.5-0.8",
    kernels=7.6,
    host_s=6.3e-4,
    sequence_s=8e-7,
    chunk_tokens=65536,
    is_chunked=False,
    max_batch=4096,
    memory_share=1.0,
    flash=2,
    narrow_cache=True,
    decode_rate=1.04,
    grouped_heads=4,
    lag_steps=0.0,
    one_shot_s=1.3e-5,
    fp8_rate=1.15,
)

TENSORRT_LLM_EARLY = Engine(
    name="TensorRT-LLM 0.9-0.10",
    kernels=9.8,
    host_s=7e-4,
    sequence_s=3e-5,
    chunk_tokens=8192,
    max_batch=2048,
    memory_share=0.95,
    shares_rest=True,
    reserves_output=True,
    narrow_cache=True,
    decode_rate=1.1,
    grouped_heads=2.7,
    lag_steps=1.0,
    one_shot_s=1.6e-5,
    fp8_rate=1.15,
    workspace_bytes=3e9,
    weight_rate=1.1,
)

TENSORRT_LLM = Engine(
    name="TensorRT-LLM 0.11-0.17",
    kernels=6.9,
    host_s=7e-4,
    sequence_s=5.2e-6,
    chunk_tokens=8192,
    max_batch=2048,
    memory_share=0.95,
    shares_rest=True,
    reserves_output=True,
    narrow_cache=True,
    decode_rate=1.04,
    grouped_heads=16,
    lag_steps=2.6,
    one_shot_s=5e-6,
    workspace_bytes=4.2e9,
    weight_rate=1.1,
)

TENSORRT_LLM_TORCH = Engine(
    name="TensorRT-LLM on PyTorch",
    kernels=7.0,
    host_s=1.3e-4,
    sequence_s=6.4e-6,
    chunk_tokens=8192,
    max_batch=2048,
    memory_share=0.95,
    shares_rest=True,
    narrow_cache=True,
    decode_rate=1.0,
    lag_steps=2.3,
    request_s=3.7e-2,
    token_s=8.5e-5,
    workspace_bytes=3e9,
    one_shot_s=1e-5,
    weight_rate=1.1,
    fp8_rate=0.83,
)

TGI = Engine(
    name="TGI",
    host_s=1.4e-3,
    sequence_s=3.3e-5,
    is_chunked=False,
    max_batch=512,
    flash=2,
    lag_steps=0.5,
    kernels=12.0,
)

FAMILIES: Mapping[str, Engine] = {
    "triptych": TRIPTYCH,
    "vllm 0": VLLM_0,
    "vllm": VLLM,
    "sglang": SGLANG,
    "tensorrt-llm static": TENSORRT_LLM_STATIC,
    "tensorrt-llm early": TENSORRT_LLM_EARLY,
    "tensorrt-llm c++": TENSORRT_LLM,
    "tensorrt-llm": TENSORRT_LLM_TORCH,
    "tgi": TGI,
}

ROCM: Mapping[str, float] = {"weight_rate": 0.65, "decode_rate": 0.2}
"""On AMD's devices in 2024: products of few rows and paged attention were not tuned yet."""

ROCM_ROW_WISE: Mapping[str, float] = {"weight_rate": 0.08, "fp8_rate": 0.15}
"""With a scale for each row of fp8 operands, which had no kernel of its own there."""

BY_NAME: Mapping[str, Engine] = {
    name: FAMILIES[name] for name in ("triptych", "vllm", "sglang", "tensorrt-llm")
}
"""The engines of today by the names that users give them."""


def engine_named(name: str) -> Engine:
    """An engine by its name. Raises InputError for an unknown one."""
    if name not in BY_NAME:
        rule = "is an engine that is described"
        raise InputError(Problem(f"--engine {name}", rule, ", ".join(BY_NAME)))
    return BY_NAME[name]
