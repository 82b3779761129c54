"""Backward passes that end in an error, or that another thread takes at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from lightning_bytescheduler.ddp.fit import Fit
from lightning_bytescheduler.ddp.own_gradients import OwnGradients
from tests.ddp.routes import idle_wire


@pytest.fixture
def fit() -> Fit:
    return Fit(idle_wire(Mock()), [nn.Parameter(torch.ones(3))], torch.device("cpu"))


def test_updates_land_after_a_backward_pass_that_failed(fit: Fit) -> None:
    with pytest.raises(ValueError, match="boom"), fit.backward():
        raise ValueError("boom")
    fit.step = step = Mock(number=1)
    fit.flush()
    step.flush.assert_called_once_with()


def test_another_threads_pass_leaves_the_trainings_alone(fit: Fit) -> None:
    def passes() -> None:
        with fit.backward_pass():
            pass

    with fit.backward(), ThreadPoolExecutor(1) as another:
        fit.step = step = Mock(number=1)
        another.submit(passes).result()
        assert not step.mock_calls
        passes()
        step.open_all.assert_called_once_with("another backward pass")


def test_a_pass_that_began_before_the_trainings_ends_nothing_of_it() -> None:
    parameter = nn.Parameter(torch.ones(3))
    own = OwnGradients([parameter], lambda _: None)
    own._needed = True
    elsewhere = own.backward_pass()
    with ThreadPoolExecutor(1) as another:
        another.submit(elsewhere.__enter__).result()
        with own.backward_pass():
            another.submit(elsewhere.__exit__, None, None, None).result()
            assert own.look(parameter), "the training's pass is under way"
    assert not own.look(parameter)
