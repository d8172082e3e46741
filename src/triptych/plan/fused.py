"""Tensors of all experts in one, as some families' files have them, and where each expert's lies.

Logical tensors are apart: `experts.3.gate_proj.weight` [I, H]. GPT-OSS and Llama 4 store a layer's
experts together, transposed, gate and up in one:

    experts.gate_up_proj       [E, H, 2I]   columns  g u g u ...  (GPT-OSS)  or  g g ... u u ...
    experts.gate_up_proj_bias  [E, 2I]      alike
    experts.down_proj          [E, I, H]
    experts.down_proj_bias     [E, H]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_KINDS: Mapping[str, tuple[str, ...]] = {
    "gate_up_proj": ("gate_proj.weight", "up_proj.weight"),
    "gate_up_proj_bias": ("gate_proj.bias", "up_proj.bias"),
    "down_proj": ("down_proj.weight",),
    "down_proj_bias": ("down_proj.bias",),
}
_WORDS = {kind: word for word, kinds in _KINDS.items() for kind in kinds}
_BLOCK = ".experts."


class Place(NamedTuple):
    """Where a logical tensor lies in a stored one: an expert, and columns of the last dimension.

    Dimension 0 of the logical tensor is the last of the stored one.
    """

    expert: int
    start: int
    step: int

    def slices(self, at: Sequence[slice]) -> tuple[slice, ...]:
        """The part of the stored tensor that has a part `at` of the logical one in it."""
        first, *rest = at
        start = self.start + first.start * self.step
        stop = self.start + (first.stop - 1) * self.step + 1
        return (slice(self.expert, self.expert + 1), *rest, slice(start, max(start, stop)))

    def logical(self, found: Any) -> Any:
        """What `slices` has found, as the logical tensor: a view."""
        return found[0, ..., :: self.step].movedim(-1, 0)

    def of(self, stored: Any, shape: Sequence[int]) -> Any:
        """The logical tensor of `shape` in a whole stored one: a view."""
        return self.logical(stored[self.slices([slice(0, size) for size in shape])])


class Member(NamedTuple):
    """One logical tensor of a stored one."""

    name: str
    shape: tuple[int, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class Fused:
    """How a family stores its experts: gate and up `in_turn`, or one behind the other."""

    in_turn: bool

    def stored_name(self, name: str) -> str | None:
        """The stored tensor that a logical one is part of, None if it is stored by itself."""
        trunk, found, rest = name.rpartition(_BLOCK)
        word = _WORDS.get(rest.partition(".")[2]) if found else None
        return None if word is None else f"{trunk}{_BLOCK}{word}"

    def stored_shape(self, name: str, shape: Sequence[int], members: int) -> tuple[int, ...]:
        """The shape of a stored tensor, given that of its logical ones and their number."""
        kinds = len(_KINDS[name.rpartition(_BLOCK)[2]])
        return (members // kinds, *shape[1:], shape[0] * kinds)

    def members(self, name: str, shape: Sequence[int]) -> Iterator[Member]:
        """The logical tensors of a stored one; none if it is not one of all experts."""
        trunk, found, word = name.rpartition(_BLOCK)
        kinds = _KINDS.get(word, ()) if found else ()
        for expert in range(shape[0] if kinds else 0):
            width = shape[-1] // len(kinds)
            for index, kind in enumerate(kinds):
                start, step = (index, len(kinds)) if self.in_turn else (index * width, 1)
                logical = f"{trunk}{_BLOCK}{expert}.{kind}"
                yield Member(logical, (width, *shape[1:-1]), Place(expert, start, step))
