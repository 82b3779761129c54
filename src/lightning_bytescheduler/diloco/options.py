"""The options of the strategy ``diloco``: checked, and made into what the files below it understand.

Some of what the ranks of a worker train together with is for DistributedDataParallel, some for the scheduler of their
gradients.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from lightning_bytescheduler.checks import (
    is_whole,
    parse_size,
    require_bool,
    require_known,
    require_new_file,
    require_positive,
    require_share,
    require_whole,
)
from lightning_bytescheduler.compression.wire_format import WireFormat
from lightning_bytescheduler.ddp.ddp_arguments import (
    ELSEWHERE,
    check_ddp_options,
    check_ddp_values,
    known_ddp_options,
)
from lightning_bytescheduler.diloco.batch_size import resolve_batch_size
from lightning_bytescheduler.diloco.coordinator_protocol import wire_named
from lightning_bytescheduler.diloco.fragments import FragmentOptions, Overlap, OverlapSteps
from lightning_bytescheduler.diloco.outer_optimizer import SPARSE_DEFAULTS
from lightning_bytescheduler.diloco.outer_timeline import beside
from lightning_bytescheduler.diloco.round_end import (
    INNER_STEPS,
    FastestSteps,
    FixedSteps,
    RoundOptions,
    RoundTarget,
    SampleTarget,
)
from lightning_bytescheduler.diloco.weighted_mean import Weighting, require_weighting
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.scheduler.options import SchedulerOptions

_INNER = ("ddp", "bytescheduler")
_NODE = "node"
_TIMEOUT_S = 1800.0
_SCHEDULED = ("partition_size", "credit", "cross_barrier", "mode", "timeline", "debug")
_LAUNCH = ("accelerator", "parallel_devices", "process_group_backend", "start_method", "timeout")
_REFUSED = ("tuning", "log_metrics")
_OPTIMIZER = "a function or class that makes an optimizer of a list of tensors, or None"

OPTIONS_ELSEWHERE = {
    **ELSEWHERE,
    **{
        name: f"Where several processes form a worker, write inner={{'strategy': ..., {name!r}: ...}}."
        for name in (*known_ddp_options(), *_SCHEDULED)
        if name != "timeline"
    },
    "outer_learning_rate": "Did you mean 'outer_lr'?",
    "local_steps": "Did you mean 'inner_steps'?",
    "sync_every": "Did you mean 'inner_steps'?",
}
"""What to say of options that ``DiLoCoStrategy`` does not have itself, by name."""


_DEFAULTS = {"equal_steps": False, "weighting": "samples", "fragments": 1, "overlap_steps": 0, "wire_dtype": "fp32"}
"""Of options of which it has to be known whether they were given: a coordinator's hold for those that were not."""


def with_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same with what holds where nothing was given, and no coordinator says otherwise."""
    return {name: _DEFAULTS.get(name) if value is None else value for name, value in given.items()}


def inner_of(given: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """The option ``inner`` in its parts: who trains the ranks of a worker together, how many, and with which options.

    Raises:
        OptionError: If it is none; names what is allowed.
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
        coordinated: Whether rounds are a coordinator's.

    Raises:
        OptionError: Names the option that is not allowed, and what would be.
    """

    samples_per_round: int | None
    inner_steps: int | None
    equal_steps: bool
    outer_steps: int | None
    outer_lr: float | None
    outer_momentum: float | None
    outer_optimizer: Callable[[list[Tensor]], Optimizer] | None
    weighting: Weighting
    fragments: int
    overlap_steps: OverlapSteps
    wire_dtype: str
    batch_size: int | Sequence[int | Literal["auto"]] | Literal["auto"] | None
    partition_size: int | None = field(init=False, default=None)
    credit: int | None = field(init=False, default=None)
    timeline: str | os.PathLike[str] | None
    inner: str | None
    inner_size: int | Literal["node"] | None
    inner_options: Mapping[str, Any]
    worker_states: bool = True
    coordinated: bool = False

    def __post_init__(self) -> None:
        if self.samples_per_round is not None:
            require_whole("samples_per_round", self.samples_per_round, 1)
            if self.inner_steps is not None:
                raise OptionError("inner_steps", self.inner_steps, "left out where samples_per_round ends a round")
            if self.equal_steps:
                raise OptionError("equal_steps", self.equal_steps, "left out where samples_per_round ends a round")
        if self.inner_steps is not None:
            require_whole("inner_steps", self.inner_steps, 1)
        require_bool("equal_steps", self.equal_steps)
        require_bool("worker_states", self.worker_states)
        if self.outer_steps is not None:
            require_whole("outer_steps", self.outer_steps, 1)
        self._check_outer_optimizer()
        require_weighting("weighting", self.weighting)
        FragmentOptions(fragments=self.fragments, overlap_steps=self.overlap_steps)
        self._overlap()
        if self.wire.dtype == "sparse" and self.outer_optimizer is None:
            for option, value in SPARSE_DEFAULTS.items():
                if getattr(self, option) is None:
                    object.__setattr__(self, option, value)
        self._check_outer_traffic()
        self._check_batch_size()
        self._check_inner()

    def _check_outer_optimizer(self) -> None:
        if self.coordinated and self.outer_optimizer is not None:
            raise OptionError(
                "outer_optimizer",
                self.outer_optimizer,
                "left out where a coordinator is given, which takes the outer step",
            )
        if self.outer_optimizer is not None:
            self._check_factory(self.outer_optimizer)
            for option in ("outer_lr", "outer_momentum"):
                if getattr(self, option) is not None:
                    raise OptionError(option, getattr(self, option), "left out where outer_optimizer is given")
        if self.outer_lr is not None:
            require_positive("outer_lr", self.outer_lr)
        if self.outer_momentum is not None:
            require_share("outer_momentum", self.outer_momentum)

    def _check_factory(self, given: object) -> None:
        way_out = "Write, for example, outer_optimizer=lambda tensors: torch.optim.Adam(tensors, lr=0.01)."
        if isinstance(given, Optimizer):
            way_out = f"It is an optimizer of other tensors than the outer weights. {way_out}"
        elif callable(given) and not (isinstance(given, type) and not issubclass(given, Optimizer)):
            try:
                inspect.signature(given).bind([])
                return
            except TypeError:
                way_out = f"It is called with the list alone. {way_out}"
            except ValueError:  # has no signature to look at
                return
        raise OptionError("outer_optimizer", given, _OPTIMIZER, way_out)

    def _check_outer_traffic(self) -> None:
        """Sizes of what travels between workers, by variables alone, and its timeline.

        Where the ranks of a worker train with the scheduler, the timeline of what travels between workers is beside
        theirs.
        """
        env = {name: value.strip() for name, value in os.environ.items() if value.strip()}
        scheduled = self.inner == "bytescheduler"
        for option, variable in (("partition_size", "BYTESCHEDULER_PARTITION"), ("credit", "BYTESCHEDULER_CREDIT")):
            if variable in env:
                object.__setattr__(self, option, parse_size(variable, env[variable]))
        given, variable = self.timeline, "BYTESCHEDULER_TIMELINE"
        if given is not None:
            object.__setattr__(self, "timeline", require_new_file("timeline", given))
            inner = self.inner_options.get("timeline")
            if scheduled and (inner or env.get(variable)) == os.fspath(given):
                raise OptionError("timeline", given, "another file than that of the ranks of a worker")
        elif variable in env:
            file = require_new_file(variable, env[variable])
            object.__setattr__(self, "timeline", beside(file, "outer") if scheduled else file)

    def _check_batch_size(self) -> None:
        sizes = self.batch_size if isinstance(self.batch_size, (list, tuple)) else [self.batch_size]
        if not sizes:
            raise OptionError("batch_size", self.batch_size, "one for each worker")
        for size in sizes:
            resolve_batch_size(size, environ={})

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
        if self.batch_size == "auto":
            raise OptionError("batch_size", "auto", "left out, or numbers, where inner is given")

    def ranks_per_worker(self, *, on_node: int, ranks: int) -> int:
        """How many ranks train together as one worker.

        Args:
            on_node: How many run on each machine.
            ranks: How many there are in all.
        """
        if self.inner is None:
            return 1
        if self.coordinated:
            return ranks
        return on_node if self.inner_size == _NODE else int(self.inner_size or 1)

    def check_ranks(self, *, ranks: int, on_node: int, rank: int, node: int) -> None:
        """Make sure that workers can be made of the ranks that were launched.

        Args:
            ranks: How many there are.
            on_node: How many run on each machine.
            rank: This one.
            node: The machine it runs on.

        Raises:
            OptionError: If they cannot.
        """
        size = self.ranks_per_worker(on_node=on_node, ranks=ranks)
        if self.coordinated and ranks > size:
            raise OptionError(
                "devices",
                ranks,
                "1 with a coordinator, whose workers are independent Trainers: start one for each device, or let all "
                "processes of this Trainer be one worker with inner='ddp' or inner='bytescheduler'",
            )
        if ranks % size:
            raise OptionError("inner.size", self.inner_size, f"a number that divides that of all processes, {ranks}")
        if self.inner_size == _NODE and rank // size != node:
            raise OptionError(
                "inner.size",
                self.inner_size,
                f"a number where the ranks of a machine do not follow one another (rank {rank} is on machine {node})",
            )
        workers = ranks // size
        if isinstance(self.batch_size, (list, tuple)) and len(self.batch_size) != workers:
            raise OptionError("batch_size", self.batch_size, f"one for each worker, of which there are {workers}")

    @property
    def target(self) -> RoundTarget:
        """What ends a round."""
        if self.samples_per_round is not None:
            return SampleTarget(self.samples_per_round)
        steps = INNER_STEPS if self.inner_steps is None else self.inner_steps
        return FixedSteps(steps) if self.equal_steps else FastestSteps(steps)

    @property
    def wire(self) -> WireFormat:
        """What travels."""
        return wire_named("wire_dtype", self.wire_dtype)

    def _overlap(self) -> Overlap:
        return Overlap(steps=self.overlap_steps, inner_steps=self.target.step_cap)

    @property
    def fragment_options(self) -> FragmentOptions:
        """How the model is synchronised."""
        return FragmentOptions(fragments=self.fragments, overlap_steps=self.overlap_steps)

    def outer(self, timeout: timedelta | None) -> OuterOptions:
        """What a worker's threads have to know.

        Args:
            timeout: Longest wait for other workers. All of them live or the job ends, so nobody is given up before.
        """
        seconds = _TIMEOUT_S if timeout is None else timeout.total_seconds()
        return OuterOptions(
            target=self.target,
            rounds=RoundOptions(
                outer_steps=self.outer_steps,
                quorum=0.0,
                grace=seconds,
                silent_after=seconds,
                first_step_limit=seconds,
            ),
            wire=self.wire,
            overlap=self._overlap(),
            partition_size=self.partition_size,
            credit=self.credit,
            timeline=None if self.timeline is None else os.fspath(self.timeline),
            timeout=seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterOptions:
    """How pseudo-gradients travel and rounds end; the parts are validated where they are made.

    Attributes:
        target: What ends a round.
        rounds: Of the batch scheduler.
        wire: What travels.
        overlap: See :class:`WorkerSession`.
        partition_size: Largest piece of a pseudo-gradient sent at once, in parameters; ``None`` follows the link.
        credit: What may be in flight at once, in parameters; ``None`` follows the link.
        timeline: File of worker 0's timeline, or ``None`` for none.
        timeout: Longest wait for the other workers, in seconds.
    """

    target: RoundTarget
    rounds: RoundOptions
    wire: WireFormat
    overlap: Overlap
    partition_size: int | None
    credit: int | None
    timeline: str | None
    timeout: float


def scheduler_options(given: Mapping[str, Any]) -> SchedulerOptions:
    """The scheduler's options among those that were given.

    Raises:
        OptionError: If one has a value that is not allowed, or has no meaning inside a worker.
    """
    for option in _REFUSED:
        if given.get(option):
            raise OptionError("inner", dict(given), f"without {option}, which is for strategy 'bytescheduler' alone")
    own = {name: given[name] for name in _SCHEDULED if name in given}
    return SchedulerOptions.resolve(**own, tuning=False)


def ddp_options(inner: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of DistributedDataParallel among those that were given.

    Raises:
        OptionError: If there is no such option.
        UnsupportedError: If the scheduler cannot honour one.
    """
    scheduled = inner == "bytescheduler"
    if scheduled:
        check_ddp_options(given)
    own = {field.name for field in fields(DiLoCoOptions)} - {"coordinated", "inner_options", "inner_size"}
    elsewhere = {
        **ELSEWHERE,
        **dict.fromkeys((*own, *_LAUNCH), "It is an option of DiLoCoStrategy itself."),
        **dict.fromkeys(_SCHEDULED, "Only strategy 'bytescheduler' has it."),
    }
    known = [*_SCHEDULED * scheduled, *known_ddp_options()]
    require_known(
        {name: value for name, value in given.items() if name not in _REFUSED or not scheduled},
        known,
        of="inner",
        elsewhere=elsewhere,
    )
    check_ddp_values(given)
    if scheduled:
        given = {name: value for name, value in given.items() if name not in (*_SCHEDULED, *_REFUSED)}
    return {"bucket_cap_mb": None, "gradient_as_bucket_view": True, **given} if scheduled else dict(given)


def common_options(options: DiLoCoOptions) -> dict[str, object]:
    """What must be the same on all ranks, by name."""
    own = ("timeline", "batch_size", "outer_optimizer")
    return {field.name: getattr(options, field.name) for field in fields(options) if field.name not in own}
