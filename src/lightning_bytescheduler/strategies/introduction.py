"""What a rank says of itself before a training: versions, the strategy, and the options that all ranks must share."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Iterable, Mapping

import lightning
import lightning.pytorch as pl
import torch
from torch import nn

from lightning_bytescheduler.__about__ import __version__
from lightning_bytescheduler.collectives.roll_call import Introduction

__all__ = ["introduce", "parameter_facts"]

_OF_ONE_RANK = ("BYTESCHEDULER_BATCH_SIZE",)  # by design
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # of an object, which differs from process to process
_LOCAL = ("BYTESCHEDULER_ROOT_IP", "BYTESCHEDULER_ROOT_PORT")  # ignored anyway


def introduce(
    rank: int, strategy: str, options: Mapping[str, object], trainer: pl.Trainer | None = None
) -> Introduction:
    """Make this rank's introduction.

    Args:
        rank: This one.
        strategy: Its name.
        options: By name, those that must be the same on all ranks.
        trainer: Whose own options have to be the same too, if any.
    """
    facts: dict[str, object] = {"strategy": strategy, "version of lightning-bytescheduler": _version()}
    facts.update(options)
    if trainer is not None:
        facts["what the Trainer does"] = getattr(trainer.state.fn, "value", trainer.state.fn)
        facts["precision"] = trainer.precision
        for option in ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"):
            facts[option] = getattr(trainer, option, None)
    variables = {
        name: os.environ[name]
        for name in sorted(os.environ)
        if name.startswith("BYTESCHEDULER_") and name not in (*_OF_ONE_RANK, *_LOCAL)
    }
    return Introduction(
        rank=rank,
        facts={name: _text(value) for name, value in facts.items()},
        noted={
            "torch": torch.__version__,
            "lightning": lightning.__version__,
            "Python": ".".join(platform.python_version_tuple()[:2]),
            **variables,
        },
    )


def parameter_facts(parameters: Iterable[nn.Parameter]) -> dict[str, str]:
    """How many parameters are trained, and of which shapes and types."""
    shapes = [(tuple(p.shape), str(p.dtype)) for p in parameters if p.requires_grad]
    digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]
    values = sum(torch.Size(shape).numel() for shape, _ in shapes)
    return {"trained model": f"{len(shapes)} tensors of {values:,} values (digest of shapes and types {digest})"}


def _version() -> str:
    return str(__version__)


def _text(value: object) -> str:
    return repr(value) if isinstance(value, str) else _ADDRESS.sub("", str(value))
