"""Every kind of source becomes slices, and slices become the samples of the files."""

from __future__ import annotations

import gzip
import os
import pickle
import zipfile
from functools import partial

import fsspec
import numpy as np
import pytest

from lightning_bytescheduler.exceptions import OptionError, SliceCorruptError
from lightning_bytescheduler.slices.fetch import fetch_chunks
from lightning_bytescheduler.slices.source import open_source
from tests.slices.faults import Store

TEXT = [f"line {number}" for number in range(1000)]


def all_samples(source):
    with Store(source) as store:
        return [sample for slice_ in source.slices for sample in store.samples(slice_)]


def test_a_file_that_changes_between_epochs_is_verified_again(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\n".join(TEXT))
    source = open_source(str(path))
    with Store(source) as store:
        for _ in range(2):
            assert list(store.samples(source.slices[0])) == TEXT
        path.write_text("\n".join(TEXT).replace("line 7\n", "line 8\n"))
        os.utime(path, (1, 1))
        with pytest.raises(SliceCorruptError, match="another checksum"):
            list(store.samples(source.slices[0]))


@pytest.mark.parametrize("rows", [9, 9.5, 11])
def test_an_array_of_another_length_than_its_header_says_is_named(tmp_path, rows):
    np.save(tmp_path / "a.npy", np.zeros((12, 10)))
    content = (tmp_path / "a.npy").read_bytes().replace(b"(12, 10)", b"(10, 10)")
    (tmp_path / "a.npy").write_bytes(content[: 128 + int(80 * rows)])
    with pytest.raises(SliceCorruptError, match="10 rows of 80 bytes"):
        open_source(str(tmp_path / "a.npy"))


def test_globs_folders_and_chains(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("x/1.txt", "one\n")
        archive.writestr("x/2.txt", "two\n")
        archive.writestr("y.csv", "no")
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/glob/a.jsonl.gz", gzip.compress(b'{"a": 1}\n[]\n'))
    memory.pipe_file("/glob/b.jsonl", b"")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".hidden").write_text("no")
    (tmp_path / "folder" / "b.txt").write_text("b\n")
    (tmp_path / "folder" / "a.txt").write_text("a\n")
    assert all_samples(open_source(f"zip://x/*.txt::{tmp_path}/a.zip")) == ["one", "two"]
    assert all_samples(open_source("memory://glob/*")) == [{"a": 1}, []]
    assert all_samples(open_source(str(tmp_path / "folder"))) == ["a", "b"]
    both = [str(tmp_path / "folder" / "b.txt"), str(tmp_path / "folder" / "*.txt")]
    assert all_samples(open_source(both)) == ["b", "a"]
    source = open_source(both)
    assert len({slice_.key for slice_ in source.slices}) == 2
    assert all_samples(pickle.loads(pickle.dumps(source))) == ["b", "a"]


def test_misuse(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "a.tfrecord").write_text("a")
    for urls, reason in (
        (str(tmp_path / "missing.txt"), "a file, a folder"),
        (str(tmp_path / "*.none"), "a file, a folder"),
        (str(tmp_path / "empty.txt"), "at least one sample"),
        (str(tmp_path / "a.tfrecord"), "a reader for its format"),
        ([], "a URL"),
    ):
        with pytest.raises(OptionError, match=reason):
            open_source(urls)


def read_fields(stream):
    yield from stream.read().decode().split(",")


def test_a_reader_of_ones_own(tmp_path):
    (tmp_path / "a.fields").write_text("a,b,c")
    source = open_source(str(tmp_path / "*.fields"), reader=read_fields)
    assert source.slices[0].samples == 3
    assert all_samples(source) == ["a", "b", "c"]


def test_more_or_fewer_samples_than_counted_is_corrupt():
    fsspec.filesystem("memory").pipe_file("/count/a.txt", b"1\n2\n3\n")
    source = open_source("memory://count/a.txt")
    from dataclasses import replace

    for wrong, reason in ((2, "more than the 2"), (4, "holds 3 samples, where 4")):
        slice_ = replace(source.slices[0], samples=wrong)
        chunks = fetch_chunks(slice_, partial(source.read, slice_))
        with pytest.raises(SliceCorruptError, match=reason):
            list(source.open(slice_, partial(iter, chunks)).take(0, wrong))


def test_malformed_data_names_the_slice_and_the_sample():
    fsspec.filesystem("memory").pipe_file("/bad/a.jsonl", b"1\n2\n{no\n")
    source = open_source("memory://bad/a.jsonl")
    with pytest.raises(SliceCorruptError, match=r"a\.jsonl.*after sample 2"):
        all_samples(source)
