"""A killed run loses at most one record and continues after the last complete one."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from labkit.errors import BadRequest
from labkit.lab.measure.record import Record, RecordWriter, read_records


def test_a_record_comes_back_as_it_was_written(tmp_path):
    record = Record(
        "decode.tpot",
        0.021,
        "s",
        n=5,
        low=0.02,
        high=0.022,
        seed=0,
        model="m",
        revision="r",
        dtype="float32",
        device="cpu",
        threads=2,
        item="fp32",
    )
    with RecordWriter(tmp_path / "runs" / "a.jsonl") as writer:
        writer.write(record)
    assert read_records(tmp_path / "runs" / "a.jsonl") == [record]
    assert record.machine["cores"] >= 1 and record.versions["python"] and record.date


def test_an_incomplete_last_line_is_removed_and_the_run_continues(tmp_path):
    path = tmp_path / "a.jsonl"
    with RecordWriter(path) as writer:
        for item in "ab":
            writer.write(Record("score", 1, "items", item=item))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"what": "score", "val')
    assert [record.item for record in read_records(path)] == ["a", "b"]
    with RecordWriter(path) as writer:
        assert path.read_bytes() == whole
        assert (
            writer.done("score", "a")
            and writer.done("score", "b")
            and not writer.done("score", "c")
        )
        writer.write(Record("score", 0, "items", item="c"))
        assert writer.done("score", "c")
    assert [record.item for record in read_records(path)] == ["a", "b", "c"]


def test_a_last_line_without_its_newline_does_not_count(tmp_path):
    path = tmp_path / "a.jsonl"
    with RecordWriter(path) as writer:
        writer.write(Record("score", 1, "items", item="a"))
    path.write_bytes(path.read_bytes()[:-1])
    with RecordWriter(path) as writer:
        assert not writer.done("score", "a")


def test_a_line_that_is_not_a_record_raises_with_its_number(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"{broken\n")
    with pytest.raises(BadRequest, match="Line 1"):
        read_records(path)


def test_nan_raises_because_json_has_none(tmp_path):
    with RecordWriter(tmp_path / "a.jsonl") as writer, pytest.raises(ValueError):
        writer.write(Record("score", float("nan"), "nats"))


@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_a_killed_run_loses_at_most_one_record(tmp_path):
    path = tmp_path / "a.jsonl"
    program = textwrap.dedent(f"""
        from labkit.lab.measure.record import Record, RecordWriter
        with RecordWriter({str(path)!r}) as writer:
            for i in range(100000):
                writer.write(Record("score", i, "items", item=str(i), notes="x" * 2000))
                print(i, flush=True)
    """)
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    for _ in range(5):
        child.stdout.readline()
    time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    printed = [int(line) for line in child.stdout.read().split()]
    child.wait()
    with RecordWriter(path) as writer:
        assert all(writer.done("score", str(i)) for i in range(max(printed, default=4) + 1))
    values = [record.value for record in read_records(path)]
    assert values == list(range(len(values)))
