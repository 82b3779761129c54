"""What ``compression="auto"`` keeps of the link's credit for parts in fewer bytes."""

from __future__ import annotations

import pytest
import torch

from lightning_bytescheduler.compression.dense import Dense
from lightning_bytescheduler.ddp.compression_choice import CompressionChoice
from lightning_bytescheduler.scheduler.lateness import LateTransfers
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask, TaskKey


def choice(*, decides: bool) -> CompressionChoice:
    return CompressionChoice([Dense("int4", "nearest")], 0.2, decides=decides)


def seen(choice: CompressionChoice, form: int, seconds: float) -> None:
    """Two parts of a million bytes, one right after the other; the first may have waited for slower ranks."""
    for start in (1e3 * form, 1e3 * form + seconds):
        choice._late.pace.ended(form, 1e6, start - seconds, start + seconds)


def part(size: int, bucket: int = 0) -> SubCommTask:
    """The only one of a bucket."""
    task = CommTask("bucket", size, launch=lambda sub: None, key=TaskKey(0, 0, bucket))
    task.partition(size)
    return task.sub_tasks[0]


def test_credit_goes_by_time_where_codecs_are_slower_than_the_link() -> None:
    """Else what is urgent waits for as many parts as are smaller, each of which takes longer than its bytes."""
    deciding, following = choice(decides=True), choice(decides=False)
    assert deciding.charge(part(7530), 1) == following.charge(part(7530), 1) < 1010, (
        "by bytes, as long as nothing was seen"
    )
    for each in (deciding, following):
        seen(each, 0, 0.030)
        seen(each, 1, 0.010)
    assert 2400 < deciding.charge(part(7530), 1) < 2600
    assert deciding.charge(part(7530), 0) == 7530
    assert following.charge(part(7530), 1) < 1010, "it takes what was decided as it comes"
    slow = choice(decides=True)
    seen(slow, 0, 0.010)
    seen(slow, 1, 0.030)
    assert slow.charge(part(7530), 1) == 7530, "no more than as it is"


def test_parts_of_buckets_that_are_to_be_smaller_count_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of parts as large there are few; by time, the last and most urgent one would wait for the one before."""
    deciding = choice(decides=True)
    seen(deciding, 0, 0.030)
    seen(deciding, 1, 0.010)
    monkeypatch.setattr(LateTransfers, "is_planned", lambda late, bucket: bucket == 1)
    assert deciding.charge(part(7530, bucket=1), 1) < 1010 < deciding.charge(part(7530, bucket=0), 1)


class TestLargerParts:
    """Of buckets that are to be smaller."""

    BUFFER = torch.randn(100_000, generator=torch.Generator().manual_seed(0))

    @pytest.fixture
    def late(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Buckets that are late, as rank 0 sees it: the third quarter by quarter."""
        buckets: list[int] = []
        monkeypatch.setattr(LateTransfers, "late_share", lambda late, bucket, *_: buckets.count(bucket) / 4)
        monkeypatch.setattr(LateTransfers, "is_late", lambda late, bucket, *_: bucket in buckets)
        return buckets

    def test_few_equal_parts(self, late: list[int]) -> None:
        deciding = choice(decides=True)
        assert deciding.cut(3, self.BUFFER, 10_000) is None
        late += [3] * 4
        assert deciding.cut(3, self.BUFFER, 10_000) == (33_334, 33_334, 33_332)
        assert deciding.cut(3, self.BUFFER, 50_000) == (100_000,)

    def test_what_is_to_be_smaller_goes_first(self, late: list[int]) -> None:
        late += [3] * 3
        assert choice(decides=True).cut(3, self.BUFFER, 10_000) == (37_500, 37_500, 8_334, 8_334, 8_332)
        late.pop()
        assert choice(decides=True).cut(3, self.BUFFER, 25_000) == (50_000, 25_000, 25_000)

    def test_none_on_ranks_that_follow_or_where_sums_come_before_means(self, late: list[int]) -> None:
        late.append(3)
        assert choice(decides=False).cut(3, self.BUFFER, 10_000) is None
        deciding = choice(decides=True)
        deciding.begin_step("overlapped", halves=True)
        assert deciding.cut(3, self.BUFFER, 10_000) is None

    def test_none_of_what_loses_too_much(self, late: list[int]) -> None:
        """It would travel as it is, and be in the way of everything for long; until a part of it can be compressed."""

        class Bucket:
            sent = torch.eye(1024)[0]  # int4 leaves out nothing of it

            def sample(self, sub_task: SubCommTask) -> tuple[torch.Tensor, torch.Tensor]:
                return self.sent, self.sent

        late.append(3)
        deciding = CompressionChoice([Dense("int4", "nearest")], 1e-6, decides=True)
        deciding.begin_step("overlapped", halves=False)
        bucket = Bucket()
        bucket.sent = self.BUFFER[:1024]
        assert deciding.choose(bucket, part(1024, bucket=3), width=4) == 0
        assert deciding.cut(3, self.BUFFER, 10_000) is None
        bucket.sent = Bucket.sent
        assert deciding.choose(bucket, part(1024, bucket=3), width=4) == 1
        assert deciding.cut(3, self.BUFFER, 10_000) is not None
