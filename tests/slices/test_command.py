from __future__ import annotations

import gzip

import numpy as np
import pytest

from lightning_bytescheduler.__main__ import main
from lightning_bytescheduler.slices.source import open_source
from tests.slices.faults import Store


def samples(folder):
    source = open_source(str(folder))
    with Store(source) as store:
        return [sample for slice_ in source.slices for sample in store.samples(slice_)]


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line {number}\n" for number in range(1000)))
    return tmp_path / "a.txt"


def test_make_and_verify(text, tmp_path, capsys):
    assert main(["slices", "make", str(text), str(tmp_path / "out"), "--slice-size", "2kB"]) == 0
    assert "slices, 1000 samples" in capsys.readouterr().out
    assert samples(tmp_path / "out") == text.read_text().splitlines()
    assert main(["slices", "verify", str(tmp_path / "out")]) == 0
    assert main(["slices", "verify", str(tmp_path / "out" / "slices.index")]) == 0
    assert "0 are not" in capsys.readouterr().out


def test_verify_names_what_is_wrong(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lightning_bytescheduler.slices.fetch._FIRST_DELAY", 0.001)
    out = tmp_path / "out"
    main(["slices", "make", str(text), str(out), "--slice-size", "2kB"])
    flipped = bytearray((out / "slice-000001.txt").read_bytes())
    flipped[7] ^= 1
    (out / "slice-000001.txt").write_bytes(flipped)
    (out / "slice-000002.txt").write_bytes((out / "slice-000002.txt").read_bytes()[:-1])
    capsys.readouterr()
    assert main(["slices", "verify", str(out)]) == 1
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith("slice-000001.txt: ")
    assert "another checksum" in first
    assert second.startswith("slice-000002.txt: ")
    assert "2 are not" in last


def test_every_format_can_be_cut(tmp_path):
    rows = np.arange(300, dtype=np.float32).reshape(100, 3)
    np.save(tmp_path / "a.npy", rows)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"[1]\n" * 100))
    assert (
        main(["slices", "make", f"{tmp_path}/a.npy", f"{tmp_path}/b.*", f"{tmp_path}/out", "--slice-size", "200"]) == 0
    )
    found = samples(tmp_path / "out")
    np.testing.assert_array_equal(np.stack(found[:100]), rows)
    assert found[100:] == [[1]] * 100
    assert len(list((tmp_path / "out").glob("*.npy"))) >= 6


def test_parquet_is_cut(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"a": list(range(1000))}), tmp_path / "a.parquet")
    assert main(["slices", "make", f"{tmp_path}/a.parquet", f"{tmp_path}/out", "--slice-size", "3kB"]) == 0
    assert samples(tmp_path / "out") == [{"a": number} for number in range(1000)]


def test_a_folder_of_slices_is_not_overwritten_by_accident(text, tmp_path, capsys):
    make = ["slices", "make", str(text), str(tmp_path / "out")]
    assert main(make) == 0
    assert main(make) == 2
    assert "overwritten" in capsys.readouterr().err
    text.write_text("new\n")
    assert main([*make, "--overwrite"]) == 0
    assert samples(tmp_path / "out") == ["new"]


def test_without_a_terminal_there_is_no_bar(text, tmp_path, capsys):
    assert main(["slices", "make", str(text), str(tmp_path / "out")]) == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "ACTION"),
        (["make", "{text}", "{out}", "--slice-size", "big"], "64MiB"),
        (["make", "{text}.missing", "{out}"], "a file, a folder"),
        (["make", "{text}", "{out}", "--storage-options", "[]"], "JSON object"),
        (["verify", "{text}.missing"], "a file, a folder"),
        (["serve", "{out}"], "a folder that exists"),
        (["serve", "{out}", "--bind", "8000"], "127.0.0.1:8000"),
    ],
)
def test_misuse_is_one_line(text, tmp_path, capsys, argv, reason):
    names = {"text": text, "out": tmp_path / "out"}
    assert main(["slices", *(argument.format(**names) for argument in argv)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line


@pytest.mark.parametrize(("text", "size"), [("500", 500), ("2kB", 2000), ("1.5MiB", 1572864), ("1G", 10**9)])
def test_sizes(text, size):
    from lightning_bytescheduler.slices.command import _bytes

    assert _bytes(text) == size
