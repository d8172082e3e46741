"""The training program of a row as features, read from its notes, its source and its columns."""

from __future__ import annotations

from dataclasses import replace

from triptych.cost.programs import (
    ALPA,
    COMPOSER,
    INTERN_EVO,
    MEGATRON_2021,
    MEGATRON_BRIDGE,
    MEGATRON_CORE,
    MEGATRON_DEEPSPEED,
    ONEFLOW,
    TORCHTITAN,
    with_fused_loss,
)
from triptych.cost.software import TRIPTYCH, Software
from triptych.plan.plan import Precision
from triptych.validate.table import Row

_FAMILIES: tuple[tuple[Software, tuple[str, ...]], ...] = (
    (ONEFLOW, ("framework=oneflow",)),
    (MEGATRON_2021, ("framework=megatron-lm", "scheme=ptd")),
    (MEGATRON_DEEPSPEED, ("megatron-deepspeed", "bigscience", "deepspeed")),
    (TORCHTITAN, ("torchtitan", "fsdp2")),
    (MEGATRON_BRIDGE, ("megatron-bridge", "nemo")),
    (MEGATRON_CORE, ("simumax", "megatron-core", "megatron core")),
    (COMPOSER, ("composer", "fsdp")),
    (ALPA, ("alpa",)),
    (INTERN_EVO, ("internlm", "internevo")),
    (MEGATRON_2021, ("narayanan",)),
    (TRIPTYCH, ("triptych",)),
)
"""Families by words that name them, the more exact ones first."""

MODERN, MODERN_MEGATRON = 2023, 2024
"""Year from which an unnamed program, and Megatron, are taken to have fused attention kernels."""


def families() -> dict[str, Software]:
    """The families by name."""
    return {software.name: software for software, _ in _FAMILIES}


def software_of(row: Row) -> Software:
    """The features of a row's program."""
    software = _family(row)
    if row.says("overlap features off", "overlap off"):
        software = replace(
            software,
            hides_gradients=False,
            hides_shards=0.0,
            hides_tensor=0.0,
            hides_entries=False,
        )
    if row.says("ce fusion", "fused loss"):
        software = with_fused_loss(software)
    if row.says("simumax"):  # its launchers deal heads to context ranks (--cp-comm-type a2a)
        software = replace(software, context_method="ulysses")
    if row.says("async tp", "asynctp", "tp-comm-overlap on"):
        software = replace(software, hides_tensor=ASYNC_TENSOR)
    if row.text("precision").lower() == "nvfp4":
        software = replace(software, fp8_rate=NVFP4_RATE)
    if row.says("rowwise"):
        software = replace(software, fp8_rate=ROWWISE_RATE)
    return software


NVFP4_RATE = 1.5
"""Rate of nvfp4 products against fp8 ones, their scales included (GB200, Megatron Bridge)."""

ROWWISE_RATE = 0.5
"""Rate of products with a scale for each row against one for the tensor (torchtitan's tables)."""

ASYNC_TENSOR = 0.42
"""Part of tensor-parallel exchanges that a pipelined product hides (torchtitan's async TP)."""


def _family(row: Row) -> Software:
    for software, words in _FAMILIES:
        if row.says(*words):
            return software
    year, is_megatron = row.count("year"), row.says("megatron")
    if year is None and not is_megatron:
        return TRIPTYCH
    modern = MODERN_MEGATRON if is_megatron else MODERN
    return MEGATRON_CORE if year is None or year >= modern else MEGATRON_2021


def precision_of(row: Row) -> Precision:
    """What a row's dtype means for state and gradients.

    Megatron keeps and sums fp16 gradients as they are and bf16 gradients in fp32; FSDP in mixed
    precision keeps shards in fp32.
    """
    dtype = row.text("precision").lower()
    if dtype in ("", "bf16"):
        return Precision.mixed()
    if dtype == "fp16":
        return Precision(parameter="fp16", gradient="fp16", reduction="fp16")
    if dtype == "fp32":
        return Precision()
    return Precision(parameter="fp8")
