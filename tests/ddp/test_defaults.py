"""Defaults that the documentation promises."""

from __future__ import annotations

import inspect

from lightning_bytescheduler import ByteSchedulerStrategy, DiLoCoStrategy
from lightning_bytescheduler.ddp.decided_fit import SHORTEST_FIT
from lightning_bytescheduler.diloco.round_end import FastestSteps
from lightning_bytescheduler.failures import rendezvous


def defaults(strategy: type) -> dict[str, object]:
    return {
        name: one.default
        for name, one in inspect.signature(strategy).parameters.items()
        if one.kind is inspect.Parameter.KEYWORD_ONLY
    }


def test_the_defaults_of_bytescheduler() -> None:
    assert defaults(ByteSchedulerStrategy) == {
        "partition_size": None,
        "credit": None,
        "cross_barrier": True,
        "mode": "auto",
        "tuning": None,
        "timeline": None,
        "log_metrics": True,
        "debug": None,
        "policy": "bytescheduler",
        "compression": None,
        "compression_min_size": None,
        "weighting": "ranks",
        "batch_size": None,
        "servers": None,
        "bucket_cap_mb": None,
        "gradient_as_bucket_view": True,
    }
    assert SHORTEST_FIT == 100


def test_the_defaults_of_diloco() -> None:
    given = defaults(DiLoCoStrategy)
    launch = ("timeout", "start_method")  # as DDPStrategy's
    assert {name: value for name, value in given.items() if value is not None and name not in launch} == {
        "worker_states": True,
    }
    options = DiLoCoStrategy()._options  # what is left out is the coordinator's, where there is one
    without_coordinator = {
        "equal_steps": False,
        "fragments": 1,
        "overlap_steps": 0,
        "wire_dtype": "fp32",
    }
    assert {name: getattr(options.run, name) for name in without_coordinator} == without_coordinator
    assert options.run.target == FastestSteps(100)
    assert DiLoCoStrategy(timeout=None)._longest_wait_s == 1800.0
    assert options.rounds(1800.0).quorum == 0.0  # all live, or the job ends


def test_missing_ranks_are_named_after_half_a_minute() -> None:
    assert rendezvous._WARN_S == 30.0
