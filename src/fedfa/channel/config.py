"""The config section ``channel``."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from fedfa.channel.codecs import QUANTISED
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
    entropy: Literal["none", "deflate"] | None = None
    """``"deflate"``: compress quantised integers further; left out, or ``"none"``: not."""

    @property
    def on(self) -> bool:
        """Whether anything is compressed."""
        return self.up != "float32" or self.down != "float32"

    @model_validator(mode="after")
    def _integers(self) -> ChannelConfig:
        if self.entropy == "deflate" and not {self.up, self.down} & set(QUANTISED):
            raise ValueError(
                "channel.entropy compresses quantised integers, and there are none; set channel.up or channel.down to "
                f"one of {', '.join(QUANTISED)}"
            )
        return self
