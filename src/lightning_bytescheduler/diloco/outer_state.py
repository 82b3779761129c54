"""The global weights, which every worker holds, and what they have to do with the weights it trains.

They live in host memory, in fp32, whatever the device: what travels comes and goes there, and the same outer step on
every worker then has the same bits even if their devices differ.

What is trained and synchronised: a module's parameters, by fragments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bytescheduler.diloco.accumulation import update_weight
from lightning_bytescheduler.diloco.fragments import FragmentOptions, mix, split_fragments
from lightning_bytescheduler.diloco.outer_optimizer import OuterOptimizer, pseudo_gradient
from lightning_bytescheduler.exceptions import UnsupportedError

__all__ = ["OuterState", "TrainedWeights"]


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


class OuterState:
    """Makes updates of a fragment, and takes the outer step.

    Args:
        trained: What is trained.
        weighting: One of ``diloco.weighting.WEIGHTINGS``.
        lr: See :class:`OuterOptimizer`.
        momentum: See :class:`OuterOptimizer`.
        factory: See :class:`OuterOptimizer`.
    """

    def __init__(
        self,
        trained: TrainedWeights,
        *,
        weighting: str,
        lr: float | None,
        momentum: float | None,
        factory: Callable[[list[Tensor]], Optimizer] | None,
    ) -> None:
        self.trained = trained
        self._parameters = trained.parameters
        self._weighting = weighting
        self._optimizer = OuterOptimizer(
            {name: parameter.detach().cpu() for name, parameter in self._parameters.items()},
            lr=lr,
            momentum=momentum,
            factory=factory,
        )
        self._samples = [0] * len(trained.fragments)  # that this worker has processed since it last sent the fragment
        self._tokens = [0] * len(trained.fragments)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The global weights, in fp32, by name. To be read only."""
        return self._optimizer.weights

    def count(self, *, samples: int, tokens: int) -> None:
        """Take note of a step."""
        for index in range(len(self._samples)):
            self._samples[index] += samples
            self._tokens[index] += tokens

    def update(self, fragment: int) -> tuple[Tensor, int]:
        """What this worker's steps have made of a fragment, since it was last sent.

        Returns:
            The pseudo-gradient, flat, and the weight it has in the mean.

        Raises:
            UnsupportedError: If a parameter is trained that was not at first: the workers' would drift apart.
        """
        self.trained.check()
        names = self.trained.fragments[fragment]
        after = {name: self._parameters[name].detach().cpu() for name in names}
        changes = pseudo_gradient(self._optimizer.weights, after)
        weight = update_weight(self._weighting, samples=self._samples[fragment], tokens=self._tokens[fragment])
        self._samples[fragment] = self._tokens[fragment] = 0
        return torch.cat([changes[name].reshape(-1) for name in names]), weight

    @torch.no_grad()
    def merge(self, fragment: int, mean: Tensor, *, total: int, exactly: bool) -> None:
        """Take the outer step with everybody's mean, and let the trained weights follow.

        Args:
            fragment: Which.
            mean: Of all workers' updates, flat.
            total: Sum of the weights; without any, the global weights stay as they are.
            exactly: Whether the trained weights become the global ones, whatever the share that a merge keeps.
        """
        names = self.trained.fragments[fragment]
        sizes = [self._parameters[name].numel() for name in names]
        if total:
            parts = zip(names, mean.split(sizes), strict=True)
            self._optimizer.step({name: part.view_as(self._parameters[name]) for name, part in parts})
        mixing = 0.0 if exactly else self.trained.mixing
        for name in names:
            parameter = self._parameters[name]
            merged = self._optimizer.weights[name].to(parameter.device)
            parameter.copy_(mix(parameter.float(), merged, mixing))

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Let the trained weights be the global ones meanwhile."""
        own = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(self._optimizer.weights[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    parameter.copy_(own[name])

    def state_dict(self) -> dict[str, Any]:
        """What is to be kept beside the weights; those are in a checkpoint anyway, unless they lose precision there."""
        state = self._optimizer.state_dict()
        if all(parameter.dtype == torch.float32 for parameter in self._parameters.values()):
            del state["weights"]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Carry on from a state; without weights in it, those that are trained now are the global ones.

        Raises:
            ValueError: If it does not fit the model; nothing was changed.
        """
        weights = state.get("weights", self._optimizer.state_dict()["weights"])
        self._optimizer.load_state_dict({**state, "weights": weights})
