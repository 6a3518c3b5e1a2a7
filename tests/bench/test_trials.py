"""The trials of FedFA's variants: planned from a file, chosen on validation samples, failures kept."""

from __future__ import annotations

import tomllib

from benchmarks.trials import PLAN, Trial, planned, run, table


def test_every_planned_trial_has_a_config_with_validation_samples() -> None:
    trials = list(planned(tomllib.loads(PLAN.read_text(encoding="utf-8"))))
    assert len({trial.name for trial in trials}) == len(trials) > 20
    assert all(trial.config().data.validation == "server:0.1" for trial in trials)


def test_a_trial_is_recorded_also_if_it_fails() -> None:
    layer = {"rounds": 2, "data": {"name": "digits", "clients": 10, "partition": "shards:2"}, "model": {"name": "mlp"}}
    good = run(Trial("digits", "fedavg", {}, 1, layer))
    assert 0 < good["last"] <= 1
    assert len(good["accuracies"]) == good["rounds"] == 2
    bad = run(Trial("digits", "fedbn", {}, 1, layer))
    assert "failed" in bad
    rows = table([bad, good]).splitlines()[2:]
    assert rows[0].startswith("| digits | fedavg |")
    assert "failed: " in rows[1]
