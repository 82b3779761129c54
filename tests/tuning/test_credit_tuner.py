from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_bytescheduler import CreditTuner, OptionError, UnsupportedError
from lightning_bytescheduler.tuning import credit_tuner


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("trials", 0),
        ("trials", True),
        ("steps_per_trial", 3),
        ("steps_per_trial", 10.0),
        ("precision", 0),
        ("precision", 1.0),
        ("cost_share", -0.1),
        ("cost_share", float("nan")),
        ("cost_steps", 0),
        ("warm_up", -1),
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
    strategy = SimpleNamespace(runtime=None)
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
    tuner = CreditTuner(record=tmp_path / "below" / "tuning.jsonl")
    (tmp_path / "below").touch()  # since it was checked
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(runtime=None), callbacks=[tuner], is_global_zero=True)
    with pytest.raises(OptionError, match=r"^record=.* must be a file that can be written \("):
        tuner.setup(trainer, None, "fit")  # type: ignore[arg-type]
    trainer.is_global_zero = False
    tuner.setup(trainer, None, "fit")  # type: ignore[arg-type]


def test_outside_of_a_fit() -> None:
    tuner = CreditTuner()
    with pytest.raises(UnsupportedError, match="outside of a fit"):
        tuner.current  # noqa: B018
    assert not tuner.is_settled
    assert tuner.entries == ()
    checkpoint: dict[str, Any] = {}
    tuner.on_save_checkpoint(None, None, checkpoint)  # type: ignore[arg-type]
    assert checkpoint == {}
    tuner.stop()


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("bytescheduler-tuner")]


def test_the_thread_ends_with_stop() -> None:
    tuner = CreditTuner()
    future = tuner._submit(lambda: 3)
    assert future.result(5) == 3
    assert _threads() == ["bytescheduler-tuner_0"]
    tuner.stop()
    tuner.stop()
    assert _threads() == []
    assert tuner._submit(lambda: 4).result(5) == 4, "and begins again with the next fit"
    tuner.stop()


def test_stop_waits_a_bounded_time_for_a_computation_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credit_tuner, "_STOP_S", 0.2)
    tuner = CreditTuner()
    release = threading.Event()
    tuner._submit(lambda: release.wait(20))
    queued = tuner._submit(lambda: 5)
    started = time.monotonic()
    tuner.stop()
    assert time.monotonic() - started < 10
    assert queued.cancelled()
    release.set()
