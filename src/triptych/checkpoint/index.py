"""What a checkpoint stores: which box of which logical tensor is in which file.

Pure: values and their JSON, no torch, no files. A logical tensor has a kind (weight, master,
exp_avg, exp_avg_sq) and the name and shape it has on the hub's disks. Its parts are disjoint boxes
which cover it exactly once, so a layout never shows in what is stored, only in how it is cut.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from triptych.errors import CheckpointError, Problem
from triptych.plan.fused import Place
from triptych.plan.layout import Box, box_elements
from triptych.plan.reshard import intersect

SCHEMA_VERSION = 2

Id = tuple[str, str]
"""Kind and name of a logical tensor."""


class FileInfo(NamedTuple):
    """What a whole file looks like."""

    bytes: int
    xxh3: str | None  # sixteen hexadecimal digits; None: not known (files of others)


class Logical(NamedTuple):
    """A logical tensor."""

    shape: tuple[int, ...]
    dtype: str  # fp32, bf16, ...


class Part(NamedTuple):
    """One stored box."""

    file: str  # in the folder of the index
    key: str  # in the file
    kind: str
    name: str
    box: Box


class Stored(NamedTuple):
    """A file that a rank has written, and the boxes in it."""

    file: str
    info: FileInfo
    tensors: dict[Id, Logical]
    parts: list[Part]


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """All tensors, parts and files of a checkpoint.

    Of files of others `step` is 0, and `places` says which tensors lie in a larger one.
    """

    step: int
    tensors: Mapping[Id, Logical]
    parts: Mapping[Id, Sequence[Part]]
    files: Mapping[str, FileInfo]
    places: Mapping[Id, Place] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        step: int,
        tensors: Mapping[Id, Logical],
        parts: Iterable[Part],
        files: Mapping[str, FileInfo],
        places: Mapping[Id, Place] | None = None,
    ) -> Index:
        """The index of a list of parts."""
        grouped: dict[Id, list[Part]] = defaultdict(list)
        for part in parts:
            grouped[part.kind, part.name].append(part)
        return cls(
            step=step,
            tensors=dict(tensors),
            parts=dict(grouped),
            files=dict(files),
            places=dict(places or {}),
        )

    def only(self, kinds: Collection[str]) -> Index:
        """The same with tensors of some kinds, and without the files that hold none of them."""
        parts = {found: rows for found, rows in self.parts.items() if found[0] in kinds}
        used = {part.file for rows in parts.values() for part in rows}
        unused = {part.file for rows in self.parts.values() for part in rows} - used
        return replace(
            self,
            tensors={found: t for found, t in self.tensors.items() if found[0] in kinds},
            parts=parts,
            files={name: info for name, info in self.files.items() if name not in unused},
        )

    def kinds(self) -> set[str]:
        """The kinds of tensors that are stored."""
        return {kind for kind, _ in self.tensors}

    def to_json(self) -> dict[str, Any]:
        """The content of `index.json`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "step": self.step,
            "tensors": {f"{kind}/{name}": t._asdict() for (kind, name), t in self.tensors.items()},
            "parts": [part._asdict() for parts in self.parts.values() for part in parts],
            "files": {name: info._asdict() for name, info in self.files.items()},
        }


def part_key(kind: str, name: str, box: Box) -> str:
    """The key of a part in its file: `weight/model.norm.weight@0:64`."""
    return f"{kind}/{name}@{','.join(f'{start}:{stop}' for start, stop in box)}"


def parse_index(text: str, where: str) -> Index:
    """The index in the text of an `index.json`; raises CheckpointError that names `where`."""
    document = parse_json(text, where)
    try:
        tensors = {
            _id(key): Logical(tuple(map(int, t["shape"])), str(t["dtype"]))
            for key, t in document["tensors"].items()
        }
        parts = [_part(entry) for entry in document["parts"]]
        files = {
            plain_name(name): FileInfo(int(f["bytes"]), f["xxh3"])
            for name, f in document["files"].items()
        }
        return Index.of(int(document["step"]), tensors, parts, files)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{where} is damaged: {type(error).__name__}: {error}") from error


def parse_json(text: str, where: str) -> dict[str, Any]:
    """A JSON object of our schema version; raises CheckpointError that names `where`."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{where} is damaged, it is not JSON: {error}") from error
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION:
        problem = Problem(f"{where} has schema_version {version}", f"it must be {SCHEMA_VERSION}")
        raise CheckpointError(problem)
    return dict(document)


def plain_name(name: str) -> str:
    """`name`, if it is that of a file in the same folder; raises ValueError otherwise."""
    if not name or "/" in name or "\\" in name or name in (".", ".."):
        raise ValueError(f"'{name}' is not the name of a file in this folder")
    return name


def _id(text: str) -> Id:
    kind, slash, name = text.partition("/")
    if not slash:
        raise ValueError(f"'{text}' is not kind/name")
    return kind, name


def _part(entry: Mapping[str, Any]) -> Part:
    box = tuple((int(start), int(stop)) for start, stop in entry["box"])
    file = plain_name(entry["file"])
    return Part(file, str(entry["key"]), str(entry["kind"]), str(entry["name"]), box)


def merge(step: int, stored: Iterable[Stored], files: Mapping[str, FileInfo]) -> Index:
    """The index of what all ranks have written.

    Raises CheckpointError that lists every tensor whose shape or dtype differs between ranks and
    every tensor that the parts do not cover exactly once.
    """
    tensors: dict[Id, Logical] = {}
    parts: list[Part] = []
    infos = dict(files)
    problems: list[Problem] = []
    for rank in stored:
        infos[rank.file] = rank.info
        parts += rank.parts
        for (kind, name), tensor in rank.tensors.items():
            known = tensors.setdefault((kind, name), tensor)
            if known != tensor:
                what = f"{kind}/{name} is {known} on one rank and {tensor} in {rank.file}"
                problems.append(Problem(what, "all ranks must agree on a logical tensor"))
    index = Index.of(step, tensors, parts, infos)
    problems = problems or coverage_problems(index)
    if problems:
        raise CheckpointError(problems)
    return index


def coverage_problems(index: Index) -> list[Problem]:
    """One problem for every tensor that its parts do not cover exactly once."""
    problems = []
    for (kind, name), tensor in index.tensors.items():
        fault = coverage_fault(tensor.shape, [p.box for p in index.parts.get((kind, name), ())])
        if fault is not None:
            rule = "the saved parts of a tensor must cover it exactly once"
            problems.append(Problem(f"{kind}/{name} {list(tensor.shape)}: {fault}", rule))
    return problems


def coverage_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why `boxes` do not cover a tensor of `shape` exactly once, or None if they do."""
    whole = tuple((0, size) for size in shape)
    for box in boxes:
        if len(box) != len(whole) or (box_elements(box) and intersect(box, whole) != box):
            return f"part {box} lies outside"
    pair = first_overlap(boxes)
    if pair is not None:
        return f"parts {pair[0]} and {pair[1]} overlap"
    missing = box_elements(whole) - sum(map(box_elements, boxes))
    return f"{missing} of {box_elements(whole)} elements are in no part" if missing else None


def first_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes with a common element, or None. A sweep along the most divided dimension."""
    filled = [box for box in boxes if box_elements(box)]
    dims = range(len(filled[0]) if filled else 0)
    sweep = max(dims, key=lambda dim: len({box[dim][0] for box in filled}), default=None)
    if sweep is None:  # scalars
        return (filled[0], filled[1]) if len(filled) > 1 else None
    active: list[Box] = []
    for box in sorted(filled, key=lambda box: box[sweep][0]):
        active = [other for other in active if other[sweep][1] > box[sweep][0]]
        for other in active:
            if intersect(other, box) is not None:
                return other, box
        active.append(box)
    return None
