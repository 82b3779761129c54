from __future__ import annotations

import argparse
import functools
import re
from pathlib import Path

import pytest

from lightning_bytescheduler.cli import main
from lightning_bytescheduler.simulation import network_profile
from lightning_bytescheduler.simulation.command import bits_per_second, seconds
from lightning_bytescheduler.simulation.picture import draw_prediction

LINK = ["--workers", "4", "--bandwidth", "33gbit"]


def rows(output: str) -> dict[str, list[str]]:
    found = {}
    for line in output.splitlines():
        label, _, value = line.strip("│ ").replace("│", "  ").partition("  ")
        found[label.strip()] = value.split()
    return found


def test_it_prints_a_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--profile", "vgg16", *LINK]) == 0
    output = capsys.readouterr().out
    found = rows(output)
    assert "vgg16" in output.splitlines()[0]
    assert found["gradients"] == ["553.4", "MB"]
    assert found["communication"][0] == "1.01"
    assert found["computation alone"][:2] == ["200.0", "ms"]
    assert found["ddp, best buckets"][2] == "1.00x"
    assert float(found["bytescheduler, best sizes"][2][:-1]) > 1.25
    assert {"best partition_size", "best credit", "best bucket_cap_mb", "ddp's best buckets"} <= found.keys()


def test_a_measured_profile_and_all_that_a_link_can_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "measured.json"
    network_profile("uniform").save(file)
    link = ["--workers", "8", "--bandwidth", "1gbit", "--latency", "50us", "--overhead", "0.1ms", "--messages", "2"]
    servers = ["--algorithm", "push_pull", "--spare-servers", "8"]
    assert main(["predict", "--profile", str(file), *link, *servers, "--compute", "1s"]) == 0
    found = rows(capsys.readouterr().out)
    assert found["computation alone"][:2] == ["1,000.0", "ms"]
    assert found["communication"][0] == "0.80"  # 100 MB over 1 Gbit/s, once each way
    assert "bytescheduler with norm clipping" not in found


def test_the_documentation_says_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "advise.md").read_text(encoding="utf-8")
    section = text.partition("## Predict a network")[2].partition("\n## ")[0]
    command, table, profile = re.findall(r"^```\w+\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    argv = command.split()[2:]
    assert main(argv[: argv.index("--png")]) == 0
    printed = rows(capsys.readouterr().out)
    claimed = rows(table)
    del claimed["..."]
    assert len(claimed) > 5
    assert claimed.items() <= printed.items()
    (tmp_path / "mine.json").write_text(profile)
    assert main(["predict", "--profile", str(tmp_path / "mine.json"), *LINK]) == 0


def test_it_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    command = "lightning_bytescheduler.simulation.command"
    few = functools.partial(draw_prediction, workers=(4,), bandwidths=(1e8, 1e9))  # to be quick
    monkeypatch.setattr(f"{command}.draw_prediction", few)
    assert main(["predict", "--profile", "uniform", *LINK, "--png", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_help_names_the_networks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["predict", "--help"])
    assert caught.value.code == 0
    assert "vgg16, resnet50, transformer, uniform" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "--profile"),
        (["--profile", "vgg16", "--workers", "4"], "--bandwidth"),
        (["--profile", "missing.json", *LINK], "missing.json"),
        (["--profile", "{file}", *LINK], "profile='{file}' is not allowed: profile must be a JSON file"),
        (["--profile", "vgg16", "--workers", "0", "--bandwidth", "1gbit"], "workers=0"),
        (["--profile", "vgg16", "--workers", "4", "--bandwidth", "0mbit"], "bandwidth=0.0"),
        (["--profile", "vgg16", "--workers", "4", "--bandwidth", "500"], "'500' is not a rate such as 500mbit"),
        (["--profile", "vgg16", *LINK, "--latency", "20"], "'20' is not a time such as 20ms"),
        (["--profile", "vgg16", *LINK, "--latency", "20mbit"], "'20mbit' is not a time"),
        (["--profile", "vgg16", *LINK, "--compute", "0s"], "compute_seconds=0.0"),
        (["--profile", "vgg16", *LINK, "--messages", "0"], "messages_in_flight=0"),
        (["--profile", "vgg16", *LINK, "--spare-servers", "1"], "0 unless algorithm is push_pull"),
        (["--profile", "vgg16", *LINK, "--algorithm", "tree"], "'tree'"),
        (["--profile", "uniform", *LINK, "--png", "{file}.xyz"], "{file}.xyz"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], reason: str
) -> None:
    file = tmp_path / "p.json"
    file.write_text("no JSON")
    assert main(["predict", *(argument.format(file=file) for argument in argv)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason.format(file=file) in line


@pytest.mark.parametrize(
    ("text", "rate"),
    [("500mbit", 500e6), ("10Gbit", 10e9), (" 1.5 kbit ", 1500.0), (".5tbit", 5e11), ("8bit", 8.0)],
)
def test_rates(text: str, rate: float) -> None:
    assert bits_per_second(text) == rate


@pytest.mark.parametrize(("text", "time"), [("20ms", 0.02), ("50us", 50e-6), ("2s", 2.0), ("0.5 S", 0.5), ("0s", 0.0)])
def test_times(text: str, time: float) -> None:
    assert seconds(text) == pytest.approx(time)


@pytest.mark.parametrize("text", ["", "mbit", "1 2mbit", "-1mbit", "1e3mbit", "1mbyte", "infbit", "5mbit/s"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a rate such as"):
        bits_per_second(text)
