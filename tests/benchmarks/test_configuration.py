"""What is emulated has the shape of the network and the totals that were asked for."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.configuration import Configuration
from benchmarks.contenders import contender
from benchmarks.emulation import Accelerator, EmulatedLayer, EmulatedModel, scaled
from lightning_bytescheduler.ddp.reads import Reads
from lightning_bytescheduler.predicting.profiles import NETWORKS, LayerProfile, network_profile


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(("ratio", "workers"), [(0.5, 2), (2.0, 4)])
def test_totals_and_bounds(network: str, ratio: float, workers: int) -> None:
    configuration = Configuration(network=network, ratio=ratio, workers=workers)
    profile = configuration.profile
    assert profile.parameter_bytes == pytest.approx(30e6, rel=1e-4)
    assert configuration.communication_seconds / profile.compute_seconds == pytest.approx(ratio)
    # 2(n-1)/n of the bytes over what 500 Mbit/s leave for payload.
    assert configuration.communication_seconds == pytest.approx(2 * (workers - 1) / workers * 30e6 / 59.8e6, rel=1e-3)
    bounds = configuration.bounds(profile.compute_seconds)
    longest = max(profile.compute_seconds, configuration.communication_seconds)
    assert longest < bounds["any order"] <= bounds["barrier"] < longest * 2.0


def test_a_round_trip_makes_bounds_longer_but_not_the_computation() -> None:
    near = Configuration(network="uniform", ratio=1.0)
    far = Configuration(network="uniform", ratio=1.0, round_trip_seconds=0.02)
    assert far.name == "uniform, ratio 1, 4 workers, 20 ms round trip"
    assert "round trip" not in near.name
    assert far.link.latency == 0.01
    # A ring of four has six hops.
    assert far.link.latency_seconds == pytest.approx(0.06)
    # More of the link is payload, as packets are larger.
    assert near.profile.compute_seconds * 0.95 < far.profile.compute_seconds < near.profile.compute_seconds
    step = near.profile.compute_seconds
    for name, bound in near.bounds(step).items():
        # With clipping, the norm takes one more round of messages.
        assert bound < far.bounds(step)[name] < bound + 2 * 0.06


def test_names_say_what_is_emulated() -> None:
    odd = Configuration(network="uniform", ratio=1.0, runs_ahead=False, raw_kernels=True)
    assert odd.name == "uniform, ratio 1, 4 workers, not ahead, raw kernels"


def test_an_accelerator_that_does_not_run_ahead_returns_when_a_layer_is_done() -> None:
    for ahead in (True, False):
        accelerator = Accelerator(runs_ahead=ahead)
        begun = time.perf_counter()
        accelerator.begin(0.02)
        assert ahead or time.perf_counter() - begun >= 0.02
        accelerator.finish(0.0, asked_before=False)
        assert time.perf_counter() - begun >= 0.02


@pytest.mark.parametrize("raw", [False, True])
def test_raw_kernels_are_seen_by_their_custom_function_only(raw: bool) -> None:
    layer = EmulatedLayer(
        LayerProfile(name="one", parameter_bytes=40, forward_seconds=0.0, backward_seconds=0.0),
        Accelerator(),
        last=True,
        raw=raw,
    )
    reads = Reads([layer.weight])
    reads.begin_forward(0.0, 1, observes=True)
    loss = layer(torch.zeros(1, requires_grad=True)).sum()
    reads.end_observing()
    loss.backward()
    reads.after_backward(1)
    assert reads.unseen == ({id(layer.weight)} if raw else set())


def test_layers_keep_their_shares() -> None:
    original = network_profile("vgg16")
    small = scaled(original, parameter_bytes=1_000_000, compute_seconds=0.3)
    assert small.compute_seconds == pytest.approx(0.3)
    for layer, whole in zip(small.layers, original.layers, strict=True):
        share = whole.parameter_bytes / original.parameter_bytes
        assert layer.parameter_bytes == pytest.approx(1e6 * share, abs=4)
        assert layer.forward_seconds * original.compute_seconds == pytest.approx(whole.forward_seconds * 0.3)
    parameters = sum(p.numel() for p in EmulatedModel(small).parameters())
    assert 4 * parameters == pytest.approx(small.parameter_bytes, rel=0.01)  # less what makes no whole matrix


def test_what_is_predicted_lies_above_its_bound_and_in_its_order() -> None:
    configuration = Configuration(network="resnet50", ratio=1.0)
    seconds = configuration.profile.compute_seconds
    predicted, bounds = configuration.predictions(seconds), configuration.bounds(seconds)
    assert bounds["any order"] < predicted["bytescheduler, overlapped"] < predicted["ddp, 1 MB buckets"]
    assert bounds["any order"] < predicted["bytescheduler, norm clipping"] < predicted["ddp, 1 MB buckets"]
    assert predicted["ddp, 1 MB buckets"] < predicted["ddp"]
    assert all(contender(name).strategy() for name in predicted)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ddp", {}),
        ("ddp, 2 MB buckets", {"bucket_cap_mb": 2, "gradient_as_bucket_view": True}),
        ("bytescheduler", {}),
        ("bytescheduler, as ddp", {"mode": "ddp"}),
        ("bytescheduler, int8", {"mode": "overlapped", "compression": "int8"}),
        ("bytescheduler, 2 servers, by node", {"mode": "overlapped", "servers": {"spare": 2, "group": "node"}}),
        (
            "bytescheduler, partition 65536, credit 131072, norm clipping",
            {"mode": "overlapped", "partition_size": 65536, "credit": 131072},
        ),
        ("bytescheduler, policy fifo", {"mode": "overlapped", "policy": "fifo"}),
        ("bytescheduler, no broadcast", {"mode": "overlapped", "broadcast_buffers": False}),
    ],
)
def test_names_of_contenders_say_how_they_train(name: str, options: dict[str, Any]) -> None:
    chosen = contender(name)
    assert isinstance(chosen.strategy, partial)
    assert chosen.strategy.keywords == options
    assert bool(chosen.trainer) == ("norm clipping" in name)
    assert chosen.strategy() is not None


@pytest.mark.parametrize("name", ["none", "ddp, int8", "bytescheduler, 2 MB buckets"])
def test_what_no_contender_is_called_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="There is no contender"):
        contender(name)
