"""Device names as people write them: `h100`, `A100-80GB`, `a100 80g`, `H100 SXM5`, `NVIDIA H200`.

A name is taken apart into family, form and memory; a catalogue entry matches if nothing that was
said contradicts it. The form that nobody says is SXM.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from triptych.cluster.catalogue import Entry
from triptych.errors import ClusterError, Problem, nearest

_MAKERS = re.compile(
    r"\b(nvidia|amd|tesla|instinct|geforce|grace|hopper|superchip|gpu|ac)\b|rtx[\s_-]*"
)
_HBM = re.compile(r"\bhbm\d*e?\b")
_FORM = re.compile(r"(?<![a-z])(sxm|pcie?|nvl|oam)\d*\b")
_MEMORY = re.compile(r"(?<=[a-z0-9])[\s_-]+(\d+)\s*(?:g|gb|gib)?(?=$|[\s_-])")
_SEPARATORS = re.compile(r"[\s_-]+")


@dataclass(frozen=True, slots=True)
class Words:
    """What a name says: family (`a100`), form (`sxm`, `pcie`, `nvl` or nothing), memory label."""

    family: str
    form: str
    memory_gib: int | None


def take_apart(name: str) -> Words:
    """The parts of a device name, in whatever order and spelling."""
    text = _MAKERS.sub(" ", name.lower().replace("_", "-")).strip(" -")
    text = _HBM.sub(" ", text).strip(" -")
    form = _FORM.search(text)
    text = _FORM.sub(" ", text).strip(" -")
    memory = _MEMORY.search(text)
    text = _MEMORY.sub(" ", text)
    return Words(
        family=_SEPARATORS.sub("", text),
        form=_canonical_form(form.group(1)) if form else "",
        memory_gib=int(memory.group(1)) if memory else None,
    )


def find_device(name: str, entries: Mapping[str, Entry]) -> Entry:
    """The catalogue entry that a name means.

    Raises ClusterError with the near names if there is none, or with all that fit if several do.
    """
    fitting = matches(name, entries)
    if len(fitting) == 1:
        return entries[fitting[0]]
    if fitting:
        raise ClusterError(
            Problem(
                f"device {name!r} is ambiguous",
                "a device name must fit one entry of the catalogue",
                ", ".join(fitting),
            )
        )
    raise ClusterError(_unknown(name, entries))


def matches(name: str, entries: Mapping[str, Entry]) -> list[str]:
    """The names of the catalogue entries that a name can mean; SXM alone if no form is said."""
    for exact in entries:
        if exact.lower() == name.strip().lower():
            return [exact]
    said = take_apart(name)
    known = {entry: take_apart(entry) for entry in entries}
    family = [entry for entry, words in known.items() if words.family == said.family]
    if said.memory_gib is not None:
        family = [
            entry
            for entry in family
            if said.memory_gib in (entries[entry].memory_gib, known[entry].memory_gib)
        ]
    if said.form and any(known[entry].form for entry in family):
        return [entry for entry in family if known[entry].form == said.form]
    return _preferred(family, known)


def _preferred(family: list[str], known: Mapping[str, Words]) -> list[str]:
    """SXM where both SXM and other forms are left."""
    sxm = [entry for entry in family if known[entry].form == "sxm"]
    return sxm or family


def _canonical_form(form: str) -> str:
    return "pcie" if form == "pci" else form


def _unknown(name: str, entries: Iterable[str]) -> Problem:
    names = list(entries)
    said = take_apart(name)
    related = [entry for entry in names if take_apart(entry).family == said.family]
    close = related or nearest(name, names, count=4)
    listed = "near names: " + ", ".join(close) if close else "names: " + ", ".join(names)
    return Problem(
        f"unknown device {name!r}",
        "a device is one of the catalogue, or described in a cluster file (TOML)",
        listed,
    )
