from __future__ import annotations

import pytest
import torch

from fedfa.errors import ConfigError
from fedfa.learning.device import DeviceName, choose_device

THERE: dict[DeviceName, bool] = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}


def test_the_cpu_is_always_there() -> None:
    assert choose_device("cpu") == torch.device("cpu")


def test_auto_takes_the_fastest_there_is() -> None:
    best = next((name for name, there in THERE.items() if there), "cpu")
    assert choose_device("auto").type == best


@pytest.mark.parametrize("name", ["cuda", "mps"])
def test_a_device_that_is_not_there_is_an_error_that_says_what_is(name: DeviceName) -> None:
    if THERE[name]:
        pytest.skip(f"this machine has {name}")
    with pytest.raises(ConfigError, match=rf'device = "{name}".*only: .*cpu.*"auto"'):
        choose_device(name)
