"""What each figure of ``diloco.py`` compares: contenders with the options of their ranks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

__all__ = ["FIGURES", "SYNCHRONOUS"]

SYNCHRONOUS = ("ddp", "ddp, bf16 on the wire", "bytescheduler")
_VALIDATIONS = 12
_WIRE_LENGTH = 20
_SPARSE_S = 60
_SNAPSHOT_S = 1.0

Group = list[dict[str, Any]]
"""Contenders that are measured at the same time."""


def race(options: argparse.Namespace) -> list[Group]:
    """Contenders that communicate in every step run side by side, as they hardly compute; DiLoCo's run in turn."""
    steps, ratio = options.steps, options.ratio
    every = max(steps // _VALIDATIONS, 1)
    # With gradients in bf16 the same loss may take a few more steps.
    limits = {"ddp": steps, "bytescheduler": steps}
    groups: list[Group] = [
        [
            {"name": name, "steps": limits.get(name, round(1.4 * steps)), "validate": every, "seconds": 900}
            for name in SYNCHRONOUS
        ]
    ]
    outer = _tuned(options)
    for length in options.grid:
        groups.append([_diloco(f"diloco, H={length}", length, {"inner_steps": length, "equal_steps": True, **outer})])
    for length in options.grid:
        samples = round(length * options.batch * (1 + ratio))
        name = f"diloco by pace, {samples} samples"
        groups.append([_diloco(name, round(length * ratio), {"samples_per_round": samples, **outer})])
    groups.append([_diloco("diloco, defaults", 100, {})])
    for group in groups[1:]:
        group[0]["until"] = "ddp"
    return groups


def gap(options: argparse.Namespace) -> list[Group]:
    """DiLoCo's defaults, and rounds of one length by pace with what ``race`` uses and with plain averaging."""
    length = options.grid[len(options.grid) // 2]
    samples = round(length * options.batch * (1 + options.ratio))
    every = max(options.steps // _VALIDATIONS, 1)
    made: list[Group] = [[{"name": "ddp", "steps": options.steps, "validate": every, "seconds": 900}]]
    made.append([_diloco("diloco, defaults", 100, {})])
    outer = {"samples_per_round": samples, **_tuned(options)}
    for lr, momentum in ((options.outer_lr, options.outer_momentum), (1.0, 0.0)):
        name = f"diloco by pace, {samples} samples, outer_lr={lr:g}, outer_momentum={momentum:g}"
        strategy = {**outer, "outer_lr": lr, "outer_momentum": momentum}
        made.append([_diloco(name, round(length * options.ratio), strategy)])
    for group in made[1:]:
        group[0]["until"] = "ddp"
    return made


def wire(options: argparse.Namespace) -> list[Group]:
    """Rounds of one length with each wire dtype, and ``ddp``; the same steps for all, at full speed.

    The residuals of sparse act as momentum. So it is also compared with plain averaging, and has its own outer
    optimizer.
    """
    rounds = {"inner_steps": _WIRE_LENGTH, "equal_steps": True}
    strategy = {**rounds, **_tuned(options)}
    averaging = {**strategy, "outer_lr": 1.0, "outer_momentum": 0.0}
    compared = [(dtype, {**strategy, "wire_dtype": dtype}) for dtype in ("fp32", "int8", "int4")]
    compared.append(("fp32, plain averaging", {**averaging, "wire_dtype": "fp32"}))
    compared.append(("sparse", {**rounds, "wire_dtype": "sparse"}))
    own = {
        "batch": 2 * options.batch,  # with fewer samples, losses would hardly fall after the first steps
        "steps": options.steps,
        "validate": options.steps // 2,
        "step_s": [0.0, 0.0],
        "seconds": 300,
    }
    made = [[{**_diloco(f"diloco, {name}", _WIRE_LENGTH, asked), **own}] for name, asked in compared]
    return [[{"name": "ddp", **own}], *made]


def overlap(options: argparse.Namespace) -> list[Group]:
    """On a very slow link, int4 in long rounds and sparse in short ones, with and without ``overlap_steps``.

    At a validation all workers stand still, and nothing overlaps. So there is none: losses are computed after the
    training, from global weights that were kept now and then.
    """
    averaging = {"outer_lr": 1.0, "outer_momentum": 0.0, "wire_dtype": "int4"}
    long, short = round(40 * options.batch * (1 + options.ratio)), round(8 * options.batch * (1 + options.ratio))
    made: list[Group] = []
    for name, samples, strategy in (
        ("int4", long, {**_tuned(options), "wire_dtype": "int4"}),
        ("int4, plain averaging", long, averaging),
        ("sparse:0.01", short, {"wire_dtype": "sparse:0.01"}),
    ):
        for steps in (0, 20 if samples == long else 4):  # half of a round
            asked = {"samples_per_round": samples, "overlap_steps": steps, **strategy}
            contender = _diloco(f"{name}, {samples} samples, overlap_steps={steps}", 2, asked)
            made.append([{**contender, "seconds": _SPARSE_S, "validate": 10_000, "snapshot_s": _SNAPSHOT_S}])
    return made


FIGURES: dict[str, Callable[[argparse.Namespace], list[Group]]] = {
    "race": race,
    "gap": gap,
    "wire": wire,
    "overlap": overlap,
}


def _tuned(options: argparse.Namespace) -> dict[str, Any]:
    return {"outer_lr": options.outer_lr, "outer_momentum": options.outer_momentum, "wire_dtype": options.wire}


def _diloco(name: str, fast: int, strategy: dict[str, Any]) -> dict[str, Any]:
    """A contender whose fast worker takes ``fast`` steps a round, with a validation after each round."""
    return {"name": name, "diloco": strategy, "steps": 10_000, "validate": max(fast // 2, 1), "seconds": 60}
