"""Fleets: their distributions, files of the user's own, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedfa.cli.app import app
from fedfa.errors import ConfigError
from fedfa.experiment.config import Config
from fedfa.fleet.config import FleetConfig
from fedfa.fleet.devices import build_fleet, measured_devices


def test_equal_devices_have_the_speeds_of_the_config() -> None:
    fleet = build_fleet(FleetConfig(devices="equal", speed=7, down=11, up=13), 3)
    assert fleet.speed.tolist() == [7] * 3
    assert fleet.down.tolist() == [11] * 3
    assert fleet.up.tolist() == [13] * 3


def test_lognormal_speeds_have_the_median_and_the_spread_of_the_config() -> None:
    """ln(speed) is normal with mean ln(50) and deviation 0.5: with 40,000 draws both are known to about 0.01."""
    fleet = build_fleet(FleetConfig(devices="lognormal", speed=50, spread=0.5), 40_000)
    logarithm = np.log(fleet.speed)
    assert abs(logarithm.mean() - np.log(50)) < 0.01
    assert abs(logarithm.std() - 0.5) < 0.01
    independent = np.corrcoef(np.log([fleet.speed, fleet.down, fleet.up]))
    assert np.abs(independent - np.eye(3)).max() < 0.02


def test_phones_are_drawn_from_the_measurements() -> None:
    measured = measured_devices()
    scores = np.asarray(measured["scores"])
    fleet = build_fleet(FleetConfig(devices="phones", speed=100), 50_000)
    relative = np.unique(np.minimum(scores / np.median(scores), 5.0))
    assert np.isin(fleet.speed, 100 * relative).all()
    assert np.median(fleet.speed) == pytest.approx(100, rel=0.05)
    assert fleet.speed.max() == 500
    # The mean of a normal variable conditioned on being positive is at least its mean, and here little more.
    means = 1000 * np.asarray(measured["links"])[:, [0, 2]].mean(0)
    for found, mean in zip((fleet.down.mean(), fleet.up.mean()), means, strict=True):
        assert mean < found < 1.08 * mean
    assert fleet.down.min() >= 1000
    assert fleet.up.min() >= 1000


def test_a_fleet_depends_on_its_seed_only() -> None:
    first, same, other = (build_fleet(FleetConfig(devices="phones", seed=seed), 50) for seed in (1, 1, 2))
    assert first.fingerprint == same.fingerprint != other.fingerprint


def test_a_million_devices_are_a_few_arrays() -> None:
    fleet = build_fleet(FleetConfig(devices="phones", availability="daily"), 1_000_000)
    assert fleet.availability is not None
    arrays = [fleet.speed, fleet.down, fleet.up, fleet.availability.peak]
    assert sum(array.nbytes for array in arrays) == 32_000_000


@pytest.mark.parametrize("suffix", ["csv", "json"])
def test_files_of_the_users_own(suffix: str, tmp_path: Path) -> None:
    path, columns = tmp_path / f"devices.{suffix}", {"speed": [1, 2.5], "down": [10, 20], "up": [5, 6]}
    if suffix == "json":
        path.write_text(json.dumps(columns))
    else:
        path.write_text("speed, down, up\n1,10,5\n\n2.5,20,6\n")
    fleet = build_fleet(FleetConfig(devices=str(path)), 2)
    assert [array.tolist() for array in (fleet.speed, fleet.down, fleet.up)] == list(columns.values())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "speed,down,up\n1,2,3\n", "1 values of 'speed', but the federation has 2 clients"),
        ("a.csv", "speed,down\n1,2\n1,2\n", "'up' is missing"),
        ("a.csv", "speed,down,up\n1,2,3\n1,2\n", "row 3 has 2 values"),
        ("a.csv", "speed,down,up\n1,2,3\n1,2,x\n", "'up' holds something that is no number"),
        ("a.csv", "speed,down,up\n1,2,3\n0,2,3\n", "'speed' of client 1 is 0"),
        ("a.json", '{"speed": [1, 2], "down": [1, 2], "up": [1, 2], "sped": [1, 2]}', "unknown column 'sped'"),
        ("a.json", "[1, 2]", "give an object of lists"),
        ("a.json", "{", "a.json"),
        ("a.csv", None, "cannot be read"),
        ("phone", None, "did you mean 'phones'"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / name if "." in name else Path(name)
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        build_fleet(FleetConfig(devices=str(path)), 2)


def test_options_without_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"fleet\.speed has no effect without devices"):
        Config.resolve({"fleet": {"speed": 3}})
    with pytest.raises(ConfigError, match="112% of the time at the peak"):
        FleetConfig(devices="equal", availability="daily", available=0.7)


def test_fleet_show(tmp_path: Path) -> None:
    picture = tmp_path / "fleet.png"
    asked = [
        "fleet",
        "show",
        "phones",
        "--clients",
        "200",
        "--set",
        "fleet.availability=daily",
        "--picture",
        str(picture),
    ]
    result = CliRunner().invoke(app, asked, terminal_width=200)
    assert result.exit_code == 0, result.output
    assert "upload [kB/s]" in result.output
    assert "available" in result.output
    assert picture.stat().st_size > 10_000
