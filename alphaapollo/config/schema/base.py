"""What every section is, and the numbers that several need."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Ratio = Annotated[float, Field(ge=0.0, le=1.0)]
Frequency = Annotated[int, Field(ge=-1)]
Device = Literal["cpu", "cuda"]
Scalar = bool | int | float | str


class Section(BaseModel):
    """A part of the configuration; strict: no unknown keys, and immutable once checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
