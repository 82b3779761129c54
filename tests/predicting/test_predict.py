"""A step of a user's module is measured, and predicted from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lightning_bytescheduler
from lightning_bytescheduler import LinkModel, OptionError, Prediction, UnsupportedError, advise, predict
from lightning_bytescheduler.predicting.predict import _device
from lightning_bytescheduler.simulation.prediction import BYTESCHEDULER, DDP
from tests.ddp.stepping import Batches, Clock, Stepping
from tests.support.models import Tower
from tests.support.rank_pool import RankPool, let_go

# Sending the 80 bytes of a Stepping takes four workers 60 seconds; its step takes 71.5.
SLOW = LinkModel(workers=4, bandwidth=2.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    clock.install(monkeypatch)
    return clock


def test_it_is_public() -> None:
    assert {"Prediction", "LinkModel", "advise", "predict"} <= set(lightning_bytescheduler.__all__)
    assert advise is predict
    with pytest.raises(ImportError, match=r"There is no Advice any more\. It is called Prediction"):
        from lightning_bytescheduler import Advice  # type: ignore[attr-defined]  # noqa: F401


def test_a_model_on_a_link(clock: Clock) -> None:
    given = predict(Stepping(clock), Batches(clock), link=SLOW, steps=2)
    assert isinstance(given, Prediction)
    assert given.link == SLOW
    assert given.compute_seconds == pytest.approx(71.5)
    assert given.communication_seconds == pytest.approx(60.0)
    # All gradients are in one bucket: nothing is hidden.
    assert given.of(DDP).step_seconds == pytest.approx(131.5)
    assert given.of(DDP).step_seconds > given.of(BYTESCHEDULER).step_seconds >= given.ceiling_seconds
    assert given.worker_seconds == ()
    assert "step of 4 samples takes 71,500.0 ms on one worker (cpu)" in str(given)


def test_cuda_is_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert _device("cuda") == _device(None) == torch.device("cuda", 3)
    assert _device("cuda:1") == torch.device("cuda", 1)


def test_workers_of_the_call_beat_those_of_the_link(clock: Clock) -> None:
    given = predict(Stepping(clock), Batches(clock), link=SLOW, workers=2, steps=1)
    assert given.link == replace(SLOW, workers=2)
    assert given.communication_seconds == pytest.approx(40.0)


def test_clipping_is_as_for_the_trainer(clock: Clock) -> None:
    given = predict(Stepping(clock), Batches(clock), link=SLOW, gradient_clip_val=1.0, steps=1)
    assert given.measured.norm_needed_by == ("gradient norm clipping",)
    given = predict(
        Stepping(clock), Batches(clock), link=SLOW, gradient_clip_val=1.0, gradient_clip_algorithm="value", steps=1
    )
    assert given.measured.norm_needed_by == ()


def test_precision_is_as_for_the_trainer() -> None:
    seen = []

    class Module(Tower):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().training_step(batch, batch_idx)

        def __deepcopy__(self, memo: Any) -> Any:
            return Module()

    assert predict(Module(), link=SLOW, precision="bf16-mixed", device="cpu", steps=1).measured.compressed_share == 0.5
    assert set(seen) == {True}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"link": SLOW, "workers": 1}, OptionError, "workers=1 .* 2 or more: one worker has nobody to talk to"),
        ({"link": SLOW, "workers": 0}, OptionError, "workers=0"),
        ({"link": SLOW, "workers": 2.5}, OptionError, r"workers=2\.5"),
        ({"link": "500mbit"}, OptionError, "link='500mbit' .* a LinkModel, or left out"),
        ({"link": SLOW, "policies": ["fifi"]}, OptionError, "Did you mean 'fifo'"),
        ({"link": SLOW, "steps": 0}, OptionError, "steps=0"),
        ({"link": SLOW, "steps": True}, OptionError, "steps=True"),
        ({"link": SLOW, "device": "abacus"}, OptionError, "device='abacus'"),
        ({"link": SLOW, "device": "meta"}, OptionError, "device='meta'"),
        ({}, UnsupportedError, "There is no link to measure, as this process is alone.*LinkModel.*torchrun"),
    ],
)
def test_bad_options_are_named_before_anything_is_trained(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    class Untouched(Tower):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise AssertionError("trained")

    with pytest.raises(error, match=message):
        predict(Untouched(), **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_that_is_not_there() -> None:
    with pytest.raises(OptionError, match=r"device='cuda' .* 'cpu', as torch finds no CUDA device here"):
        predict(Tower(), link=SLOW, device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_cuda() -> None:
    given = predict(Tower(depth=2, width=512), link=LinkModel(workers=4, bandwidth=1e9), steps=3)
    assert given.measured.device == "cuda"
    assert given.compute_seconds > 0
    names = [layer.name for layer in given.measured.profile.layers]
    assert names == ["(between steps)", "first", "layers.0", "layers.1", "last"]


def predict_on(rank: int) -> tuple[LinkModel, tuple[float, ...], float]:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        given = predict(Tower(), steps=2, workers=16)
        return given.link, given.worker_seconds, given.compute_seconds
    finally:
        let_go()
        dist.destroy_process_group()


def test_ranks_measure_their_link_and_agree(two_plain_ranks: RankPool) -> None:
    first, second = two_plain_ranks.run(predict_on)
    assert first[:2] == second[:2]
    link, seconds, step = first
    assert link.workers == 16
    assert link.bandwidth > 0
    assert len(seconds) == 2
    assert step == pytest.approx(max(seconds))
