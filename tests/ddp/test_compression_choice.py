"""What ``compression="auto"`` keeps of the link's credit for parts in fewer bytes."""

from __future__ import annotations

from lightning_bytescheduler.compression.dense import Dense
from lightning_bytescheduler.ddp.compression_choice import CompressionChoice


def choice(*, decides: bool) -> CompressionChoice:
    return CompressionChoice([Dense("int4", "nearest")], 0.2, decides=decides)


def seen(choice: CompressionChoice, form: int, seconds: float) -> None:
    """Two parts of a million bytes, one right after the other; the first may have waited for slower ranks."""
    for start in (1e3 * form, 1e3 * form + seconds):
        choice._late.pace.ended(form, 1e6, start - seconds, start + seconds)


def test_credit_goes_by_time_where_codecs_are_slower_than_the_link() -> None:
    """Else what is urgent waits for as many parts as are smaller, each of which takes longer than its bytes."""
    deciding, following = choice(decides=True), choice(decides=False)
    assert deciding.charge(7530, 1) == following.charge(7530, 1) < 1010, "by bytes, as long as nothing was seen"
    for each in (deciding, following):
        seen(each, 0, 0.030)
        seen(each, 1, 0.010)
    assert 2400 < deciding.charge(7530, 1) < 2600
    assert deciding.charge(7530, 0) == 7530
    assert following.charge(7530, 1) < 1010, "it takes what was decided as it comes"
    slow = choice(decides=True)
    seen(slow, 0, 0.010)
    seen(slow, 1, 0.030)
    assert slow.charge(7530, 1) == 7530, "no more than as it is"
