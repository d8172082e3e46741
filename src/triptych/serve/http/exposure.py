"""What clients may do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """What clients may do.

    Args:
        keys: API keys; none: everybody may ask.
        max_body_bytes: of a request.
        max_requests: served at once, waiting ones included.

    """

    keys: Sequence[str] = ()
    max_body_bytes: int = 4 << 20
    max_requests: int = 1024
