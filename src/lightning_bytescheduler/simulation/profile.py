"""What a model's step is made of: the sizes and times of its layers.

A profile is measured once, on one worker, and can be kept as JSON::

    {"name": "my model",
     "layers": [{"name": "embedding", "parameter_bytes": 4096000, "forward_seconds": 0.001, "backward_seconds": 0.002},
                ...]}

with the layers in the order of the forward pass.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.simulation.numbers import require_seconds, require_whole

__all__ = ["LayerProfile", "ModelProfile"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerProfile:
    """One layer: what gates as a whole in the forward pass, and gets its gradients as a whole.

    A parameter that several layers share belongs to the first: that uses it first, and its gradient is
    complete last.

    Attributes:
        name: Anything.
        parameter_bytes: Size of its gradients; 0 for a layer without parameters.
        forward_seconds: Time of its forward pass.
        backward_seconds: Time of its backward pass.

    Raises:
        OptionError: Names the value that is not allowed.
    """

    name: str
    parameter_bytes: int
    forward_seconds: float
    backward_seconds: float

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise OptionError("name", self.name, "a text")
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
        if not isinstance(self.name, str):
            raise OptionError("name", self.name, "a text")
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
        """Time of a step on one worker that talks to nobody."""
        return self.forward_seconds + self.backward_seconds

    def scaled_to(self, compute_seconds: float) -> ModelProfile:
        """The same model on hardware that takes ``compute_seconds`` for a step, each layer in proportion.

        Raises:
            OptionError: If ``compute_seconds`` is not a finite number above 0.
        """
        if require_seconds("compute_seconds", compute_seconds) == 0:
            raise OptionError("compute_seconds", compute_seconds, "more than 0")
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

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> ModelProfile:
        """Read a profile that was kept as JSON.

        Raises:
            OptionError: If the file holds no profile; names the entry that is wrong.
            OSError: If the file cannot be read.
        """
        try:
            content = json.loads(Path(file).read_text(encoding="utf-8"))
        except ValueError as error:
            raise OptionError("profile", os.fspath(file), f"a JSON file ({error})") from error
        if not isinstance(content, dict) or not isinstance(content.get("layers"), list):
            raise OptionError("profile", os.fspath(file), "an object with a list of 'layers'")
        layers = tuple(_layer(f"layers[{index}]", layer) for index, layer in enumerate(content["layers"]))
        return cls(name=content.get("name", Path(file).stem), layers=layers)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the profile as JSON.

        Raises:
            OSError: If the file cannot be written.
        """
        Path(file).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


_LAYER_FIELDS = tuple(field.name for field in fields(LayerProfile))


def _layer(place: str, content: object) -> LayerProfile:
    if not isinstance(content, dict) or not set(_LAYER_FIELDS[1:]) <= content.keys() <= set(_LAYER_FIELDS):
        raise OptionError(place, content, f"an object with {', '.join(_LAYER_FIELDS)}")
    try:
        return LayerProfile(**{"name": place, **content})
    except OptionError as error:
        raise OptionError(f"{place}.{error.option}", error.value, error.allowed) from None
