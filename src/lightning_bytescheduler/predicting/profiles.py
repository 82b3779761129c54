"""The sizes and times of a model's layers; of your own model, or of a well-known network.

A profile (:class:`ModelProfile`) has the layers in the order of the forward pass. Their times are those of one worker.

Well-known networks (:func:`network_profile`) are for planning before there is a model to measure. Their layer sizes are
the real ones (fp32). Times are not measured: a layer's share of the step is its share of the multiply-adds, and
backward takes twice as long as forward. Scale them to your hardware by :meth:`ModelProfile.scaled_to`, with the time of
a step on one worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightning_bytescheduler.checks import (
    require_one_of,
    require_positive,
    require_seconds,
    require_whole,
)
from lightning_bytescheduler.exceptions import OptionError

_COMPUTE_SECONDS = 0.2  # of a network's step, for no particular hardware or batch
_BYTES = 4
_UNIFORM_LAYERS = 20
_Layer = tuple[str, int, float]  # name, parameters, multiply-adds per sample


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerProfile:
    """One layer: the unit that is gated in the forward pass, and gets its gradients as a whole.

    A parameter shared by several layers belongs to the first of them: that layer uses it first, and its gradient is
    complete last.

    Attributes:
        name: Anything.
        parameter_bytes: Size of its gradients; 0 for a layer without parameters.
        forward_seconds: Time of its forward pass.
        backward_seconds: Time of its backward pass.

    Raises:
        OptionError: Names the value that is not allowed.
    """

    name: str = ""
    parameter_bytes: int
    forward_seconds: float
    backward_seconds: float

    def __post_init__(self) -> None:
        require_whole("parameter_bytes", self.parameter_bytes, 0)
        require_seconds("forward_seconds", self.forward_seconds)
        require_seconds("backward_seconds", self.backward_seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelProfile:
    """A model, as its layers in the order of the forward pass. The backward pass goes the other way.

    Attributes:
        name: Anything.
        layers: At least one; together they take some time to compute.

    Raises:
        OptionError: If there are no layers, or they take no time at all.
    """

    name: str
    layers: tuple[LayerProfile, ...]

    def __post_init__(self) -> None:
        layers = tuple(self.layers)
        if not layers or not all(isinstance(layer, LayerProfile) for layer in layers):
            raise OptionError("layers", self.layers, "one LayerProfile or more")
        object.__setattr__(self, "layers", layers)
        if not self.compute_seconds > 0:
            raise OptionError("layers", len(layers), "layers that take some time to compute")

    @property
    def parameter_bytes(self) -> int:
        """Size of all gradients."""
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def forward_seconds(self) -> float:
        """Time of a forward pass."""
        return sum(layer.forward_seconds for layer in self.layers)

    @property
    def backward_seconds(self) -> float:
        """Time of a backward pass."""
        return sum(layer.backward_seconds for layer in self.layers)

    @property
    def compute_seconds(self) -> float:
        """Time of a step on one worker, without communication."""
        return self.forward_seconds + self.backward_seconds

    def scaled_to(self, compute_seconds: float) -> ModelProfile:
        """The same model on hardware that takes ``compute_seconds`` for a step, each layer in proportion.

        Raises:
            OptionError: If ``compute_seconds`` is not a finite number above 0.
        """
        require_positive("compute_seconds", compute_seconds, of="seconds")
        factor = compute_seconds / self.compute_seconds
        layers = (
            replace(
                layer,
                forward_seconds=layer.forward_seconds * factor,
                backward_seconds=layer.backward_seconds * factor,
            )
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))


def network_profile(name: str) -> ModelProfile:
    """The profile of a well-known network, with a step of 200 ms.

    Args:
        name: One of ``NETWORKS``.

    Raises:
        OptionError: If it is none of these.
    """
    return _profile(name, NETWORKS[require_one_of("network", name, NETWORKS)]())


def profile_of_size(name: str, parameters: int) -> ModelProfile:
    """Return a profile of equal layers, twenty if there are enough parameters, with a step of 200 ms.

    Args:
        name: The model's name.
        parameters: Its number of parameters, at least 1.

    Raises:
        OptionError: If there are none.
    """
    require_whole("parameters", parameters, 1)
    layers = min(_UNIFORM_LAYERS, parameters)
    return _profile(name, [(f"layer{index}", (parameters + index) // layers, 1.0) for index in range(layers)])


def _profile(name: str, layers: Sequence[_Layer]) -> ModelProfile:
    """Make a profile. A layer's share of the step is its share of multiply-adds; backward takes twice as long."""
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

    The output layer shares the embedding's weights, so these are needed first, and their gradient is complete last.
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


NETWORKS: dict[str, Callable[[], list[_Layer]]] = {
    "vgg16": _vgg16,
    "resnet50": _resnet50,
    "transformer": _transformer,
    "uniform": lambda: [(f"layer{index}", 1_250_000, 1.0) for index in range(_UNIFORM_LAYERS)],
}
"""Networks with a profile, by name."""
