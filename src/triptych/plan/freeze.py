"""Which parameters a job names, to freeze them or for their decay: patterns and names of tensors.

A pattern is a name, the beginning of one up to a dot, or a glob; the name of the trunk in front may
be left out: `embed_tokens`, `layers.0`, `model.layers.*.mlp`, `*.bias`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from triptych.errors import ModelError, Problem, nearest
from triptych.model.model import Model
from triptych.plan.families import Family, family_of


def frozen_names(patterns: Sequence[str], names: Collection[str], model: Model) -> frozenset[str]:
    """The names that a pattern matches.

    Raises ModelError for every pattern that matches none, with near ones, and if nothing is left
    to train.
    """
    frozen = matching_names("freeze", patterns, names, model)
    if names and frozen >= set(names):
        rule = "something is left to train"
        works = "fewer patterns, or `triptych export`, which needs no training"
        what = f"freeze {list(patterns)} matches every parameter"
        raise ModelError(Problem(what, rule, works))
    return frozen


def matching_names(
    key: str, patterns: Sequence[str], names: Collection[str], model: Model
) -> frozenset[str]:
    """The names that a pattern of a job's `key` matches.

    Raises ModelError for every pattern that matches none, with near ones.
    """
    family = family_of(model.family)
    problems, matched = [], set()
    for pattern in patterns:
        found = {name for name in names if _matches(pattern, name, family)}
        matched |= found
        if not found:
            near = nearest(pattern, set(_beginnings(names, family)))
            rule = "every pattern matches a parameter, or the beginning of its name"
            problems.append(Problem(f"{key} '{pattern}'", rule, ", ".join(near)))
    if problems:
        raise ModelError(problems)
    return frozenset(matched)


def known_names(model: Model) -> list[str]:
    """Every name that a tensor of the model may have: some (biases) may not exist."""
    family = family_of(model.family)
    parts = (family.positions, family.norm)
    names = [family.embedding_name]
    names += [family.name_of(part) for part in parts if part is not None]
    names += [family.name_of(family.norm).replace(".weight", ".bias")]
    names += [] if model.tied else [family.head_name]
    kinds = [name for kind in family.rules for name in _numbered(kind, model)]
    for layer in range(model.num_layers):
        names += [f"{family.trunk}.{family.layers}.{layer}.{kind}" for kind in kinds]
    return names


def _numbered(kind: str, model: Model) -> list[str]:
    """A name below a layer; for every expert if it is that of any."""
    count = model.experts.count if "*" in kind and model.experts else 1
    return [kind.replace("*", str(expert)) for expert in range(count)]


def _matches(pattern: str, name: str, family: Family) -> bool:
    return any(
        candidate == pattern
        or candidate.startswith(f"{pattern}.")
        or fnmatchcase(candidate, pattern)
        or fnmatchcase(candidate, f"{pattern}.*")
        for candidate in _spellings(name, family)
    )


def _spellings(name: str, family: Family) -> tuple[str, ...]:
    """A name with and without the trunk's in front."""
    return name, name.removeprefix(f"{family.trunk}.")


def _beginnings(names: Iterable[str], family: Family) -> Iterator[str]:
    """Every name without the trunk's, up to each of its dots."""
    for name in names:
        words = name.removeprefix(f"{family.trunk}.").split(".")
        yield from (".".join(words[:count]) for count in range(1, len(words) + 1))
