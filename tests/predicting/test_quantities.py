from __future__ import annotations

import pytest

from lightning_bytescheduler.checks import parameters_in
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.predicting.link import (
    LinkModel,
    duration_in_words,
    rate_in_words,
    require_duration,
    require_rate,
)


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("1Gbps", 1e9),
        ("1gbps", 1e9),
        ("1Gbit/s", 1e9),
        ("1 Gbit", 1e9),
        ("25 gbit/s", 25e9),
        ("1GBit/s", 1e9),
        ("10GbE", 10e9),
        ("2.5GbE", 2.5e9),
        ("500Mbps", 500e6),
        ("500mbit", 500e6),
        (" 1.5 kbit ", 1500.0),
        ("1.25GB/s", 10e9),
    ],
)
def test_rates(text: str, bits: float) -> None:
    assert require_rate("bandwidth", text) == pytest.approx(bits / 8)
    assert LinkModel(workers=2, bandwidth=text).bandwidth == pytest.approx(bits / 8)


@pytest.mark.parametrize("text", ["1GB", "1Gb", "1gb", "1gb/s", "1mb/s", "1GBPS", "1GBps", "1kB", "10", "10G", "1e9"])
def test_what_could_be_bits_or_bytes_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"such as 10Gbit/s, .*: in bits, or with a capital B in bytes"):
        require_rate("bandwidth", text)


@pytest.mark.parametrize(
    "text", ["", "fast", "mbit", "1 2mbit", "-1mbit", "0mbit", "1,5Gbit", "inf", "nan", "1Gbit/h", "1e400Gbit", "20ms"]
)
def test_what_is_no_rate_comes_with_examples(text: str) -> None:
    with pytest.raises(OptionError, match=r"such as 10Gbit/s, 500Mbps, 25GbE or 1\.25GB/s"):
        require_rate("bandwidth", text)


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), None, True, [1]])
def test_numbers_are_bytes_per_second(value: object) -> None:
    assert require_rate("bandwidth", 125_000_000) == 125e6
    with pytest.raises(OptionError, match="bytes per second, more than 0"):
        require_rate("bandwidth", value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("20ms", 0.02),
        ("0.5 ms", 5e-4),
        ("200us", 2e-4),
        ("50µs", 5e-5),
        ("2s", 2.0),
        ("0.5 S", 0.5),
        ("0s", 0.0),
        ("0", 0.0),
        ("5\u03bcs", 5e-6),
    ],
)
def test_times(text: str, seconds: float) -> None:
    assert require_duration("latency", text) == pytest.approx(seconds)
    assert LinkModel(workers=2, bandwidth=1.0, latency=text).latency == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "20", "20mbit", "-1ms", "5 minutes", "infs", "soon"])
def test_what_is_no_time_comes_with_examples(text: str) -> None:
    with pytest.raises(OptionError, match=r"latency must be a time with its unit, such as 20ms, 0\.5ms or 200us"):
        require_duration("latency", text)


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        ("25M", 25e6),
        ("350m params", 350e6),
        ("7B", 7e9),
        ("100MB", 25e6),
        ("1MiB", 2**18),
        ("12", None),
        ("7bi", None),
        ("vgg16", None),
    ],
)
def test_sizes_of_models(text: str, parameters: float | None) -> None:
    assert parameters_in(text) == parameters


def test_words() -> None:
    assert rate_in_words(62.5e6) == "500 Mbit/s"
    assert rate_in_words(1.25e9) == "10 Gbit/s"
    assert rate_in_words(1e3) == "8 kbit/s"
    assert duration_in_words(5e-6) == "5 µs"
    assert duration_in_words(0.02) == "20 ms"
