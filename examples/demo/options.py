"""The demo's options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from examples.demo.budget import MOST_STEPS
from examples.demo.run_spec import BYTESCHEDULER, DDP, RunSpec

_TINY_STEPS = 6

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the command line asks for.

    Args:
        steps: Optimizer steps of each training; None for as many as fit two minutes.
        mbit: Rate of the link in Mbit/s; None to balance communication with computing.
        shaping: Whether to shape a link if the system allows it.
        bucket_mb: Size of DDP's buckets; None for DDP's default.
        tiny: A toy model.
        output: Folder of all that the demo writes.
    """

    steps: int | None
    mbit: float | None
    shaping: bool
    bucket_mb: float | None
    tiny: bool
    output: Path

    @property
    def timeline(self) -> Path:
        """Where ByteScheduler writes its timeline."""
        return self.output / "timeline.json"

    def spec(self, name: str, strategy: str, *, steps: int, nodes: int = 1, devices: int = 1) -> RunSpec:
        """The specification of one of the demo's runs, which gets a folder of its own."""
        return RunSpec(
            strategy=strategy,
            folder=self.output / "runs" / name,
            steps=steps,
            tiny=self.tiny,
            nodes=nodes,
            devices=devices,
            bucket_mb=self.bucket_mb if strategy == DDP else None,
            timeline=self.timeline if strategy == BYTESCHEDULER else None,
        )


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Reads the command line; ends the program with a message if it is wrong.

    Args:
        arguments: The arguments; by default the program's own.
    """
    parsed = _parser().parse_args(arguments)
    return Options(
        steps=parsed.steps or (_TINY_STEPS if parsed.tiny else None),
        mbit=parsed.mbit,
        shaping=not parsed.no_shaping,
        bucket_mb=parsed.bucket_mb,
        tiny=parsed.tiny,
        output=parsed.output.resolve(),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description="Trains a small character-level GPT on the Python standard library's source twice, on "
        "two hosts joined by a slow link: under DDP and under ByteScheduler. Then it compares the two.",
    )
    parser.add_argument(
        "--steps",
        type=_number(int, minimum=2),
        help="optimizer steps of each training "
        f"(default: as many as fit two minutes, at most {MOST_STEPS}; {_TINY_STEPS} with --tiny)",
    )
    parser.add_argument(
        "--mbit",
        type=_number(float, minimum=10.0),
        help="rate of the link in Mbit/s (default: such that communication takes as long as computing)",
    )
    parser.add_argument("--no-shaping", action="store_true", help="train over the loopback interface; needs no root")
    parser.add_argument(
        "--bucket-mb",
        type=_number(float, minimum=0.1),
        help="size of DDP's buckets in MB (default: DDP's own, 25, which is more than this model)",
    )
    parser.add_argument("--tiny", action="store_true", help="a toy model, to try the demo itself")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo_output"),
        help="folder for results, timeline, picture and logs (default: %(default)s)",
    )
    return parser


def _number(kind: Callable[[str], Number], *, minimum: Number) -> Callable[[str], Number]:
    def convert(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not value >= minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, not {text}")
        return value

    return convert
