"""Stop strings in a text that comes in pieces: nothing of them is ever handed on."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.errors import InputError, Problem


class StopText:
    """Pieces of a text in, the pieces that may be shown out.

    What might be the beginning of a stop string is held back until it is decided. The text ends
    before the stop string that is complete first; of several that end together, the longest.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if not all(stops):
            raise InputError(Problem("a stop string is empty", works="strings of a character"))
        self._stops = sorted(stops, key=len, reverse=True)
        self._held = ""
        self.is_stopped = False

    def add(self, piece: str) -> str:
        """What of the text so far may be shown now; nothing more once it is stopped."""
        if self.is_stopped:
            return ""
        before, self._held = len(self._held), self._held + piece
        for end in range(before + 1, len(self._held) + 1):
            found = next((s for s in self._stops if self._held[:end].endswith(s)), None)
            if found is not None:
                self.is_stopped = True
                shown, self._held = self._held[: end - len(found)], ""
                return shown
        keep = self._undecided()
        shown, self._held = self._held[: len(self._held) - keep], self._held[-keep:] if keep else ""
        return shown

    def finish(self) -> str:
        """What was held back: the text ended otherwise."""
        shown, self._held = self._held, ""
        return shown

    def _undecided(self) -> int:
        """Characters at the end that begin a stop string, as many as there are."""
        text = self._held
        for size in range(min(len(text), max(map(len, self._stops), default=1) - 1), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
