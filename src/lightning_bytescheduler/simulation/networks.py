"""Well-known networks as profiles, to plan with before there is a model to measure.

Layer sizes are the real ones (fp32). Times are not measured: a layer's share of the step is its share of the
multiply-adds, and backward takes twice as long as forward. Scale them to your hardware by
``ModelProfile.scaled_to``, with the time of a step on one worker.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.simulation.profile import LayerProfile, ModelProfile

__all__ = ["NETWORKS", "network_profile"]

_COMPUTE_SECONDS = 0.2  # of a step; any hardware, some batch
_BYTES = 4
_Layer = tuple[str, int, float]  # name, parameters, multiply-adds per sample


def network_profile(name: str) -> ModelProfile:
    """The profile of a well-known network, with a step of 200 ms.

    Args:
        name: One of ``NETWORKS``.

    Raises:
        OptionError: If it is none of these.
    """
    if name not in NETWORKS:
        raise OptionError("network", name, f"one of {', '.join(NETWORKS)}")
    layers = NETWORKS[name]()
    work = sum(multiply_adds for _, _, multiply_adds in layers)
    return ModelProfile(
        name=name,
        layers=tuple(
            LayerProfile(
                name=layer,
                parameter_bytes=parameters * _BYTES,
                forward_seconds=_COMPUTE_SECONDS / 3 * multiply_adds / work,
                backward_seconds=_COMPUTE_SECONDS * 2 / 3 * multiply_adds / work,
            )
            for layer, parameters, multiply_adds in layers
        ),
    )


def _convolution(name: str, inputs: int, outputs: int, kernel: int, side: int, *, extra: int) -> _Layer:
    """A convolution with an output of ``side × side``, and ``extra`` parameters for each output channel."""
    weights = kernel * kernel * inputs * outputs
    return name, weights + extra * outputs, weights * side * side


def _linear(name: str, inputs: int, outputs: int, *, extra: int = 0, positions: int = 1) -> _Layer:
    return name, inputs * outputs + outputs + extra, inputs * outputs * positions


def _vgg16() -> list[_Layer]:
    """Simonyan and Zisserman, configuration D, 224 × 224, 1000 classes: 138 million parameters."""
    layers: list[_Layer] = []
    inputs = 3
    for block, (outputs, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))):
        for index in range(count):
            name = f"conv{block + 1}_{index + 1}"
            layers.append(_convolution(name, inputs, outputs, 3, 224 >> block, extra=1))
            inputs = outputs
    sizes = (7 * 7 * 512, 4096, 4096, 1000)
    return [*layers, *(_linear(f"fc{i + 6}", sizes[i], sizes[i + 1]) for i in range(3))]


def _resnet50() -> list[_Layer]:
    """He et al., bottlenecks with the stride in the 3 × 3 convolution, 224 × 224: 26 million parameters."""
    # Two for each channel: scale and shift of the batch norm that follows.
    layers = [_convolution("conv1", 3, 64, 7, 112, extra=2)]
    inputs = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        width, side = 64 << stage, 56 >> stage
        for block in range(count):
            name = f"stage{stage + 1}.{block}"
            entered = side * 2 if stage and not block else side
            layers.append(_convolution(f"{name}.conv1", inputs, width, 1, entered, extra=2))
            layers.append(_convolution(f"{name}.conv2", width, width, 3, side, extra=2))
            layers.append(_convolution(f"{name}.conv3", width, 4 * width, 1, side, extra=2))
            if not block:
                layers.append(_convolution(f"{name}.shortcut", inputs, 4 * width, 1, side, extra=2))
            inputs = 4 * width
    return [*layers, _linear("fc", inputs, 1000)]


def _transformer() -> list[_Layer]:
    """GPT-2 small with sequences of 1024 tokens: 124 million parameters.

    The output layer shares the embedding's weights, so these are needed first and final last.
    """
    width, vocabulary, length = 768, 50257, 1024
    layers: list[_Layer] = [("embedding", (vocabulary + length) * width, 0.0)]
    for block in range(12):
        attention = _linear(f"block{block}.attention", width, 3 * width, extra=2 * width, positions=length)
        scores = 2 * length * length * width
        layers += [
            (attention[0], attention[1], attention[2] + scores),
            _linear(f"block{block}.projection", width, width, positions=length),
            _linear(f"block{block}.expand", width, 4 * width, extra=2 * width, positions=length),
            _linear(f"block{block}.contract", 4 * width, width, positions=length),
        ]
    return [*layers, ("norm", 2 * width, 0.0), ("output", 0, vocabulary * width * length)]


def _uniform() -> list[_Layer]:
    """Twenty equal layers, 25 million parameters."""
    return [(f"layer{index}", 1_250_000, 1.0) for index in range(20)]


NETWORKS: dict[str, Callable[[], list[_Layer]]] = {
    "vgg16": _vgg16,
    "resnet50": _resnet50,
    "transformer": _transformer,
    "uniform": _uniform,
}
"""The networks there are profiles of."""
