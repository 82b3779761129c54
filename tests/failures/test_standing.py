"""When ranks wait for each other for good, and when they only seem to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_bytescheduler.failures.standstill import Standing, explain_death, find_standstill

TRAINS = Standing(place="in epoch 0, batch 4", steps=3, launched=20, batches=4, epoch_batches=4, launched_at_batch=20)
GRADIENTS = replace(TRAINS, steps=4, awaited_step=4)  # waits for those of the step it has handed over
BEHIND = replace(TRAINS, batches=3, epoch_batches=3, launched_at_batch=18, launched=19)
COLLECTIVE = replace(BEHIND, collective="all_reduce", launched=21)
NEXT_BATCH = replace(BEHIND, collective="broadcast", begins_batch=True, launched=21)
ENDED = replace(BEHIND, ended=True)


def test_it_travels_as_text() -> None:
    assert Standing.decode(COLLECTIVE.encode().encode()) == COLLECTIVE


@pytest.mark.parametrize(
    ("one", "other", "certain"),
    [
        (GRADIENTS, COLLECTIVE, True),  # each can go on only after the other
        (GRADIENTS, replace(COLLECTIVE, launched=20), True),  # what this one passed was what begins a batch
        (GRADIENTS, replace(COLLECTIVE, launched=19), False),  # this one has passed what nobody leaves alone
        (GRADIENTS, NEXT_BATCH, True),
        (COLLECTIVE, replace(COLLECTIVE, collective="barrier"), True),
        (COLLECTIVE, NEXT_BATCH, True),
        (replace(COLLECTIVE, launched=22), COLLECTIVE, False),
        (GRADIENTS, ENDED, True),
        (NEXT_BATCH, ENDED, True),
    ],
)
def test_ranks_that_wait_for_each_other(one: Standing, other: Standing, certain: bool) -> None:
    for standings in ({0: one, 1: other}, {0: other, 1: one}):
        found = find_standstill(standings)
        assert found is not None
        assert found.certain == certain
        assert "rank 0 " in found.text
        assert "rank 1 " in found.text


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (GRADIENTS, TRAINS),  # slow, or at a breakpoint
        (GRADIENTS, replace(TRAINS, place="in validation")),  # a long validation on one rank
        (GRADIENTS, GRADIENTS),  # a slow network
        (GRADIENTS, replace(COLLECTIVE, steps=4)),  # the gradients are on their way, and this one comes next
        (replace(GRADIENTS, awaited_step=3), replace(GRADIENTS, steps=3, awaited_step=3)),
        (COLLECTIVE, COLLECTIVE),
        (COLLECTIVE, TRAINS),
        (COLLECTIVE, ENDED),  # it may be called after the fit there
        (GRADIENTS, replace(ENDED, steps=4)),  # its gradients are on their way
        (NEXT_BATCH, replace(ENDED, batches=4)),
        (GRADIENTS, replace(COLLECTIVE, collective="broadcast", launched=19)),  # its root may run ahead
        (ENDED, ENDED),
    ],
)
def test_ranks_that_may_go_on(one: Standing, other: Standing) -> None:
    assert find_standstill({0: one, 1: other}) is None
    assert find_standstill({0: other, 1: one}) is None


def test_whoever_computes_may_still_come() -> None:
    assert find_standstill({0: GRADIENTS, 1: COLLECTIVE, 2: TRAINS}) is None
    assert find_standstill({0: GRADIENTS, 1: COLLECTIVE, 2: GRADIENTS}) is not None
    assert find_standstill({0: GRADIENTS, 1: ENDED, 2: TRAINS}) is not None  # but nothing brings that one back


@pytest.mark.parametrize(
    ("one", "other", "uneven"),
    [
        (NEXT_BATCH, ENDED, True),
        (GRADIENTS, replace(COLLECTIVE, is_last=True, through=True), True),
        (NEXT_BATCH, replace(COLLECTIVE, is_last=True), True),
        (GRADIENTS, replace(COLLECTIVE, last_epoch=3), False),
        (replace(GRADIENTS, last_epoch=4), replace(COLLECTIVE, last_epoch=3), True),
        (replace(GRADIENTS, expected=8), replace(COLLECTIVE, expected=7), True),
        (replace(GRADIENTS, expected=8), COLLECTIVE, False),
        (GRADIENTS, COLLECTIVE, False),
        # The next epoch is not uneven data.
        (replace(NEXT_BATCH, epoch=1, epoch_batches=0), replace(COLLECTIVE, is_last=True, through=True), False),
    ],
)
def test_uneven_data_is_told_from_skipped_collectives(one: Standing, other: Standing, uneven: bool) -> None:
    found = find_standstill({0: one, 1: other})
    assert found is not None
    assert ("different numbers of batches" in found.text) == uneven
    assert ("use_distributed_sampler" in found.text) == uneven
    assert ("sync_dist" in found.text) != uneven


def test_each_rank_is_described() -> None:
    waits = replace(GRADIENTS, place="in epoch 1, batch 4 (backward)", epoch=1, expected=9)
    validates = replace(
        COLLECTIVE, place="in batch 2 of the validation (on_validation_epoch_end)", is_last=True, through=True
    )
    assert waits.describe() == (
        "is in epoch 1, batch 4 (backward), waits for the gradients of step 4 "
        "(has begun 4 of 9 batches of epoch 1, 4 in all, and handed over 4 gradients)"
    )
    assert validates.describe() == (
        "is in batch 2 of the validation (on_validation_epoch_end), waits in all_reduce, collective 21 of the default "
        "group (has ended epoch 0 after 3 batches, 3 in all, and handed over 3 gradients)"
    )
    assert NEXT_BATCH.describe().startswith(
        "is in epoch 0, batch 4, waits for the others to begin its batch 4 of epoch 0 ("
    )
    assert ENDED.describe() == "has ended the fit after 3 batches, 3 of epoch 0"


def test_a_death_is_explained_by_what_was_told_last() -> None:
    assert explain_death({}) == ""
    even, uneven = {0: GRADIENTS, 1: TRAINS}, {0: replace(TRAINS, expected=4), 1: replace(TRAINS, expected=5)}
    assert explain_death(even).startswith("Last, rank 0 is in epoch 0")
    assert "limit_train_batches" not in explain_death(even)
    assert explain_death(uneven).endswith("bound all with Trainer(limit_train_batches=N).")
