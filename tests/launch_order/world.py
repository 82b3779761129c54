"""Ranks whose threads, messages and GPUs go on one explicit step at a time, around the package's own order.

What is real: cores, orders, the decisions as they travel, and where foreign collectives are submitted. What is played:
the training thread's program, GPUs with streams and *slots*, the network, and which of all these goes on next.

A GPU here does what NCCL may do and a user cannot rely on not happening: a collective's kernel holds one of few slots
from when it starts until all ranks have started theirs, and streams start their first kernel in any order.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from lightning_bytescheduler.collectives.launch_order import DecidingOrder, FollowingOrder
from lightning_bytescheduler.collectives.routing_group import ForeignCollectives
from lightning_bytescheduler.scheduler import ByteCore, CommTask, MixedOrder, SubCommTask, TaskKey
from lightning_bytescheduler.scheduler import core as core_module

__all__ = ["DESIGNS", "Case", "Deadlock", "Mismatch", "World", "stepped"]

DESIGNS = ("one-order", "two-communicators", "at-once", "overtaking", "no-order")
"""As it is; foreign collectives past the order, on a communicator of their own; told as soon as rank 0 has submitted
them; overtaken by what was submitted after them; and each rank in an order of its own."""

Step = tuple[int, str, Callable[[], None]]
"""Whose it is, what it is, and what it does."""


class Deadlock(AssertionError):
    """No rank can go on, and not all have ended."""


class Mismatch(AssertionError):
    """Two ranks have started different collectives as the same one of a communicator."""


class _NoThread:
    """The dispatcher's thread; what it would do is a step."""

    def __init__(self, **_: object) -> None: ...

    def start(self) -> None: ...


@contextmanager
def stepped() -> Iterator[None]:
    """Have cores without a thread."""
    with patch.object(core_module, "threading", SimpleNamespace(**{**vars(threading), "Thread": _NoThread})):
        yield


@dataclass(frozen=True, kw_only=True)
class Action:
    """What a training thread does next.

    Attributes:
        kind: ``"hook"`` hands over a gradient; ``"foreign"`` submits a collective; ``"join"`` waits until something is
            launched, and has the GPU wait for it; ``"flush"`` waits for it on the host.
        names: Names of gradients, or of one foreign collective.
    """

    kind: str
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is played.

    Attributes:
        design: One of :data:`DESIGNS`.
        ranks: How many.
        slots: Kernels that a GPU runs at once.
        layers: Layers of the model, each with a gradient of two parts.
        steps: Steps of the training.
        foreign: Share of places where a collective could be at which there is one.
        lonely: Share of ranks with waits of their own.
        seed: Seed of the program.
    """

    design: str = "one-order"
    ranks: int = 2
    slots: int = 1
    layers: int = 2
    steps: int = 2
    foreign: float = 0.4
    lonely: float = 0.5
    seed: int = 0

    @classmethod
    def drawn(cls, seed: int, design: str) -> Case:
        """One at random."""
        draw = random.Random(seed)
        return cls(
            design=design,
            ranks=draw.choice((2, 2, 2, 3)),
            slots=draw.choice((1, 1, 2)),
            layers=draw.choice((1, 2, 2, 3)),
            steps=draw.choice((1, 2, 2)),
            foreign=draw.choice((0.2, 0.5, 0.8)),
            lonely=draw.choice((0.0, 0.5, 1.0)),
            seed=draw.getrandbits(32),
        )

    def programs(self) -> list[list[Action]]:
        """Each rank's: all submit the same in the same order, and each waits where it likes."""
        draw, numbers = random.Random(self.seed), itertools.count(1)
        common: list[Action] = []
        free: list[int] = []  # places outside of backward passes: there a rank may wait for all that was handed over
        unawaited: list[tuple[int, str]] = []

        def maybe_foreign() -> None:
            if draw.random() < self.foreign:
                name = f"f{next(numbers)}"
                common.append(Action(kind="foreign", names=(name,)))
                if draw.random() < 0.7:
                    common.append(Action(kind=draw.choice(("join", "join", "flush")), names=(name,)))
                else:
                    unawaited.append((len(common), name))

        for step in range(self.steps):
            for layer in range(self.layers):
                free.append(len(common))
                maybe_foreign()
                if step:
                    common.append(Action(kind="join", names=(f"g{step - 1}.{layer}",)))
                    free.append(len(common))
                maybe_foreign()
            for layer in reversed(range(self.layers)):
                maybe_foreign()
                common.append(Action(kind="hook", names=(f"g{step}.{layer}",)))
        free.append(len(common))
        maybe_foreign()
        programs = []
        for _ in range(self.ranks):
            waits: list[tuple[int, str, tuple[str, ...]]] = []
            waits += [(draw.randint(place, len(common)), "join", (name,)) for place, name in unawaited]
            if draw.random() < self.lonely:
                place = draw.choice(free)
                handed = tuple(a.names[0] for a in common[:place] if a.kind == "hook")
                waits += [(place, "flush", handed)] if handed else []
            program = []
            for place, action in enumerate([*common, None]):
                program += [Action(kind=kind, names=names) for at, kind, names in waits if at == place]
                program += [] if action is None else [action]
            programs.append(program)
        return programs


@cache
def _parts(name: str) -> tuple[str, ...]:
    return (name,) if name.startswith("f") else (f"{name}[0]", f"{name}[1]")


class _Sent:
    def is_completed(self) -> bool:
        return True


class _Control:
    """The control group, as rank 0 sees it: what it broadcasts lies with each other rank until that looks."""

    def __init__(self, mail: list[deque[list[int]]]) -> None:
        self._mail = mail

    def broadcast(self, tensors: list[torch.Tensor], options: object) -> Any:
        message: list[int] = tensors[0].tolist()
        for box in self._mail:
            box.append(message)
        return _Sent()


def _ready(task: CommTask) -> bool:
    return task.ready


class _AtOnce(DecidingOrder):
    """A wrong design: a foreign collective is announced as soon as rank 0 has submitted it."""

    _may_go = staticmethod(_ready)  # type: ignore[assignment]


class _Overtaking(DecidingOrder):
    """A wrong design: gradients overtake a foreign collective that was submitted before them."""

    def _has_to_follow(self, task: CommTask) -> bool:
        return False


class _NoOrder(MixedOrder):
    """A wrong design: each rank follows its own priorities."""

    _may_go = staticmethod(_ready)  # type: ignore[assignment]


class _Rank:
    def __init__(self, world: World, number: int, program: list[Action], mail: list[deque[list[int]]]) -> None:
        self.world, self.number, self.program = world, number, program
        self.at = 0
        self.mail: deque[list[int]] = mail[number - 1] if number else deque()
        self.order = self._make_order(mail)
        self.core = ByteCore(partition_size=1, credit=2, order=self.order, clock=float)
        self.foreign = ForeignCollectives(self.core, self._report)
        self.tasks: dict[str, CommTask] = {}
        self.launched: set[str] = set()
        self.arrived: set[str] = set()
        self.training: deque[tuple[str, str]] = deque()  # this GPU's stream: marks to pass, and what it waits for
        self.passed: set[str] = set()
        self.unready: deque[tuple[str, CommTask]] = deque()
        self.communicators: tuple[deque[tuple[str, str, SubCommTask | None]], ...] = (deque(), deque())
        self.running: list[str | None] = [None, None]
        self.begun = [0, 0]  # kernels of each communicator that have started
        self.untold: deque[SubCommTask] = deque()

    def _make_order(self, mail: list[deque[list[int]]]) -> MixedOrder | FollowingOrder:
        design, control = self.world.case.design, _Control(mail)
        if design == "no-order":
            return _NoOrder()
        if self.number:
            return FollowingOrder(control, self._failed)  # type: ignore[arg-type]
        deciding = {"at-once": _AtOnce, "overtaking": _Overtaking}.get(design, DecidingOrder)
        return deciding(control, self._raise)  # type: ignore[arg-type]

    def _failed(self, error: BaseException) -> object:
        raise error

    def _raise(self, error: BaseException) -> BaseException:
        return error

    def _report(self, count: int) -> None:
        self.world.reported[self.number] = count

    # ------------------------------------------------------------------ what can happen on this rank

    def steps(self) -> Iterator[Step]:
        number = self.number
        if self.at < len(self.program) and self._can_act(self.program[self.at]):
            yield number, "thread", self._act
        if self.training and (self.training[0][0] == "mark" or self._has_arrived(self.training[0][1])):
            yield number, "stream", self._stream
        if self.unready and self.unready[0][0] in self.passed:
            yield number, "ready", self._notice_data
        if self.mail:
            yield number, "mail", self._read
        if self.core._woken:
            yield number, "dispatcher", self._dispatch
        if self.untold:
            yield number, "told", self._tell
        busy = (self.running[0] is not None) + (self.running[1] is not None)
        for lane, queue in enumerate(self.communicators):
            if self.running[lane] is None:
                if not queue:
                    continue
                if busy < self.world.case.slots and queue[0][1] in self.passed:
                    yield number, f"start {lane}", (self._start_first if lane == 0 else self._start_second)
            elif self.world.starts[lane][self.begun[lane] - 1][1] == self.world.case.ranks:
                yield number, f"end {lane}", (self._end_first if lane == 0 else self._end_second)

    def _can_act(self, action: Action) -> bool:
        if action.kind == "join":
            return all(self._is_launched(name) for name in action.names)
        if action.kind == "flush":
            return all(self._has_arrived(name) for name in action.names)
        return True

    def _act(self) -> None:
        action = self.program[self.at]
        self.at += 1
        if action.kind == "hook":
            self._hand_over(action.names[0])
        elif action.kind == "foreign":
            self._submit(action.names[0])
        else:
            self.training.extend(("wait", name) for name in action.names)

    def _hand_over(self, name: str) -> None:
        step, layer = map(int, name[1:].split("."))
        key = TaskKey(step, bucket=layer)
        task = self.tasks[name] = CommTask(name, 2, launch=self._launch_part, priority=layer, key=key)
        self.core.enqueue(task)
        self.training.append(("mark", name))
        self.unready.append((name, task))

    def _submit(self, name: str) -> None:
        self.training.append(("mark", name))
        if self.world.case.design == "two-communicators":
            self._launch(1, name, name, None)
        else:
            self.tasks[name] = self.foreign.submit("allreduce", lambda: self._launch(0, name, name, None))

    def _launch_part(self, sub: SubCommTask) -> None:
        self._launch(0, sub.name, sub.parent.name, sub)

    def _launch(self, lane: int, name: str, mark: str, sub: SubCommTask | None) -> None:
        self.launched.add(name)
        self.communicators[lane].append((name, mark, sub))

    def _is_launched(self, name: str) -> bool:
        return self.launched.issuperset(_parts(name))

    def _has_arrived(self, name: str) -> bool:
        return self.arrived.issuperset(_parts(name))

    def _stream(self) -> None:
        kind, name = self.training.popleft()
        if kind == "mark":
            self.passed.add(name)

    def _notice_data(self) -> None:
        self.unready.popleft()[1].notify_ready()

    def _read(self) -> None:
        assert isinstance(self.order, FollowingOrder)
        numbers = self.mail.popleft()
        if numbers[0] > 4:
            numbers = numbers + self.mail.popleft()
        self.order.take(numbers, self.core.update_order)

    def _dispatch(self) -> None:
        self.core._woken = False
        self.core.launch_allowed()

    def _tell(self) -> None:
        self.untold.popleft().notify_finish()

    def _start_first(self) -> None:
        self._start(0)

    def _start_second(self) -> None:
        self._start(1)

    def _end_first(self) -> None:
        self._end(0)

    def _end_second(self) -> None:
        self._end(1)

    def _start(self, lane: int) -> None:
        name = self.communicators[lane][0][0]
        starts, number = self.world.starts[lane], self.begun[lane]
        if number == len(starts):
            starts.append((name, 0))
        expected, ranks = starts[number]
        if expected != name:
            raise Mismatch(f"rank {self.number} starts {name} where another one has started {expected}")
        starts[number] = (name, ranks + 1)
        self.running[lane] = name
        self.begun[lane] += 1

    def _end(self, lane: int) -> None:
        name, _, sub = self.communicators[lane].popleft()
        self.running[lane] = None
        self.arrived.add(name)
        if sub is not None:
            self.untold.append(sub)

    # ------------------------------------------------------------------ where it stands

    @property
    def has_ended(self) -> bool:
        return self.at == len(self.program) and not any(self.communicators) and not self.untold

    def waits_for(self) -> str:
        if self.at == len(self.program):
            return f"rank {self.number} has come to its end"
        action = self.program[self.at]
        runs = ", ".join(kernel for kernel in self.running if kernel) or "nothing"
        return f"rank {self.number} waits to {action.kind} {', '.join(action.names)}, and its GPU runs {runs}"

    def standing(self) -> tuple[object, ...]:
        """All that what happens next depends on."""
        order: Any = self.order
        if isinstance(self.order, FollowingOrder):
            decided: tuple[object, ...] = tuple((d.key, d.index) for d in order._decisions)
        else:
            decided = (
                frozenset(sub.name for *_, sub in order._heap),
                tuple(task.name for task in order._foreign),
                frozenset(sub.name for sub in order._later),
                order._on_all,
            )
        return (
            self.at,
            tuple(self.training),
            tuple(name for name, _ in self.unready),
            tuple(map(tuple, self.mail)),
            self.core._woken,
            self.core.in_flight,
            tuple(sub.name for sub in self.untold),
            tuple(tuple(name for name, *_ in queue) for queue in self.communicators),
            tuple(self.running),
            tuple(self.begun),
            decided,
        )


class World:
    """All ranks, until they have ended or cannot go on.

    Args:
        case: What is played.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.reported = [0] * case.ranks
        self.told = 0
        self.starts: tuple[list[tuple[str, int]], ...] = ([], [])
        mail: list[deque[list[int]]] = [deque() for _ in range(case.ranks - 1)]
        self.ranks = [_Rank(self, number, program, mail) for number, program in enumerate(case.programs())]

    def steps(self) -> list[Step]:
        """What can happen next.

        Raises:
            Deadlock: If nothing can, and not all have ended.
            BaseException: What a core was stopped with.
        """
        steps = [step for rank in self.ranks for step in rank.steps()]
        if min(self.reported) > self.told and self.case.design != "no-order":
            steps.append((0, "reports", self._tell_reports))
        for rank in self.ranks:
            if rank.core.abort_cause is not None:
                raise rank.core.abort_cause
        if not steps and not all(rank.has_ended for rank in self.ranks):
            raise Deadlock("; ".join(rank.waits_for() for rank in self.ranks))
        return steps

    def _tell_reports(self) -> None:
        order = self.ranks[0].order
        assert isinstance(order, DecidingOrder)
        self.told = count = min(self.reported)
        self.ranks[0].core.update_order(lambda: order.submitted_everywhere(count))

    def standing(self) -> tuple[object, ...]:
        """All that what happens next depends on."""
        return (tuple(rank.standing() for rank in self.ranks), tuple(self.reported), self.told, self.starts[0][-3:])
