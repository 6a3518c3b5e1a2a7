"""The fleet: for each client its computing speed, its links and when it is available, as arrays.

A fleet is data. It is generated from published distributions, read from a file of the user's own, or all devices are
equal; a million devices are a few arrays.

======================  =============================================================================================
``equal``               every device has the speeds of the config
``lognormal``           speeds are log-normal around those of the config, with ``spread`` as the standard deviation of
                        the logarithm, independently for computing, download and upload
``phones``              computing: one of the AI-Benchmark scores of 307 phone models, relative to their median, capped
                        at five times the median (scores above belong to neural accelerators, which overstate training
                        in float32). Links: one of 19 measured ones; download and upload speed are drawn from normal
                        distributions with its means and standard deviations, again while not positive
a ``.csv`` file         a header ``speed,down,up`` and one row per client; a fourth column ``peak`` is optional
a ``.json`` file        an object with the lists ``speed``, ``down``, ``up`` and optionally ``peak``
======================  =============================================================================================

Speeds are in samples per second, links in bytes per second, the peak of availability in seconds of the day. The
measured numbers and their source are in ``measured.json``.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from fedfa.error_messages import nearest
from fedfa.errors import ConfigError
from fedfa.fleet.availability import DAY, DailyAvailability, Floats
from fedfa.fleet.config import FleetConfig
from fedfa.learning.random import stream

_COLUMNS = ("speed", "down", "up")
_CAP = 5.0
"""Largest speed of a phone relative to the median phone."""
_KILOBYTE = 1000


@dataclass(frozen=True)
class Fleet:
    """The devices of all clients.

    Args:
        speed: Samples a device trains on per second.
        down: Bytes it receives per second.
        up: Bytes it sends per second.
        availability: When devices are available; None: always.
    """

    speed: Floats
    down: Floats
    up: Floats
    availability: DailyAvailability | None = None

    def __len__(self) -> int:
        return len(self.speed)

    @property
    def fingerprint(self) -> str:
        """Of all arrays; a run does not continue with another fleet."""
        digest = hashlib.blake2b(digest_size=16)
        peaks = [] if self.availability is None else [self.availability.peak]
        for array in [self.speed, self.down, self.up, *peaks]:
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def build_fleet(config: FleetConfig, clients: int) -> Fleet:
    """The fleet that a config describes, for this number of clients.

    Raises:
        ConfigError: An unknown generator, or a file that does not fit.

    Example:
        >>> fleet = build_fleet(FleetConfig(devices="phones"), 1000)
        >>> float(fleet.speed.max()), bool(fleet.speed.max() / fleet.speed.min() > 20)
        (500.0, True)
    """
    name = config.devices or "equal"
    generators = {"equal": _equal, "lognormal": _lognormal, "phones": _phones}
    if name in generators:
        arrays = generators[name](config, clients)
    elif name.endswith((".csv", ".json")):
        arrays = _read(Path(name).expanduser(), clients)
    else:
        raise ConfigError(
            f"fleet.devices = {name!r}{nearest(name, generators)}: give {', '.join(generators)}, or a .csv or .json "
            "file"
        )
    fleet, peak = Fleet(arrays["speed"], arrays["down"], arrays["up"]), arrays.get("peak")
    if config.availability == "always":
        return fleet
    if peak is None:  # two at night by the device's own clock, most within four hours of it
        peak = stream(config.seed, "fleet peak").normal(2 * 3600, 2 * 3600, clients) % DAY
    daily = DailyAvailability(peak, config.available, config.session, config.seed, config.swing)
    return replace(fleet, availability=daily)


def _equal(config: FleetConfig, clients: int) -> dict[str, Floats]:
    return {name: np.full(clients, getattr(config, name), dtype=np.float64) for name in _COLUMNS}


def _lognormal(config: FleetConfig, clients: int) -> dict[str, Floats]:
    return {
        name: getattr(config, name) * stream(config.seed, f"fleet {name}").lognormal(0.0, config.spread, clients)
        for name in _COLUMNS
    }


def _phones(config: FleetConfig, clients: int) -> dict[str, Floats]:
    measured = measured_devices()
    scores = np.asarray(measured["scores"], dtype=np.float64)
    relative = np.minimum(scores / np.median(scores), _CAP)
    speed = config.speed * stream(config.seed, "fleet speed").choice(relative, clients)
    links = np.asarray(measured["links"], dtype=np.float64)
    chosen = links[stream(config.seed, "fleet link").integers(len(links), size=clients)]
    down = _positive_normal(chosen[:, 0], chosen[:, 1], stream(config.seed, "fleet down"))
    up = _positive_normal(chosen[:, 2], chosen[:, 3], stream(config.seed, "fleet up"))
    return {"speed": speed, "down": _KILOBYTE * down, "up": _KILOBYTE * up}


def _positive_normal(mean: Floats, deviation: Floats, rng: np.random.Generator) -> Floats:
    drawn = rng.normal(mean, deviation)
    while len(again := np.flatnonzero(drawn < 1.0)):  # a link below 1 kB/s is no link
        drawn[again] = rng.normal(mean[again], deviation[again])
    return drawn


def measured_devices() -> dict[str, Any]:
    """Measured links (mean and deviation of download, then of upload, in kB/s) and phones' scores, with the source."""
    text = resources.files("fedfa.fleet").joinpath("measured.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def _read(path: Path, clients: int) -> dict[str, Floats]:
    try:
        text = path.read_text(encoding="utf-8")
        columns = _columns_of_json(text) if path.suffix == ".json" else _columns_of_csv(text)
    except OSError as error:
        raise ConfigError(f"fleet.devices: {path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # JSON, encoding, and what the two readers refuse
        raise ConfigError(f"fleet.devices: {path}: {error}") from None
    arrays = {}
    for name, values in columns.items():
        if len(values) != clients:
            raise ConfigError(
                f"fleet.devices: {path} has {len(values)} values of {name!r}, but the federation has {clients} "
                "clients; give one per client"
            )
        try:
            array = np.asarray(values, dtype=np.float64)
        except (TypeError, ValueError):
            raise ConfigError(f"fleet.devices: {path}: {name!r} holds something that is no number") from None
        wrong = ~np.isfinite(array) | ((array <= 0) if name != "peak" else (array < 0))
        if len(bad := np.flatnonzero(wrong)):
            raise ConfigError(
                f"fleet.devices: {path}: {name!r} of client {bad[0]} is {array[bad[0]]:g}; give a positive number"
            )
        arrays[name] = array
    return arrays


def _columns_of_json(text: str) -> Mapping[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict) or not all(isinstance(values, list) for values in found.values()):
        raise ValueError('give an object of lists: {"speed": […], "down": […], "up": […]}')
    return _checked_names(found)


def _columns_of_csv(text: str) -> Mapping[str, Any]:
    rows = [row for row in csv.reader(text.splitlines()) if row]
    header = [name.strip() for name in rows[0]] if rows else []
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(header):
            raise ValueError(f"row {number} has {len(row)} values, the header {len(header)}")
    return _checked_names({name: [row[at] for row in rows[1:]] for at, name in enumerate(header)})


def _checked_names(columns: Mapping[str, Any]) -> Mapping[str, Any]:
    known = {*_COLUMNS, "peak"}
    if missing := [name for name in _COLUMNS if name not in columns]:
        raise ValueError(f"{missing[0]!r} is missing; it needs {', '.join(_COLUMNS)}, and may have peak")
    if unknown := [name for name in columns if name not in known]:
        raise ValueError(f"unknown column {unknown[0]!r}{nearest(unknown[0], known)}; it may have {', '.join(known)}")
    return columns
