"""The closing table and the result file say the same."""

import pytest

from labkit.errors import BadRequest
from labkit.lab.measure.clock import Ratio, Timing
from labkit.lab.measure.record import RecordWriter, read_records
from labkit_course.show.closing import Closing


@pytest.fixture
def closing():
    closing = Closing("tiny", "r1", "float32", "cpu", 2)
    closing.add("cache", "B", 11_796_480, 11_796_480)
    closing.add("step", "s", 0.02, Timing((0.03, 0.02, 0.025)))
    closing.add("times faster", "x", 4.0, Ratio(3.5, 3.0, 4.5, 0.95), n=3)
    closing.add("bandwidth", "GB/s", None, 12.5)
    return closing


def test_the_table_shows_exact_bytes_milliseconds_and_intervals(closing):
    frame = closing.table()
    assert frame.loc["cache", ["unit", "predicted", "measured"]].tolist() == [
        "B",
        "11,796,480",
        "11,796,480",
    ]
    assert frame.loc["step"].tolist() == ["ms", "20", "25", "20 – 30", "3"]
    assert frame.loc["times faster"].tolist() == ["x", "4", "3.5", "3 – 4.5", "3"]
    assert frame.loc["bandwidth"].tolist() == ["GB/s", "—", "12.5", "—", "1"]


def test_one_round_alone_has_no_interval():
    closing = Closing("tiny", "r1", "float32", "cpu", 2)
    closing.add("times faster", "x", None, Ratio(3.5, 3.5, 3.5, 0.95))
    assert (
        closing.table().loc["times faster", "interval"] == "—" and closing.records()[0].low is None
    )


def test_the_records_carry_the_same_in_base_units(closing, tmp_path):
    with RecordWriter(tmp_path / "results.jsonl") as writer:
        for record in closing.records():
            writer.write(record)
    step = read_records(tmp_path / "results.jsonl")[1]
    assert (step.value, step.low, step.high, step.unit, step.n) == (0.025, 0.02, 0.03, "s", 3)
    assert step.details == {"predicted": 0.02}
    assert (step.model, step.revision, step.dtype, step.device, step.threads) == (
        "tiny",
        "r1",
        "float32",
        "cpu",
        2,
    )


def test_a_name_is_given_once(closing):
    with pytest.raises(BadRequest, match="already"):
        closing.add("step", "s", 1.0, 1.0)
