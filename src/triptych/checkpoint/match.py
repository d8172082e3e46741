"""Do a model and what is stored have the same tensors? Every difference at once, by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from triptych.checkpoint.index import Id, Index
from triptych.checkpoint.safe import TORCH_DTYPES
from triptych.errors import CheckpointError, Problem, nearest

_LISTED = 12
"""Names that a message lists before it says how many more there are."""

Shapes = Mapping[Id, tuple[int, ...]]


def require_match(where: str, index: Index, wanted: Shapes, optional: Collection[Id] = ()) -> None:
    """Every wanted tensor is stored in its shape, and every stored weight is wanted.

    Weight and master stand for one another. Moments that nobody wants are fine (inference); so are
    the `optional` ones. Raises CheckpointError that lists all differences, `where` in each.
    """
    kinds = {twin for kind in {"weight"} | {kind for kind, _ in wanted} for twin in twins(kind)}
    missing = [tensor for tensor in wanted if twin_in(index.tensors, tensor) is None]
    unknown = [
        tensor
        for tensor in index.tensors
        if tensor[0] in kinds and tensor not in optional and twin_in(wanted, tensor) is None
    ]
    problems = _missing(where, missing, unknown) + _unknown(where, unknown)
    problems += _misfits(where, index, wanted)
    if problems:
        raise CheckpointError(problems)


def twins(kind: str) -> tuple[str, ...]:
    """The kinds that hold the same values: a weight and its master copy."""
    return ("weight", "master") if kind in ("weight", "master") else (kind,)


def twin_in(tensors: Collection[Id], tensor: Id) -> Id | None:
    """The tensor itself if it is among `tensors`, else its twin, else None."""
    kind, name = tensor
    candidates = (tensor, *((twin, name) for twin in twins(kind)))
    return next((candidate for candidate in candidates if candidate in tensors), None)


def _missing(where: str, missing: Sequence[Id], unknown: Sequence[Id]) -> list[Problem]:
    if not missing:
        return []
    spare = [name for _, name in unknown]
    close = [(name, nearest(name, spare, 1)) for _, name in missing[:_LISTED]]
    works = ", ".join(f"is '{found[0]}' meant for '{name}'?" for name, found in close if found)
    rule = "every tensor of the model must be stored, under the same name"
    return [Problem(f"{where} lacks {_count(missing)}: {_listed(missing)}", rule, works)]


def _unknown(where: str, unknown: Sequence[Id]) -> list[Problem]:
    if not unknown:
        return []
    rule = "every stored tensor must be one of the model"
    return [Problem(f"{where} has {_count(unknown)} too many: {_listed(unknown)}", rule)]


def _misfits(where: str, index: Index, wanted: Shapes) -> list[Problem]:
    problems = []
    for (kind, name), stored in index.tensors.items():
        twin = twin_in(wanted, (kind, name))
        if twin is None:
            continue
        if stored.shape != wanted[twin]:
            what = f"{kind}/{name} has shape {list(stored.shape)} in {where}"
            problems.append(Problem(what, f"the model has {list(wanted[twin])}"))
        if stored.dtype not in TORCH_DTYPES:
            what = f"{kind}/{name} is stored as {stored.dtype} in {where}"
            problems.append(Problem(what, f"readable are {', '.join(TORCH_DTYPES)}"))
    return problems


def _count(tensors: Sequence[Id]) -> str:
    return f"{len(tensors)} tensor{'s' if len(tensors) > 1 else ''}"


def _listed(tensors: Sequence[Id]) -> str:
    shown = ", ".join(f"{kind}/{name}" for kind, name in tensors[:_LISTED])
    more = len(tensors) - _LISTED
    return f"{shown} and {more} more" if more > 0 else shown
