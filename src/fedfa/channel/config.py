"""The config section ``channel``."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fedfa.checked_section import CheckedSection

Down = Literal["float32", "float16", "int8", "int4", "int2", "int1"]
Up = Literal["float32", "float16", "int8", "int4", "int2", "int1", "sign", "topk", "randomk"]


class ChannelConfig(CheckedSection):
    """How tensors travel between the server and the clients; see docs/fleet.md.

    Example:
        >>> ChannelConfig(up="int8").on
        True
    """

    section: ClassVar[str] = "channel"

    up: Up = "float32"
    """From the clients: half precision, unbiased quantisation to so many bits, or updates as signs or sparse numbers
    with error feedback."""
    down: Down = "float32"
    """To the clients."""
    share: float = Field(0.01, gt=0, le=1)
    """Share of the numbers of each tensor that ``topk`` and ``randomk`` send."""

    @property
    def on(self) -> bool:
        """Whether anything is compressed."""
        return self.up != "float32" or self.down != "float32"
