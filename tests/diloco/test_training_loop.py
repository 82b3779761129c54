"""Where Lightning's loop and the rounds of a coordinator meet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from lightning_bytescheduler.diloco.training_loop import CoordinatedBoundaries, refuse_plateaus
from lightning_bytescheduler.exceptions import UnsupportedError


def test_a_schedule_that_follows_a_metric_is_refused() -> None:
    steps = SimpleNamespace(reduce_on_plateau=False, monitor=None)
    refuse_plateaus([steps])
    with pytest.raises(UnsupportedError, match="ReduceLROnPlateau of 'validation_loss' is not allowed with a coord"):
        refuse_plateaus([steps, SimpleNamespace(reduce_on_plateau=True, monitor="validation_loss")])


def restarted(*, batches: int, is_over: bool, mid_validation: bool = False) -> tuple[CoordinatedBoundaries, Any, Any]:
    """The leader's boundaries after a restart of an epoch with so many batches; and its loop and session."""
    trainer, session = Mock(global_step=batches, num_training_batches=float("inf"), received_sigterm=False), Mock()
    trainer.fit_loop.max_epochs, trainer.fit_loop.max_steps, trainer.should_stop = None, -1, False
    session.over, session.leads, session.version = False, True, 0
    session.is_due.return_value = False
    loop = trainer.fit_loop.epoch_loop
    loop.restarting, loop.batch_progress.current.ready = True, batches
    loop._num_ready_batches_reached.return_value = is_over
    loop._should_check_val_fx.return_value = is_over
    loop.val_loop.restarted_mid_evaluation = mid_validation
    group = Mock(any=bool, total=list, leads=True)
    data = Mock(is_cut=False)
    boundaries = CoordinatedBoundaries(trainer, session, group=group, leads=True, data=data)
    return boundaries, loop, session


@pytest.mark.parametrize("batches", [0, 3])
def test_an_epoch_that_ends_without_a_batch_steps_the_schedules_also_where_it_was_resumed(batches: int) -> None:
    boundaries, loop, _ = restarted(batches=batches, is_over=False)
    boundaries.before_epoch_end()
    loop.update_lr_schedulers.assert_called_once_with("epoch", update_plateau_schedulers=False)
    boundaries, loop, _ = restarted(batches=3, is_over=True)
    boundaries.before_epoch_end()
    loop.update_lr_schedulers.assert_not_called()


@pytest.mark.parametrize("limit", ["max_steps", "the rounds"])
def test_an_epoch_that_a_limit_cuts_steps_no_schedule(limit: str) -> None:
    boundaries, loop, session = restarted(batches=3, is_over=False)
    if limit == "max_steps":
        boundaries.trainer.fit_loop.max_steps = 3  # type: ignore[misc]
    else:
        session.over = True
    boundaries.before_epoch_end()
    loop.update_lr_schedulers.assert_not_called()


@pytest.mark.parametrize("is_over", [True, False])
def test_nothing_is_paused_for_what_lightning_asks_before_the_first_batch_of_a_restart(is_over: bool) -> None:
    boundaries, _, session = restarted(batches=3, is_over=is_over)
    assert boundaries._after_batch(Mock()) is is_over
    session.pause.assert_not_called()
    boundaries.report_batch(samples=2, loss=None)
    assert boundaries._after_batch(Mock()) is is_over
    assert session.pause.call_count == is_over


def test_a_validation_that_is_gone_on_with_pauses_once() -> None:
    boundaries, _, session = restarted(batches=3, is_over=True, mid_validation=True)
    assert [boundaries._after_batch(Mock()) for _ in range(2)] == [True, True]  # Lightning asks twice
    session.pause.assert_called_once_with()
    boundaries.after_validation()
    session.resume.assert_called_once_with()
