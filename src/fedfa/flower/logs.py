"""What fedfa has to say, in Flower's log: on the console of the process, and where ``flwr run --stream`` listens."""

from __future__ import annotations

import logging


def speak() -> None:
    """Let fedfa's messages go where Flower's go."""
    mine, flower = logging.getLogger("fedfa"), logging.getLogger("flwr")
    for handler in flower.handlers:
        if handler not in mine.handlers:
            mine.addHandler(handler)
    if mine.level == logging.NOTSET:
        mine.setLevel(logging.INFO)
