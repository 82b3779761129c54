"""What is the leader's alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lightning_bytescheduler.diloco.training_loop import refuse_plateaus
from lightning_bytescheduler.exceptions import UnsupportedError


def test_a_schedule_that_follows_a_metric_is_refused() -> None:
    steps = SimpleNamespace(reduce_on_plateau=False, monitor=None)
    refuse_plateaus([steps])
    with pytest.raises(UnsupportedError, match="ReduceLROnPlateau of 'validation_loss' is not allowed with a coord"):
        refuse_plateaus([steps, SimpleNamespace(reduce_on_plateau=True, monitor="validation_loss")])
