from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from lightning_bytescheduler.cli import main
from lightning_bytescheduler.simulation import network_profile
from lightning_bytescheduler.simulation.command import profile_of
from lightning_bytescheduler.simulation.picture import draw_prediction

LINK = ["--workers", "4", "--bandwidth", "33gbit"]


def rows(output: str) -> dict[str, list[str]]:
    found = {}
    for line in output.splitlines():
        label, _, value = line.strip("│ ").replace("│", "  ").partition("  ")
        found[label.strip()] = value.split()
    return found


@pytest.mark.parametrize("name", ["VGG16", "vgg-16", "ResNet-50"])
def test_networks_are_known_by_their_usual_names(name: str) -> None:
    assert profile_of(name).name == name.lower().replace("-", "")


def test_it_prints_a_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--profile", "vgg16", *LINK]) == 0
    output = capsys.readouterr().out
    found = rows(output)
    assert output.startswith("Use bytescheduler: 4 workers train 3.97x as fast as one")
    assert "vgg16, 4 workers, 33 Gbit/s each way" in output
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
    servers = ["--architecture", "ps", "--servers", "8"]
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
        (["--profile", "gpt2", *LINK], "did you mean transformer?"),
        (["--profile", "{file}/..", *LINK], "--profile='{file}/..'"),
        (["--profile", "vgg16", *LINK, "--algorithm", "rings"], "did you mean ring?"),
        (["--profile", "resnet5", *LINK], "vgg16, resnet50, transformer, uniform"),
        (["--profile", "resnet5", *LINK], "did you mean resnet50?"),
        (["--profile", "vgg16", "--workers", "4", "--bandwith", "1gbit"], "did you mean --bandwidth?"),
        (["--profile", "vgg16", *LINK, "--latncy", "1ms"], "did you mean --latency?"),
        (["--profile", "vgg16", "--workers", "four", "--bandwidth", "1gbit"], "'four' is not a whole number"),
        (["--profile", "vgg16", "--workers", "4", "--bandwidth", "1GB"], "is it in bits or in bytes a second?"),
        (["--profile", "{file}", *LINK], "profile='{file}' is not allowed: profile must be a JSON file"),
        (["--profile", "vgg16", "--workers", "0", "--bandwidth", "1gbit"], "workers=0"),
        (["--profile", "vgg16", "--workers", "4", "--bandwidth", "0mbit"], "--bandwidth='0mbit' is not allowed"),
        (
            ["--profile", "vgg16", "--workers", "4", "--bandwidth", "500"],
            "--bandwidth='500' is not allowed: --bandwidth must be a rate with its unit, such as 500Gbit/s",
        ),
        (
            ["--profile", "vgg16", *LINK, "--latency", "20"],
            "--latency='20' is not allowed: --latency must be a time with its unit, such as 20ms",
        ),
        (["--profile", "vgg16", *LINK, "--latency", "20mbit"], "--latency='20mbit'"),
        (["--profile", "vgg16", *LINK, "--compute", "0s"], "--compute='0s'"),
        (["--profile", "vgg16", *LINK, "--messages", "0"], "--messages=0"),
        (["--profile", "vgg16", *LINK, "--servers", "1"], "0 unless architecture is 'ps'"),
        (["--profile", "vgg16", *LINK, "--algorithm", "push_pull"], "Servers are an architecture: architecture='ps'"),
        (["--profile", "vgg16", *LINK, "--architecture", "push_pull"], "It is called 'ps'."),
        (["--profile", "vgg16", *LINK, "--policy", "fifi"], "Did you mean 'fifo'?"),
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
    "rate", ["10gbit", "10Gbps", "10Gbit/s", "10 Gbit", "10GbE", "10G", "1.25GB/s", "10000Mbps", "1e10"]
)
def test_rates_are_written_in_many_ways(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--profile", "25M", "--workers", "4", "--bandwidth", rate]) == 0
    assert "25M, 4 workers, 10 Gbit/s each way" in " ".join(capsys.readouterr().out.split())


def test_the_answer_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(workers: int, rate: str) -> str:
        assert main(["predict", "--profile", "100MB", "--workers", str(workers), "--bandwidth", rate]) == 0
        return capsys.readouterr().out.splitlines()[0]

    assert answer(4, "10Mbit").startswith("Train on one machine: over this network 4 workers are slower")
    assert answer(4, "6Gbit").startswith("Use bytescheduler: 4 workers train 3.")
    assert answer(4, "1000Gbit").startswith("Use ddp: 4 workers train 4.00x as fast as one")
    assert answer(1, "1Gbit").startswith("One worker has nobody to talk to")
