"""Trainings on a real Ray, of two machines that are on this one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from lightning_bytescheduler import OptionError, UnsupportedError
from tests.ray_train.conftest import MACHINE
from tests.ray_train.trainings import (
    EPOCHS,
    EVERY,
    OPTIONS,
    SAMPLES,
    STEPS,
    attempts,
    numbers_of_ranks,
    on_worker,
    taken,
    without_ray,
)
from tests.support.rank_pool import RankPool

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray", "ignore::FutureWarning:ray")

WORKERS = 2
PATIENCE_S = 300.0  # beside other work Ray took 75 s to start two workers


def folder_of(tmp_path: Path, asked: Mapping[str, Any]) -> Path:
    return tmp_path / "-".join(asked)


def run(tmp_path: Path, workers: Any = WORKERS, failures: int = 0, **asked: Any) -> Path:
    """Train; returns the folder of records."""
    folder = folder_of(tmp_path, asked)
    folder.mkdir()
    trainer = TorchTrainer(
        on_worker,
        train_loop_config={"folder": str(folder), **asked},
        torch_config=TorchConfig(timeout_s=60),
        scaling_config=ScalingConfig(num_workers=workers, elastic_resize_monitor_interval_s=1.0),
        run_config=RunConfig(
            storage_path=str(tmp_path / "ray"), name=folder.name, failure_config=FailureConfig(max_failures=failures)
        ),
    )
    trainer.fit()
    return folder


def weights(folder: Path, rank: int = 0) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(folder / f"weights.{rank}", weights_only=True)
    return found


def test_what_ray_decides_is_refused_and_so_is_a_place_without_it() -> None:
    from lightning_bytescheduler.ray import RayByteSchedulerStrategy, RayDiLoCoStrategy

    with pytest.raises(OptionError, match=r"timeout=.*left out of RayByteSchedulerStrategy.*TorchConfig\(timeout_s="):
        RayByteSchedulerStrategy(timeout=timedelta(seconds=5))
    for strategy in (RayByteSchedulerStrategy, RayDiLoCoStrategy):
        with pytest.raises(UnsupportedError, match="train_loop_per_worker"):
            strategy(**({} if strategy is RayByteSchedulerStrategy else OPTIONS["diloco"]))


def assert_each_sample_once(folder: Path, steps: int | None = None) -> None:
    """In the order of steps, the first so many samples are an epoch, and the next, too."""
    by_step = taken(folder)
    assert list(by_step) == list(range(len(by_step)))
    if steps is not None:
        assert len(by_step) == steps
        assert all(len(batch) == EPOCHS * SAMPLES // steps for batch in by_step.values())
    samples = [sample for batch in by_step.values() for sample in batch]
    assert len(samples) == EPOCHS * SAMPLES
    for epoch in range(EPOCHS):
        assert Counter(samples[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == Counter(range(SAMPLES))


@pytest.fixture(scope="module")
def plain(two_plain_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Records of the same trainings without Ray."""
    folders = {strategy: tmp_path_factory.mktemp(strategy) for strategy in OPTIONS}
    for strategy, folder in folders.items():
        two_plain_ranks.run(without_ray, strategy=strategy, folder=str(folder))
    return folders


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("strategy", list(OPTIONS))
def test_a_worker_is_killed(strategy: str, plain: dict[str, Path], tmp_path: Path) -> None:
    """All begin anew from a checkpoint of the middle of an epoch: weights are those of a run without that, and Ray."""
    broken = run(tmp_path, failures=1, strategy=strategy, reports=True, dies=True)
    assert_each_sample_once(broken, STEPS if strategy == "bytescheduler" else STEPS // WORKERS)
    for rank in range(WORKERS):
        expected = weights(plain[strategy], rank)
        assert all(torch.equal(value, expected[name]) for name, value in weights(broken, rank).items())


@pytest.mark.parametrize("strategy", list(OPTIONS))
def test_machines_go_and_come(
    strategy: str, cluster: Any, plain: dict[str, Path], two_plain_ranks: RankPool, tmp_path: Path
) -> None:
    """Two workers, then one, then two: the training that the same numbers of workers come to without Ray.

    With bytescheduler that is the training of two throughout, but for the order of sums.
    """
    asked = {"strategy": strategy, "reports": True, "waits_alone": True}
    folder = folder_of(tmp_path, asked)

    def wait_for(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not (folder.exists() and condition()):
            assert time.monotonic() < deadline
            assert not training.done(), training.result()
            time.sleep(0.2)

    with ThreadPoolExecutor(1) as pool:  # machines can be started on this thread alone
        training = pool.submit(run, tmp_path, workers=(1, 2), failures=3, **asked)
        wait_for(lambda: len(taken(folder)) > EVERY[strategy] + 1)
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        wait_for(lambda: numbers_of_ranks(folder)[-1:] == [1])
        cluster.add_node(**MACHINE)
        training.result()
    assert numbers_of_ranks(folder) == [2, 1, 2]
    assert_each_sample_once(folder, STEPS if strategy == "bytescheduler" else None)
    if strategy == "bytescheduler":
        for name, value in weights(plain[strategy]).items():
            assert (weights(folder)[name] - value).norm() <= 1e-5 * value.norm(), name
        return
    resume: str | None = None
    saved: dict[int, str] = {}
    for number, (ranks, step) in enumerate(attempts(folder)):
        resume = saved.get(step, resume)  # as the one before, where that ended before Ray had another checkpoint
        assert (0 if resume is None else step_of(resume)) == step
        replayed = tmp_path / f"replayed {number}"
        replayed.mkdir()
        two_plain_ranks.run(without_ray, strategy=strategy, folder=str(replayed), resume=resume, ranks=ranks)
        saved = {step_of(file): str(file) for file in replayed.glob("*.ckpt")}
    assert all(torch.equal(value, weights(replayed)[name]) for name, value in weights(folder).items())


def step_of(file: str | Path) -> int:
    """Of which step a checkpoint is."""
    step: int = torch.load(file, weights_only=True)["global_step"]
    return step
