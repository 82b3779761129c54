"""What a search may cost by default, as the documentation says."""

from __future__ import annotations

import inspect
from dataclasses import asdict

from lightning_bytescheduler import CreditTuner
from lightning_bytescheduler.tuning.search import TuningOptions

DEFAULTS = {
    "trials": 15,
    "steps_per_trial": 100,
    "plain_ddp": True,
    "cost_share": 0.02,
}


def test_the_defaults_of_a_search() -> None:
    assert asdict(TuningOptions()) == DEFAULTS


def test_the_callback_has_the_same() -> None:
    given = {name: one.default for name, one in inspect.signature(CreditTuner).parameters.items()}
    shared = given.keys() & DEFAULTS.keys()
    assert {"trials", "steps_per_trial"} <= shared
    assert {name: given[name] for name in shared} == {name: DEFAULTS[name] for name in shared}
