"""The config section ``channel``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedfa.error_messages import validation_message
from fedfa.errors import ConfigError

Down = Literal["float32", "float16", "int8", "int4", "int2", "int1"]
Up = Literal["float32", "float16", "int8", "int4", "int2", "int1", "sign", "topk", "randomk"]


class ChannelConfig(BaseModel):
    """How tensors travel between the server and the clients; see docs/fleet.md.

    Example:
        >>> ChannelConfig(up="int8").on
        True
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    up: Up = "float32"
    """From the clients: half precision, unbiased quantisation to so many bits, or updates as signs or sparse numbers
    with error feedback."""
    down: Down = "float32"
    """To the clients."""
    share: float = Field(0.01, gt=0, le=1)
    """Share of the numbers of each tensor that ``topk`` and ``randomk`` send."""

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise ConfigError(validation_message(error, type(self), "channel")) from None

    # Inside a Config, pydantic collects the problems of all sections instead of calling __init__.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # pydantic's mark of its own __init__

    @property
    def on(self) -> bool:
        """Whether anything is compressed."""
        return self.up != "float32" or self.down != "float32"
