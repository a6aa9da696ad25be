"""What all sections of settings have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, StringConstraints, model_validator

_NUMBERS = (int, float, int | None, float | None)

Name = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]{1,200}$")]
"""Of what is named in logs, metrics and error messages."""


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, and numbers finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _truths_are_no_numbers(cls, data: Any) -> Any:
        """YAML has many words for true and false, which Python takes for 1 and 0."""
        if isinstance(data, Mapping):
            for name, value in data.items():
                field = cls.model_fields.get(name)
                if isinstance(value, bool) and field is not None and field.annotation in _NUMBERS:
                    raise ValueError(f"{name}: a number, not {str(value).lower()}")
        return data
