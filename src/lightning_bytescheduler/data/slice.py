"""A slice: a piece of the data that is handed out, fetched and trained on as one."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_bytescheduler.exceptions import OptionError

__all__ = ["Slice"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A file, or a range of one, with a known number of samples.

    Attributes:
        key: Identity of the slice, the same in every process and after every restart.
        url: Where its bytes are, any URL that fsspec opens.
        start: First byte of the range in the file at ``url``.
        size: Length of the range in bytes.
        samples: Samples in it, at least one.
        checksum: ``"xxh3_64:<hex>"`` of the range's bytes, or None where the source has no index.

    Raises:
        OptionError: If the key or the URL is empty, or a number is out of its range.
    """

    key: str
    url: str
    start: int
    size: int
    samples: int
    checksum: str | None = None

    def __post_init__(self) -> None:
        for option, text in (("key", self.key), ("url", self.url)):
            if not isinstance(text, str) or not text:
                raise OptionError(option, text, "a text that is not empty")
        for option, value, least in (("start", self.start, 0), ("size", self.size, 0), ("samples", self.samples, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise OptionError(option, value, f"a whole number, {least} or more")
