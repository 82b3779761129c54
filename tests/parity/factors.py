"""What a training may consist of, in independent factors, and which values of two factors do not go together.

The matrix of combinations, the fuzz and the documentation's compatibility table are all made from these tables.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

__all__ = ["FACTORS", "FORBIDDEN", "GRADIENTS_IN_HAND", "Combination", "Forbidden", "allowed", "random_combination"]

FACTORS: Mapping[str, Mapping[str, str]] = {
    "optimizer": {
        "SGD-momentum": "`SGD`",
        "SGD-nesterov-decay": "`SGD`",
        "Adam": "`Adam`",
        "AdamW": "`AdamW`",
        "AdamW-foreach": "`AdamW`",
        "AdamW-amsgrad": "`AdamW`",
        "AdamW-tensor-betas": "`AdamW`",
        "ASGD": "`ASGD`",
        "Adafactor": "`Adafactor`",
        "Adagrad": "`Adagrad`",
        "RMSprop": "`RMSprop`",
        "Adadelta": "`Adadelta`",
        "NAdam": "`NAdam`",
        "RAdam": "`RAdam`",
        "Adamax": "`Adamax`",
        "Rprop": "`Rprop`",
        "LBFGS": "`LBFGS`",
        "own-step": "most third-party optimizers",
        "own-part": "subclasses that replace what a torch optimizer's `step` calls",
    },
    "groups": {
        "one-group": "one parameter group",
        "three-groups": "parameter groups with hyperparameters of their own",
    },
    "schedule": {
        "constant": "none",
        "one-cycle": "per step (`OneCycleLR`)",
        "cosine": "per step (`CosineAnnealingLR`)",
        "step-lr": "per epoch (`StepLR`)",
        "plateau": "by a metric (`ReduceLROnPlateau`)",
    },
    "accumulation": {
        "1": "none",
        "2": "`accumulate_grad_batches`",
        "3": "`accumulate_grad_batches`",
    },
    "clipping": {
        "unclipped": "none",
        "value": '`gradient_clip_algorithm="value"`',
        "norm": '`gradient_clip_algorithm="norm"`',
        "norm-unreached": '`gradient_clip_algorithm="norm"`',
    },
    "precision": {
        "32-true": "`32-true`",
        "bf16-mixed": "`bf16-mixed`",
        "bf16-true": "`bf16-true`",
        "64-true": "`64-true`",
        "fp16-scaler": "`16-mixed` (loss scaling)",
    },
    "model": {
        "plain": "layers called once",
        "tied": "tied weights",
        "dropout": "dropout",
        "batch-norm": "batch normalisation",
        "checkpoint": "activation checkpointing (reentrant or not)",
        "checkpoint-reentrant": "activation checkpointing (reentrant or not)",
        "conditional": "branches not always taken (`find_unused_parameters`)",
        "frozen": "frozen layers",
        "used-twice": "a layer used twice",
        "several-outputs": "several outputs",
        "traced": "a scripted layer",
        "compiled": "a compiled layer",
    },
    "ddp": {
        "default": "defaults",
        "find-unused": "`find_unused_parameters`",
        "static-graph": "`static_graph`",
        "no-bucket-views": "`gradient_as_bucket_view=False`",
    },
    "weighting": {
        "ranks": "as much as the others",
        "samples": '`weighting="samples"`',
    },
    "architecture": {
        "allreduce": "the ranks, by all-reduce",
        "ps": "`servers=0` (synchronised with norm clipping)",
    },
    "loop": {
        "straight": "plain `fit`",
        "uneven": "an uneven last batch",
        "validation": "validation in mid-epoch",
        "resumed": "a checkpoint and a resume in mid-epoch",
        "unfreezing": "layers unfrozen in mid-training",
        "weight-averaging": "`WeightAveraging` (EMA)",
        "SWA": "`StochasticWeightAveraging`",
        "reads-gradients": "a callback that reads gradients before the step (gradient norms in a log)",
        "second-pass": "a second backward pass before the step (a penalty's)",
        "other-memory": "gradients that are given other memory",
        "looks-in-hooks": "backward hooks that read or write other layers' gradients",
        "new-state": "an optimizer whose state is replaced",
        "keeps-state": "a callback that keeps the optimizer's state, or a tensor of it",
        "step-hooks": "hooks of the optimizer's step",
        "manual": "manual optimization, several optimizers",
        "two-optimizers": "manual optimization, several optimizers",
    },
}
"""Factor -> value -> what a user would call it; values that look the same to a user have the same words."""


GRADIENTS_IN_HAND = ("second-pass", "other-memory", "looks-in-hooks")
"""Loops that do something to gradients: with rows of the matrix for themselves."""


class Forbidden(NamedTuple):
    """Values of two factors that DDP, Lightning or torch do not allow together."""

    one: str
    these: tuple[str, ...]
    other: str
    those: tuple[str, ...]
    why: str


FORBIDDEN = (
    Forbidden("optimizer", ("LBFGS",), "precision", ("fp16-scaler",), "Lightning: LBFGS cannot be scaled"),
    Forbidden("optimizer", ("LBFGS",), "groups", ("three-groups",), "LBFGS has one parameter group"),
    Forbidden("optimizer", ("AdamW-tensor-betas",), "schedule", ("one-cycle",), "torch: two numbers or two tensors"),
    Forbidden("model", ("checkpoint-reentrant",), "ddp", ("find-unused",), "DDP: parameters would be ready twice"),
    Forbidden("model", ("conditional",), "ddp", ("static-graph",), "DDP: the graph is not static"),
    Forbidden("accumulation", ("2", "3"), "ddp", ("static-graph",), "DDP: torch fails when it does not reduce first"),
)


@dataclass(frozen=True)
class Combination:
    """One value of each factor."""

    optimizer: str
    groups: str
    schedule: str
    accumulation: str
    clipping: str
    precision: str
    model: str
    ddp: str
    weighting: str
    architecture: str
    loop: str

    def items(self) -> Iterator[tuple[str, str]]:
        """(factor, value) pairs."""
        return ((field.name, getattr(self, field.name)) for field in fields(self))

    def __str__(self) -> str:
        return "_".join(value for _, value in self.items())


@functools.cache
def allowed(one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Whether two (factor, value) pairs may occur in one combination."""
    for ban in FORBIDDEN:
        for first, second in ((one, other), (other, one)):
            if first[0] == ban.one and first[1] in ban.these and second[0] == ban.other and second[1] in ban.those:
                return False
    return True


def random_combination(generator: random.Random, rare: Container[tuple[str, str]] = ()) -> Combination:
    """Any allowed combination.

    Args:
        generator: Of random numbers.
        rare: Values of which a factor has one only now and then, in one of eight combinations.
    """
    while True:
        values = {}
        for factor, of_factor in FACTORS.items():
            seldom = [value for value in of_factor if (factor, value) in rare]
            often = [value for value in of_factor if value not in seldom]
            values[factor] = generator.choice(seldom if seldom and generator.random() < 1 / 8 else often)
        pairs = list(values.items())
        if all(allowed(one, other) for index, one in enumerate(pairs) for other in pairs[index + 1 :]):
            return Combination(**values)
