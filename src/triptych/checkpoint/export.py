"""A checkpoint as a Hugging Face directory that the stock library loads without a word."""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as ARCHITECTURES,
)

from triptych.checkpoint import folder as names
from triptych.checkpoint.files import sync_folder, write_bytes
from triptych.checkpoint.find import resolve
from triptych.checkpoint.hf import CONFIG, WEIGHTS, WEIGHTS_INDEX, read_config, weight_files
from triptych.checkpoint.index import Index, Logical
from triptych.checkpoint.read import complete_index, read_into, require_undamaged
from triptych.checkpoint.safe import TORCH_DTYPES, Entry, Reader, write_safetensors
from triptych.errors import CheckpointError, Problem, RunError, nearest
from triptych.plan.families import FAMILIES, Family, family_of
from triptych.plan.fused import Fused
from triptych.plan.layout import model_order
from triptych.runtime.build.zoo import skeleton, stored_buffers
from triptych.runtime.shard import Shard

_METADATA = {"format": "pt", "made_by": "triptych export"}
_CONFIG_DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")

Files = Mapping[str, Mapping[str, Logical]]
"""Weight files of an export, and names, shapes and dtypes of the tensors in each."""


def export(
    checkpoint: Path,
    out_dir: Path,
    dtype: str | None = None,
    max_shard_bytes: float = 5e9,
) -> list[str]:
    """`out_dir` is a Hugging Face directory with the checkpoint's weights, complete and verified.

    One process; tensor by tensor, so memory holds the largest one. Written under another name and
    renamed; an earlier export at `out_dir` is replaced, any other folder with content is refused.

    Args:
        checkpoint: a checkpoint, or a run folder (its newest complete one is used).
        out_dir: the folder to make.
        dtype: fp32, bf16, ...; None keeps that of the weights. fp32 of a bf16 run comes from the
            master weights.
        max_shard_bytes: the size of tensors beyond which another weight file begins.

    Returns:
        What must be said aloud: which checkpoint was used, and why not a newer one.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged or not of its own model, or `out_dir`
            holds something else; nothing is written.
        RunError: the files could not be written, or do not read back as they should.

    """
    out_dir = out_dir.resolve()
    source, notes = resolve(checkpoint)
    index = complete_index(source)
    require_undamaged(names.damaged_files(source, index))
    config = read_config(source)
    family = family_of(str(config.get("model_type")))
    tensors = exported_tensors(index, dtype, family)
    _require_model(source, config, tensors)
    others = [name for name in index.files if _travels(name)]
    _require_replaceable(out_dir, {*others, CONFIG})
    temporary = out_dir.with_name(f"{out_dir.name}.tmp-{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        files = split_files(stored_tensors(tensors, family.fused), max_shard_bytes)
        _write_weights(source, index, temporary, files, family.fused)
        _write_others(source, temporary, others, config, tensors)
        _verify(temporary, files)
        _publish(temporary, out_dir)
    except OSError as error:
        raise RunError(f"the export to {out_dir} could not be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return notes


def exported_tensors(
    index: Index, dtype: str | None, family: Family = FAMILIES["llama"]
) -> dict[str, Logical]:
    """Every weight by name, in model order, in `dtype` or as it is stored."""
    if dtype is not None and dtype not in TORCH_DTYPES:
        works = ", ".join(nearest(dtype, TORCH_DTYPES) or TORCH_DTYPES)
        raise CheckpointError(Problem(f"dtype '{dtype}' is not known", works=works))
    found: dict[str, Logical] = {}
    for kind in ("weight", "master"):
        for (stored_kind, name), tensor in index.tensors.items():
            if stored_kind == kind:
                asked = None if family.is_buffer(name) else dtype
                found.setdefault(name, tensor._replace(dtype=asked or tensor.dtype))
    return {name: found[name] for name in sorted(found, key=partial(model_order, family))}


def stored_tensors(tensors: Mapping[str, Logical], fused: Fused | None) -> dict[str, Logical]:
    """The tensors of an export's files: those of experts together where the family has them so."""
    if fused is None:
        return dict(tensors)
    found: dict[str, Logical] = {}
    members = Counter(map(fused.stored_name, tensors))
    for name, tensor in tensors.items():
        stored = fused.stored_name(name)
        if stored is None:
            found[name] = tensor
        elif stored not in found:
            shape = fused.stored_shape(stored, tensor.shape, members[stored])
            found[stored] = tensor._replace(shape=shape)
    return found


def _require_model(source: Path, config: Mapping[str, Any], tensors: Mapping[str, Logical]) -> None:
    """Names and shapes are those of the model that the stock library builds from the config."""
    family = family_of(str(config.get("model_type")))
    model = skeleton(config)
    named = {family.logical_name(name): p for name, p in model.named_parameters()}
    expected = {name: tuple(t.shape) for name, t in (named | stored_buffers(model)).items()}
    problems = [Problem(f"{source} lacks {name}") for name in expected if name not in tensors]
    for name, tensor in tensors.items():
        if name not in expected:
            problems.append(Problem(f"{name} of {source} is not in the model of its {CONFIG}"))
        elif tensor.shape != expected[name]:
            what = f"{name} of {source} has shape {list(tensor.shape)}"
            problems.append(Problem(what, f"its {CONFIG} gives {list(expected[name])}"))
    if problems:
        raise CheckpointError(problems)


def _travels(name: str) -> bool:
    """True for what a model directory holds beside weights and config: tokenizer, generation."""
    return not name.endswith(".safetensors") and name not in (names.STATE, CONFIG)


def split_files(tensors: Mapping[str, Logical], max_shard_bytes: float) -> Files:
    """Tensors to files of at most `max_shard_bytes` (or one tensor), named as the hub does."""
    groups: list[dict[str, Logical]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if groups[-1] and filled + _bytes(tensor) > max_shard_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = tensor
        filled += _bytes(tensor)
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": group
        for number, group in enumerate(groups, start=1)
    }


def _bytes(tensor: Logical) -> int:
    return torch.Size(tensor.shape).numel() * TORCH_DTYPES[tensor.dtype].itemsize


def _write_weights(
    source: Path, index: Index, out: Path, files: Files, fused: Fused | None
) -> None:
    with Reader(source) as reader:
        for file, tensors in files.items():
            entries = [
                Entry(name, *tensor, partial(_whole, reader, index, name, tensor, fused))
                for name, tensor in tensors.items()
            ]
            write_safetensors(out / file, entries, _METADATA)
    if len(files) > 1:
        write_bytes(out / WEIGHTS_INDEX, json.dumps(_weights_index(files), indent=2).encode())


def _whole(
    reader: Reader, index: Index, name: str, tensor: Logical, fused: Fused | None
) -> torch.Tensor:
    """A stored weight in one piece: a logical one, or those of all experts."""
    whole = torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype])
    members = [] if fused is None else [*fused.members(name, tensor.shape)]
    read_into(
        reader,
        index,
        [
            _weight(member.name, member.shape, member.place.of(whole, member.shape))
            for member in members
        ]
        or [_weight(name, tensor.shape, whole)],
    )
    return whole


def _weight(name: str, shape: tuple[int, ...], tensor: torch.Tensor) -> Shard:
    box = tuple((0, size) for size in shape)
    return Shard(kind="weight", name=name, shape=shape, box=box, tensor=tensor, saved=False)


def _weights_index(files: Files) -> dict[str, Any]:
    """The index of sharded weights, from what is written and nothing else."""
    tensors = [tensor for group in files.values() for tensor in group.values()]
    return {
        "metadata": {
            "total_size": sum(map(_bytes, tensors)),
            "total_parameters": sum(torch.Size(tensor.shape).numel() for tensor in tensors),
        },
        "weight_map": {name: file for file, group in files.items() for name in group},
    }


def _write_others(
    source: Path,
    out: Path,
    others: Sequence[str],
    config: Mapping[str, Any],
    tensors: Mapping[str, Logical],
) -> None:
    """The configuration with the dtype of the weights, and everything else as it is."""
    most_common = Counter(tensor.dtype for tensor in tensors.values()).most_common(1)[0][0]
    settings = {key: value for key, value in config.items() if key != "torch_dtype"}
    settings["dtype"] = _CONFIG_DTYPES[most_common]
    # Engines beside the stock library choose the class by this key.
    settings.setdefault("architectures", [ARCHITECTURES[str(config["model_type"])]])
    write_bytes(out / CONFIG, (json.dumps(settings, indent=2) + "\n").encode())
    for name in others:
        write_bytes(out / name, (source / name).read_bytes())


def _verify(out: Path, files: Files) -> None:
    """Reads back every header: each tensor is in its file in its shape, and nothing else is."""
    with Reader(out) as reader:
        for file in weight_files(out):
            if dict(reader.tensors(file)) != dict(files[file]):
                raise RunError(f"{out / file} does not hold the tensors that were exported")
    sync_folder(out)


def _require_replaceable(out_dir: Path, written: Collection[str]) -> None:
    """`out_dir` is absent, empty, or an export of ours with no other file in it."""
    if not out_dir.exists():
        return
    found = sorted(path.name for path in out_dir.iterdir()) if out_dir.is_dir() else ["a file"]
    if found and not _is_export(out_dir, found):
        what = f"{out_dir} holds something else ({', '.join(found[:5])})"
        raise CheckpointError(Problem(what, "an export replaces only an export", "a new folder"))
    foreign = [n for n in found if n not in written and not _WEIGHT_FILE.fullmatch(n)]
    if foreign:
        what = f"{out_dir} holds files that no export wrote: {', '.join(foreign)}"
        raise CheckpointError(Problem(what, "they would be lost", "move them, or a new folder"))


def _is_export(out_dir: Path, found: Sequence[str]) -> bool:
    weights = [name for name in found if name.endswith(".safetensors")]
    with Reader(out_dir) as reader:
        return bool(weights) and all(reader.metadata(name) == _METADATA for name in weights)


def _publish(temporary: Path, out_dir: Path) -> None:
    """Renames; an earlier export makes way and is removed when the new one is there."""
    former = temporary.with_name(f"{temporary.name}-former")
    replaces = out_dir.exists()
    if replaces:
        out_dir.rename(former)
    try:
        temporary.rename(out_dir)
    except OSError:
        if replaces:
            former.rename(out_dir)
        raise
    sync_folder(out_dir.parent)
    shutil.rmtree(former, ignore_errors=True)
