from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_bytescheduler import CreditTuner, OptionError, UnsupportedError
from lightning_bytescheduler.tuning.record import StepTimeEstimate, TrialEntry, standing_of
from lightning_bytescheduler.tuning.sizes import PLAIN_DDP, TuningPoint
from tests.ddp.fits import said


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("trials", 0),
        ("trials", True),
        ("steps_per_trial", 3),
        ("steps_per_trial", 10.0),
        ("cost_share", -0.1),
        ("cost_share", float("nan")),
        ("record", ""),
        ("record", 3),
    ],
)
def test_misuse(option: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"{option} must be"):
        CreditTuner(**{option: value})


def test_options_are_given_by_name() -> None:
    with pytest.raises(OptionError, match=r"as in CreditTuner\(trials=15\)"):
        CreditTuner(15)  # type: ignore[misc]
    with pytest.raises(OptionError, match="Did you mean 'trials'"):
        CreditTuner(trial=15)  # type: ignore[call-arg]


def test_one_tuner_decides() -> None:
    tuner = CreditTuner()
    strategy = SimpleNamespace(has_sizes_to_tune=True)
    CreditTuner().setup(SimpleNamespace(strategy=strategy, callbacks=[tuner]), None, "fit")  # type: ignore[arg-type]
    trainer: Any = SimpleNamespace(strategy=strategy, callbacks=[tuner, CreditTuner()])
    with pytest.raises(UnsupportedError, match="more than one CreditTuner"):
        tuner.setup(trainer, None, "fit")  # type: ignore[arg-type]


def test_other_strategies_have_nothing_to_tune() -> None:
    trainer: Any = SimpleNamespace(strategy=object())
    with pytest.raises(UnsupportedError, match="tunes ByteSchedulerStrategy, not object: use Trainer"):
        CreditTuner().setup(trainer, None, "fit")  # type: ignore[arg-type]
    CreditTuner().setup(trainer, None, "validate")  # type: ignore[arg-type]


def test_a_record_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"^record=.* and that is a folder"):
        CreditTuner(record=tmp_path)


def test_outside_of_a_fit() -> None:
    tuner = CreditTuner()
    with pytest.raises(UnsupportedError, match="outside of a fit"):
        tuner.current  # noqa: B018
    assert not tuner.is_settled
    assert tuner.entries == ()
    checkpoint: dict[str, Any] = {}
    tuner.on_save_checkpoint(None, None, checkpoint)  # type: ignore[arg-type]
    assert checkpoint == {}


def entry(kind: str, ms: float, *, credit: int = 4000, outcome: str = "measured", search: int = 0) -> TrialEntry:
    return TrialEntry(
        search=search,
        kind=kind,
        step=10,
        point=TuningPoint(credit, 1000) if credit else PLAIN_DDP,
        time=StepTimeEstimate(ms / 1e3, 1e-4, ms / 1e5, 20),
        outcome=outcome,
    )


START, DDP = entry("start", 37.2), entry("ddp", 34.9, credit=0)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (
            (START,),
            "overlapped steps with credit 4,000, partition 1,000 are fastest so far (37.2 ms); 1 of 3 trials made",
        ),
        (
            (START, DDP),
            "synchronised steps are fastest so far (34.9 ms against 37.2 ms overlapped); 2 of 3 trials made",
        ),
        (
            (START, DDP, entry("search", 33.0, credit=8000)),
            "overlapped steps with credit 8,000, partition 1,000 are fastest so far (33.0 ms against 34.9 ms "
            "synchronised); trials are used up",
        ),
        (
            (
                START,
                DDP,
                entry("confirm", 37.0),
                entry("confirm", 35.0, credit=0),
                entry("chosen", 35.0, credit=0),
            ),
            "synchronised steps are fastest (35.0 ms against 37.0 ms overlapped), after 2 trials",
        ),
        (
            (DDP, entry("guess", 34.7), entry("chosen", 34.9, credit=0)),
            "overlapped steps are hardly faster (34.7 ms against 34.9 ms synchronised), after 2 trials",
        ),
        (
            (START, DDP, entry("chosen", 35.0, credit=0), entry("drift", 70.0), entry("start", 70.0, search=1)),
            "overlapped steps with credit 4,000, partition 1,000 are fastest so far (70.0 ms); 1 of 3 trials made",
        ),
    ],
)
def test_what_it_has_come_to_so_far(entries: tuple[TrialEntry, ...], words: str) -> None:
    assert standing_of(entries, 3) == words


class Fake:
    """A search that decides what a test says, at each step."""

    standing = "so it stands"
    in_force_from = 0

    def __init__(self, *steps: tuple[tuple[TrialEntry, ...], tuple[bool, bool] | None, bool]) -> None:
        self.entries: tuple[TrialEntry, ...] = ()
        self.verdict: tuple[bool, bool] | None = None
        self.is_settled = False
        self.tunes_sizes = True
        self._steps = list(steps)

    def step_took(self, *_: Any, **__: Any) -> None:
        new, self.verdict, self.is_settled = self._steps.pop(0)
        self.entries += new


def test_what_is_decided_is_told_once_and_trials_are_not() -> None:
    tuner = CreditTuner(trials=3)
    tuner._search = Fake(  # type: ignore[assignment]
        ((), None, False),
        ((), (True, False), True),
        ((START, DDP), (True, False), True),
        ((), (False, True), False),
        ((), (False, True), False),
        ((entry("chosen", 34.9, credit=0),), (True, True), True),
        ((), (True, True), True),
        ((entry("drift", 70.0),), None, False),
        ((), (True, True), True),
    )
    with said() as lines:
        for step in range(9):
            tuner.step_took(step, 1.0, as_decided=True)
    assert lines == [
        "bytescheduler: steps stay synchronised: so it stands.",
        "bytescheduler: steps are from here on overlapped: so it stands. How much travels at once is tuned while "
        "training.",
        "bytescheduler: steps are from here on synchronised: so it stands.",
        "bytescheduler: steps have changed, to 70.0 ms: tuning begins anew.",
        "bytescheduler: steps are from here on synchronised: so it stands.",
    ]
