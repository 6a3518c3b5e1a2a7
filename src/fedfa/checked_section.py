"""A config section that users may also make in Python."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from fedfa.error_messages import validation_message
from fedfa.errors import ConfigError


class CheckedSection(BaseModel):
    """Frozen values that are checked; what is wrong is reported with the key of the config."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    section: ClassVar[str]
    """Its name in a config."""

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise ConfigError(validation_message(error, type(self), self.section)) from None

    # Inside a Config, pydantic collects the problems of all sections instead of calling __init__.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # pydantic's mark of its own __init__
