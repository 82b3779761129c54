"""One run of the user's training: how it is made, and what it left behind."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = ["SPEC_VARIABLE", "RankRecord", "RunResult", "RunSpec"]

SPEC_VARIABLE = "LIGHTNING_BYTESCHEDULER_CHECK"
"""Environment variable with the path of a :class:`RunSpec`; set in the user's processes only."""

Strategy = Literal["ddp", "configured", "strict", "synchronised"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """How a run is made.

    Attributes:
        strategy: ``"ddp"``; ``"configured"``, ``bytescheduler`` with the script's options or its defaults;
            ``"strict"``, always overlapped, each tensor behind a gate of its own and sizes that do not follow the link;
            ``"synchronised"``, the same partitions without overlap, so that sums are formed in the same order.
        steps: Optimizer steps after which the fit is stopped.
        seed: Of all random numbers; each rank adds its own number.
        devices: What replaces the Trainer's ``devices``, if anything.
        deterministic: Use deterministic algorithms and one thread.
        traced: Write down a digest of every weight after each step, and what opened its gate.
        nudged: Change each gradient by a rounding error before each step.
        early: Names of parameters that are not to be deferred.
    """

    strategy: Strategy
    steps: int
    seed: int = 20240
    devices: int | None = None
    deterministic: bool = False
    traced: bool = False
    nudged: bool = False
    early: tuple[str, ...] = ()

    @property
    def scheduled(self) -> bool:
        """Whether ``bytescheduler`` trains."""
        return self.strategy != "ddp"

    @property
    def timed(self) -> bool:
        """Whether its step times say something."""
        return self.strategy in ("ddp", "configured") and not (self.traced or self.nudged)

    def save(self, path: Path, folder: Path) -> None:
        """Write it, with the folder that takes what the run leaves behind."""
        path.write_text(json.dumps({"folder": str(folder), **dataclasses.asdict(self)}))

    @classmethod
    def load(cls, path: Path) -> tuple[RunSpec, Path]:
        """What :meth:`save` has written."""
        values = json.loads(path.read_text())
        folder = Path(values.pop("folder"))
        return cls(**{**values, "early": tuple(values["early"])}), folder


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecord:
    """What one rank wrote down. Digests and numbers are texts: equal texts are equal bits.

    Attributes:
        rank: The rank.
        world_size: How many there are.
        strategy: Name of the strategy's class.
        steps: Optimizer steps that were taken.
        losses: The loss of each batch, by ``float.hex``; none where ``training_step`` returns none.
        loss_steps: For each of them, how many optimizer steps had been taken before its forward pass.
        initial: Digests of the weights when training began, by name.
        weights: Digests of weights and buffers at the end, by name.
        optimizer: Digests of the optimizers' state and hyperparameters at the end, by name.
        metrics: Logged metrics at the end and each time they were logged, by name and time.
        seconds: Of each optimizer step.
        trace: Of a traced run: for each step its digests of weights.
        openings: Of a traced run: for each step, what opened each parameter's gate, by the parameter's name.
        untouched: Of a traced run: for each step, parameters that nothing touched before backward.
        trained: Names of the parameters that are trained, as registered.
        plan: What overlapped, in words; empty under ``ddp``.
        needs_norm: Whether updates needed to know the norm of all gradients.
        as_ddp: Whether steps were taken as DDP takes them at the end.
        options: The strategy's options, in words.
    """

    rank: int
    world_size: int
    strategy: str
    steps: int = 0
    losses: tuple[str, ...] = ()
    loss_steps: tuple[int, ...] = ()
    initial: dict[str, str] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    optimizer: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, str] = field(default_factory=dict)
    seconds: tuple[float, ...] = ()
    trace: dict[int, dict[str, str]] = field(default_factory=dict)
    openings: dict[int, dict[str, str]] = field(default_factory=dict)
    untouched: dict[int, tuple[str, ...]] = field(default_factory=dict)
    trained: tuple[str, ...] = ()
    plan: str = ""
    needs_norm: bool = False
    as_ddp: bool = False
    options: dict[str, str] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write it; what is there is whole."""
        path = folder / f"rank{self.rank}.json"
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps(dataclasses.asdict(self)))
        draft.replace(path)

    @classmethod
    def load(cls, path: Path) -> RankRecord:
        """What :meth:`save` has written."""
        values: dict[str, Any] = json.loads(path.read_text())
        for name in ("losses", "loss_steps", "seconds", "trained"):
            values[name] = tuple(values[name])
        for name in ("trace", "openings", "untouched"):  # JSON has texts for keys
            values[name] = {int(step): entry for step, entry in values[name].items()}
        values["untouched"] = {step: tuple(names) for step, names in values["untouched"].items()}
        return cls(**values)


@dataclass(kw_only=True)
class RunResult:
    """How a run ended.

    Attributes:
        spec: How it was made.
        folder: Where its files are.
        ranks: What each rank wrote down, by rank; empty unless all did.
        refused: Why the training cannot be checked, in words; empty if it can.
        error: What it failed with, in words; empty if it did not.
        seconds: How long all of it took.
    """

    spec: RunSpec
    folder: Path
    ranks: list[RankRecord] = field(default_factory=list)
    refused: str = ""
    error: str = ""
    seconds: float = 0.0

    @property
    def whole(self) -> bool:
        """Whether there is a record of every rank."""
        return bool(self.ranks)

    @property
    def first(self) -> RankRecord:
        """What rank 0 wrote down."""
        return self.ranks[0]

    @property
    def state_file(self) -> Path:
        """Rank 0's weights and optimizer state, as ``torch.save`` writes them."""
        return self.folder / "state.pt"
