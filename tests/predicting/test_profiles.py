from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.predicting.profiles import NETWORKS, LayerProfile, ModelProfile, network_profile
from tests.predicting.profiles import CONTRIVED, models, unhurried

LAYER = {"name": "fc", "parameter_bytes": 8, "forward_seconds": 0.5, "backward_seconds": 1}


def test_sums() -> None:
    assert CONTRIVED.parameter_bytes == 12
    assert (CONTRIVED.forward_seconds, CONTRIVED.backward_seconds, CONTRIVED.compute_seconds) == (6, 6, 12)


@unhurried
@given(profile=models, seconds=st.floats(1e-3, 1e3))
def test_scaling_keeps_the_proportions(profile: ModelProfile, seconds: float) -> None:
    scaled = profile.scaled_to(seconds)
    assert scaled.compute_seconds == pytest.approx(seconds)
    factor = seconds / profile.compute_seconds
    for before, after in zip(profile.layers, scaled.layers, strict=True):
        assert (after.name, after.parameter_bytes) == (before.name, before.parameter_bytes)
        assert after.forward_seconds == pytest.approx(factor * before.forward_seconds)
        assert after.backward_seconds == pytest.approx(factor * before.backward_seconds)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), "1"])
def test_a_model_cannot_be_scaled_to_no_time(seconds: Any) -> None:
    with pytest.raises(OptionError, match=r"^compute_seconds="):
        CONTRIVED.scaled_to(seconds)


@pytest.mark.parametrize("layers", [(), (1,), ("a", "b")])
def test_a_model_has_layers(layers: Any) -> None:
    with pytest.raises(OptionError, match=r"^layers="):
        ModelProfile(name="m", layers=layers)


def test_layers_may_come_as_a_list() -> None:
    profile = ModelProfile(name="m", layers=[LayerProfile(**LAYER)])
    assert isinstance(profile.layers, tuple)
    assert hash(profile) == hash(ModelProfile(name="m", layers=(LayerProfile(**LAYER),)))


@pytest.mark.parametrize(
    ("network", "parameters", "layers"),
    [
        ("vgg16", 138_357_544, 16),
        ("resnet50", 25_557_032, 54),
        ("transformer", 124_439_808, 51),
        ("uniform", 25_000_000, 20),
    ],
)
def test_networks_have_their_real_sizes(network: str, parameters: int, layers: int) -> None:
    profile = network_profile(network)
    assert profile.parameter_bytes == 4 * parameters
    assert len(profile.layers) == layers
    assert profile.compute_seconds == pytest.approx(0.2)
    assert profile.backward_seconds == pytest.approx(2 * profile.forward_seconds)


def test_vgg_s_weight_lies_where_its_work_does_not() -> None:
    layers = network_profile("vgg16").layers
    dense = [layer for layer in layers if layer.name.startswith("fc")]
    assert sum(layer.parameter_bytes for layer in dense) > 0.89 * network_profile("vgg16").parameter_bytes
    assert sum(layer.forward_seconds for layer in dense) < 0.01 * network_profile("vgg16").forward_seconds


def test_resnet_strides_in_the_middle_of_a_block() -> None:
    seconds = {layer.name: layer.forward_seconds for layer in network_profile("resnet50").layers}
    # The block that halves the image enters with half of the channels and four times the pixels.
    assert seconds["stage2.0.conv1"] == pytest.approx(2 * seconds["stage2.1.conv1"])
    assert seconds["stage2.0.conv2"] == pytest.approx(seconds["stage2.1.conv2"])


def test_an_unknown_network_is_refused() -> None:
    with pytest.raises(OptionError, match=rf"^network='alexnet' .* one of {', '.join(map(repr, NETWORKS))}"):
        network_profile("alexnet")
