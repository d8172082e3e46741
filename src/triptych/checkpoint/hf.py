"""A Hugging Face model directory as a source of weights: the same reader, another index."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from triptych.checkpoint.index import Index, Logical, Part, plain_name
from triptych.checkpoint.read import fill
from triptych.checkpoint.safe import Reader
from triptych.checkpoint.together import Ranks
from triptych.errors import CheckpointError, Problem
from triptych.plan.families import FAMILIES, Family
from triptych.plan.fused import Member, Place
from triptych.runtime.shard import Shard

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_RECOMPUTED = (  # buffers that old releases stored: frequencies, causal masks
    "rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
)


def load_hf(
    directory: Path, shards: Sequence[Shard], group: dist.ProcessGroup | None = None
) -> None:
    """Every weight and master shard has the directory's values; other shards are left alone.

    Collective over `group`; each rank reads only its slices. A head that is stored although the
    model ties it to the embedding is ignored.

    Raises:
        CheckpointError: no safetensors weights, or quantised ones; tensors missing, unknown or of
            another shape, all named. The same on all ranks; then no tensor has changed.

    """
    ranks = Ranks(group)
    ranks.on_first(lambda: weight_files(directory))
    config = read_config(directory)
    ranks.on_first(lambda: _require_plain(directory, config))
    family = FAMILIES.get(str(config.get("model_type")), FAMILIES["llama"])
    index = ranks.on_first(lambda: hf_parts(directory, family))
    weights = [shard for shard in shards if shard.kind in ("weight", "master")]
    may_tie = config.get("tie_word_embeddings") is not False
    head = ("weight", family.head_name)
    fill(directory, index, weights, ranks, optional=[head] if may_tie else [])


def _require_plain(directory: Path, config: Mapping[str, Any]) -> None:
    """Raises CheckpointError if the weights are quantised, as those of GPT-OSS on the hub are."""
    found = config.get("quantization_config")
    if found:
        kind = found.get("quant_method", "?") if isinstance(found, Mapping) else found
        what = f"the weights of {directory} are quantised ({kind})"
        rule = "weights are read as they are trained: fp64, fp32, bf16 or fp16"
        works = "load it dequantised and save_pretrained() it once with transformers"
        raise CheckpointError(Problem(what, rule, works))


def hf_parts(directory: Path, family: Family = FAMILIES["llama"]) -> Index:
    """The tensors of a Hugging Face directory (one file or several), each as one whole part.

    Names are the family's logical ones, also where the files hold the trunk alone, or experts in
    one tensor.
    """
    tensors: dict[tuple[str, str], Logical] = {}
    places: dict[tuple[str, str], Place] = {}
    parts: list[Part] = []
    with Reader(directory) as reader:
        for file, promised in weight_files(directory).items():
            found = dict(reader.tensors(file))
            if promised is not None:
                _require_promised(directory / file, promised, found)
            for name, tensor in found.items():
                if name.endswith(_RECOMPUTED):
                    continue
                for logical, shape, place in _members(family.logical_name(name), tensor, family):
                    tensors["weight", logical] = Logical(shape, tensor.dtype)
                    box = tuple((0, size) for size in shape)
                    parts.append(Part(file, name, "weight", logical, box))
                    if place is not None:
                        places["weight", logical] = place
    return Index.of(0, tensors, parts, {}, places)


def _members(
    name: str, tensor: Logical, family: Family
) -> list[Member] | list[tuple[str, tuple[int, ...], None]]:
    """The logical tensors of a stored one: itself, or those of experts that it holds together."""
    fused = [] if family.fused is None else [*family.fused.members(name, tensor.shape)]
    return fused or [(name, tensor.shape, None)]


def weight_files(directory: Path) -> dict[str, list[str] | None]:
    """The safetensors files of a directory, and what its index promises in each (None: no index).

    Raises CheckpointError if there are none; pickled weights are refused by name.
    """
    if (directory / WEIGHTS).is_file():
        return {WEIGHTS: None}
    if (directory / WEIGHTS_INDEX).is_file():
        return dict(_weight_map(directory / WEIGHTS_INDEX))
    pickled = sorted(p.name for p in directory.glob("*.bin")) if directory.is_dir() else []
    if pickled:
        rule = "weights are read from safetensors only: unpickling a file runs code that is in it"
        works = "load and save_pretrained() it once with transformers, which writes safetensors"
        raise CheckpointError(Problem(f"{directory} has its weights in {pickled[0]}", rule, works))
    works = f"a folder with {WEIGHTS} or {WEIGHTS_INDEX}"
    raise CheckpointError(Problem(f"{directory} holds no weights", works=works))


def _weight_map(path: Path) -> dict[str, list[str]]:
    files: dict[str, list[str]] = {}
    try:
        for name, file in json.loads(path.read_text(encoding="utf-8"))["weight_map"].items():
            files.setdefault(plain_name(file), []).append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    missing = sorted(file for file in files if not (path.parent / file).is_file())
    if missing:
        raise CheckpointError([Problem(f"{path.parent / file} is missing") for file in missing])
    return files


def _require_promised(path: Path, promised: Sequence[str], found: Mapping[str, Logical]) -> None:
    absent = [name for name in promised if name not in found]
    if absent:
        raise CheckpointError(f"{path} lacks {', '.join(absent)}, which {WEIGHTS_INDEX} promises")


def read_config(directory: Path) -> dict[str, Any]:
    """The model's config.json; raises CheckpointError if it is missing or not JSON."""
    path = directory / CONFIG
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
