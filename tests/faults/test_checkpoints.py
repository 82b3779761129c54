"""Checkpoints on exception: those of a whole number of steps, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.ranks import Nursery
from tests.faults.scenario import Scenario, check_end, run, run_together


@pytest.fixture(scope="module")
def weights_after(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Weights after a number of steps of the same training without a failure."""
    folder = tmp_path_factory.mktemp("orderly")
    steps = (2, 3)
    scenarios = [Scenario(world_size=2, options={"steps": n, "save": str(folder / f"{n}.ckpt")}) for n in steps]
    run_together(nursery, scenarios, folder)
    return {n: torch.load(folder / f"{n}.ckpt", weights_only=True)["state_dict"] for n in steps}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "failed", "step"),
    [("backward", 0, 2), ("on_train_batch_end", 1, 3)],
)
def test_a_checkpoint_on_exception_has_every_update(
    place: str, failed: int, step: int, nursery: Nursery, tmp_path: Path, weights_after: dict[int, Any]
) -> None:
    options = {"where": place, "ranks": [failed], "checkpoint": str(tmp_path / "saved")}
    ranks = run(nursery, Scenario(world_size=2, options=options), tmp_path)
    check_end(ranks, failed=failed, says=f"Rank {failed} failed: ValueError: boom")
    for name in ("saved.ckpt", "on_exception.ckpt"):
        saved = torch.load(tmp_path / "saved" / name, weights_only=True)
        assert saved["global_step"] == step
        assert saved["state_dict"].keys() == weights_after[step].keys()
        for key, weight in weights_after[step].items():
            assert torch.equal(saved["state_dict"][key], weight), key


def test_no_checkpoint_if_updates_are_lost(nursery: Nursery, tmp_path: Path) -> None:
    # Rank 0 is a step ahead when rank 1 fails: it counts a step whose gradients will never arrive.
    scenarios = [
        Scenario(
            world_size=2,
            options={
                "where": place,
                "kind": kind,
                "ranks": [1],
                "behind": True,
                "checkpoint": str(tmp_path / place / "saved"),
            },
        )
        for place, kind in (("training_step", "raise"), ("sending", "SIGKILL"))
    ]
    for scenario, ranks in zip(scenarios, run_together(nursery, scenarios, tmp_path), strict=True):
        code = -9 if scenario.options["kind"] == "SIGKILL" else 1
        check_end(ranks, failed=1, code=code, says="Rank 1 failed: ")
        assert "parameters lack the update of the last step" in ranks[0].log
        assert not list(Path(scenario.options["checkpoint"]).glob("*.ckpt"))


def test_no_checkpoint_of_a_step_that_broke_off(nursery: Nursery, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    options = {"where": "stepping", "ranks": [0], "checkpoint": str(folder)}
    ranks = run(nursery, Scenario(world_size=2, options=options), tmp_path)
    check_end(ranks, failed=0, says="Rank 0 failed: ValueError: boom")
    assert "parameters lack the update of the last step" in ranks[0].log
    assert not list(folder.glob("*.ckpt"))


def test_no_checkpoint_of_lost_updates_when_the_fit_is_over(nursery: Nursery, tmp_path: Path) -> None:
    file = tmp_path / "later.ckpt"
    scenario = Scenario(
        world_size=2,
        options={"where": "training_step", "ranks": [1], "behind": True},
        own_options={0: {"save_after_failure": str(file)}},
    )
    ranks = run(nursery, scenario, tmp_path)
    check_end(ranks, failed=1, says="Rank 1 failed: ")
    assert "REFUSED" in ranks[0].log
    assert not file.exists()
