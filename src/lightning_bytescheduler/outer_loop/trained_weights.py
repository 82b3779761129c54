"""What is trained and synchronised: a module's parameters, by fragments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from lightning_bytescheduler.diloco import FragmentOptions, split_fragments
from lightning_bytescheduler.exceptions import UnsupportedError

__all__ = ["TrainedWeights"]


class TrainedWeights:
    """A module's parameters that require gradients now.

    Args:
        module: Must have the same parameters on every rank.
        fragments: How they are synchronised.

    Raises:
        UnsupportedError: If there is nothing to train, or a parameter is complex.
    """

    def __init__(self, module: nn.Module, fragments: FragmentOptions) -> None:
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not parameters:
            raise UnsupportedError("Strategy 'diloco' has nothing to do: no parameter of the model requires gradients.")
        for name, parameter in parameters.items():
            if not parameter.is_floating_point():
                raise UnsupportedError(f"Strategy 'diloco' cannot average parameter {name!r}: it is {parameter.dtype}.")
        self._module = module
        self._options = fragments
        self.parameters: Mapping[str, nn.Parameter] = parameters
        self.fragments: Sequence[Sequence[str]] = split_fragments(
            {name: parameter.numel() for name, parameter in parameters.items()}, fragments.fragments
        )
        self.mixing = float(fragments.mixing or 0.0)

    def fragment_of(self, round: int) -> int:
        """The fragment that a round ends with."""
        return self._options.fragment_of(round)

    def others(self, round: int) -> list[int]:
        """All other fragments."""
        return [fragment for fragment in range(len(self.fragments)) if fragment != self.fragment_of(round)]

    def of(self, fragment: int) -> list[nn.Parameter]:
        """The parameters of a fragment, in an order that is the same on every rank."""
        return [self.parameters[name] for name in self.fragments[fragment]]

    def check(self) -> None:
        """Make sure that nothing else is trained by now.

        Raises:
            UnsupportedError: If a parameter is trained that was not at first: the workers' would drift apart.
        """
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and name not in self.parameters:
                raise UnsupportedError(
                    f"Parameter {name!r} requires gradients now, and did not when training began, so that workers "
                    "would not share it. Unfreeze it before fit, and keep it from changing with a learning rate of 0."
                )
