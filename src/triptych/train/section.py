"""What every section of a job file is made of: strict types, messages that reach the user."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from triptych.errors import Problem


class Contradiction(ValueError):
    """Keys of one section that do not go together; reaches the user as a Problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.what)
        self.problem = problem


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Texts = Annotated[
    tuple[str, ...], BeforeValidator(_as_list), Field(strict=False)
]  # TOML arrays are lists; a single text is a list of one
Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
AtLeastZero = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A section of the job file: no unknown keys, no conversion of types, never changed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
