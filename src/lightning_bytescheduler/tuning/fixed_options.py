"""The result of a search as options that are given by hand, for trainings that shall not search."""

from __future__ import annotations

from lightning_bytescheduler.tuning.point import TuningPoint

__all__ = ["fixed_options"]


def fixed_options(point: TuningPoint) -> dict[str, str]:
    """Say the same thing in each of the ways in which options can be given.

    Args:
        point: What a search chose.

    Returns:
        Text to paste by where it goes: ``"argument"`` for Python, ``"environment"`` for a shell where there is one.
        There is no variable for the mode, so with those alone steps as DDP's are still tried.
    """
    if point.is_plain_ddp:
        return {"argument": 'ByteSchedulerStrategy(mode="ddp")'}
    credit, partition = point.sizes
    variables = {"PARTITION": partition, "CREDIT": credit, "CREDIT_TUNING": 0, "PARTITION_TUNING": 0}
    return {
        "argument": f'ByteSchedulerStrategy(partition_size={partition}, credit={credit}, mode="overlapped")',
        "environment": " ".join(f"BYTESCHEDULER_{name}={value}" for name, value in variables.items()),
    }
