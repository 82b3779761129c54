"""Checks the options of the strategy ``diloco``, and translates them for the modules that it uses.

The options in ``inner``, with which the ranks of a worker train together, are for DistributedDataParallel or for the
scheduler of their gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from lightning_bytescheduler.checks import is_whole, require_bool, require_known
from lightning_bytescheduler.ddp.ddp_arguments import ELSEWHERE, check_ddp_options, known_ddp_options
from lightning_bytescheduler.diloco.coordinator_protocol import RunOptions, run_options
from lightning_bytescheduler.diloco.round_end import RoundOptions
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.scheduler.options import SchedulerOptions

_INNER = ("ddp", "bytescheduler")
_NODE = "node"
_SCHEDULED = ("partition_size", "credit", "cross_barrier", "mode", "timeline", "debug")
_LAUNCH = ("accelerator", "parallel_devices", "process_group_backend", "start_method", "timeout")

OPTIONS_ELSEWHERE = {
    **ELSEWHERE,
    **{
        name: f"Where several processes form a worker, write inner={{'strategy': ..., {name!r}: ...}}."
        for name in (*known_ddp_options(), *_SCHEDULED)
    },
    "inner_size": "Write inner={'strategy': 'ddp', 'size': ...}.",
    "outer_learning_rate": "Did you mean 'outer_lr'?",
    "outer_optimizer": "The outer step is that of Nesterov SGD, with outer_lr and outer_momentum.",
    "weighting": "A worker counts by its samples; derive a class from PerformanceMonitor to count something else.",
    "batch_size": "Give each worker's loader its own; trainer.strategy.worker is the worker's number.",
    **dict.fromkeys(("local_steps", "sync_every"), "Did you mean 'inner_steps'?"),
}
"""Hints for options that ``DiLoCoStrategy`` itself does not have, by name."""


def inner_of(given: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """The parts of the option ``inner``: the strategy that trains a worker's ranks, their number, and its options.

    Raises:
        OptionError: If it has another form; names what is allowed.
    """
    parts = dict(given) if isinstance(given, Mapping) else {"strategy": given}
    name = parts.pop("strategy", None)
    if given is not None and name not in _INNER:
        allowed = "'ddp' or 'bytescheduler', or a dict with one of these as 'strategy', a 'size', and its options"
        raise OptionError("inner", given, allowed)
    return {"inner": name, "inner_size": parts.pop("size", None), "inner_options": parts}


@dataclass(frozen=True, slots=True, kw_only=True)
class DiLoCoOptions:
    """What the user asked for; see ``DiLoCoStrategy`` for what each option means.

    Attributes:
        given: The options that all workers of a run have in common, by name; ``None`` where one was left out.
        coordinated: Whether a coordinator runs the rounds.
        run: The same as ``given``, with defaults for what was left out.

    Raises:
        OptionError: Names the option that is not allowed, and what would be.
    """

    given: Mapping[str, Any]
    inner: str | None
    inner_size: int | Literal["node"] | None
    inner_options: Mapping[str, Any]
    worker_states: bool = True
    coordinated: bool = False
    run: RunOptions = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "run", run_options(**self.given))
        require_bool("worker_states", self.worker_states)
        self._check_inner()

    def _check_inner(self) -> None:
        if self.inner is None:
            return
        size = self.inner_size
        if self.coordinated and size is not None:
            raise OptionError(
                "inner.size", size, "left out where a coordinator is given: all processes of a Trainer are one worker"
            )
        if not self.coordinated and size != _NODE and not is_whole(size, 2):
            raise OptionError("inner.size", size, f"a whole number above 1, or {_NODE!r}")

    def ranks_per_worker(self, *, on_node: int, ranks: int) -> int:
        """How many ranks train together as one worker.

        Args:
            on_node: Number of ranks on each machine.
            ranks: Number of all ranks.
        """
        if self.inner is None:
            return 1
        if self.coordinated:
            return ranks
        return on_node if self.inner_size == _NODE else int(self.inner_size or 1)

    def require_alone(self, option: str, ranks: int) -> None:
        """Refuse several ranks that are not put together where a coordinator is given.

        Raises:
            OptionError: If there are; names the option or command that launches them.
        """
        if self.coordinated and self.inner is None and ranks > 1:
            raise OptionError(
                option,
                ranks,
                "1 with a coordinator, whose workers are independent Trainers: start one for each device, or let all "
                "processes of this Trainer be one worker with inner='ddp' or inner='bytescheduler'",
            )

    def check_ranks(self, *, ranks: int, on_node: int, rank: int, node: int) -> None:
        """Make sure that workers can be made of the ranks that were launched.

        Args:
            ranks: Number of all ranks.
            on_node: Number of ranks on each machine.
            rank: This rank.
            node: The machine of this rank.

        Raises:
            OptionError: If workers cannot be made of them.
        """
        size = self.ranks_per_worker(on_node=on_node, ranks=ranks)
        self.require_alone("devices", ranks)
        if ranks % size:
            raise OptionError("inner.size", self.inner_size, f"a number that divides that of all processes, {ranks}")
        if self.inner_size == _NODE and rank // size != node:
            raise OptionError(
                "inner.size",
                self.inner_size,
                f"a number where the ranks of a machine do not follow one another (rank {rank} is on machine {node})",
            )

    @property
    def outer_step(self) -> dict[str, float | None]:
        """Of the outer optimizer; what was left out is a checkpoint's, or else the optimizer's own default."""
        sparse = self.run.wire.dtype == "sparse"
        lr, momentum = (
            getattr(self.run, option) if sparse or self.given.get(option) is not None else None
            for option in ("outer_lr", "outer_momentum")
        )
        return {"lr": lr, "momentum": momentum}

    def rounds(self, timeout: float) -> RoundOptions:
        """Round options that give up no worker before the timeout: if one dies, the whole job ends.

        Args:
            timeout: Longest wait for other workers, in seconds.
        """
        return RoundOptions(
            outer_steps=self.run.outer_steps,
            quorum=0.0,
            grace=timeout,
            silent_after=timeout,
            first_step_limit=timeout,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsPlan:
    """How workers that were launched together train; the same on all ranks.

    Attributes:
        workers: How many there are.
        run: What all of them have in common, with defaults for what was left out.
        slices: Whether a tracker gives the data out, so that no worker has a share of its own.
        left_out: For each epoch that has ended, how many batches of its share each worker has not trained on; -1 if its
            loader has no length. Epochs of which nothing was left out are missing.
    """

    workers: int
    run: RunOptions
    slices: bool = False
    left_out: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def summary(self) -> str:
        """Return one line for the log."""
        if self.workers == 1:
            return "1 worker: it averages with no other, and takes outer steps alone."
        data = "Slices go to the workers that need them, and an epoch ends when each sample was trained on."
        if not self.slices:
            way_out = "" if self.run.equal_steps else f" {WAY_OUT}"
            data = f"An epoch ends for all when one worker is through its share of the data.{way_out}"
        rounds, wire = self.run.target_in_words, self.run.wire_dtype
        return f"{self.workers} workers, {wire} between them, in rounds of {rounds}. {data}"


WAY_OUT = (
    "The others leave out the rest of theirs. Nothing is left out with inner_steps and equal_steps=True, where all "
    "train on equally many batches at the pace of the slowest, or with a SliceDataModule, where faster ones train on "
    "more of the data."
)


def batches_left_out(counts: Sequence[int], most: int = 4) -> str:
    """Batches that workers have not trained on, in words: the largest numbers."""
    behind = sorted((number for number, count in enumerate(counts) if count), key=lambda number: -abs(counts[number]))
    said = [f"{counts[one] if counts[one] > 0 else 'some'} of worker {one}" for one in behind[:most]]
    return ", ".join(said) + (f" and those of {len(behind) - most} more" if len(behind) > most else "")


_NAMES = [field.name for field in fields(DiLoCoOptions) if field.name not in ("given", "run")]


def scheduler_options(given: Mapping[str, Any]) -> SchedulerOptions:
    """The scheduler's options among those that were given.

    Raises:
        OptionError: If one has a value that is not allowed.
    """
    return SchedulerOptions.resolve(**{name: given[name] for name in _SCHEDULED if name in given}, tuning=False)


def ddp_options(inner: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of DistributedDataParallel among those that were given.

    Raises:
        OptionError: If there is no such option.
        UnsupportedError: If the scheduler cannot honour one.
    """
    scheduled = inner == "bytescheduler"
    own = {*_NAMES, *RunOptions.__struct_fields__} - {"coordinated", "inner_options", "inner_size"}
    elsewhere = {
        **ELSEWHERE,
        **dict.fromkeys((*own, *_LAUNCH), "It is an option of DiLoCoStrategy itself."),
        **dict.fromkeys(_SCHEDULED, "Only strategy 'bytescheduler' has it."),
        **dict.fromkeys(("tuning", "log_metrics"), "Only a strategy 'bytescheduler' of the Trainer has it."),
    }
    require_known(given, [*_SCHEDULED * scheduled, *known_ddp_options()], of="inner", elsewhere=elsewhere)
    check_ddp_options(given, scheduled=scheduled)
    if not scheduled:
        return dict(given)
    own_of_ddp = {name: value for name, value in given.items() if name not in _SCHEDULED}
    return {"bucket_cap_mb": None, "gradient_as_bucket_view": True, **own_of_ddp}


def common_options(options: DiLoCoOptions) -> dict[str, object]:
    """What must be the same on all ranks, by name."""
    return {name: getattr(options, name) for name in _NAMES} | dict(options.given)
