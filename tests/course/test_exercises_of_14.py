"""The checks of notebook 14: right answers pass, and each mistake is named."""

import pytest

from labkit_course.checks import last_mile as ex
from labkit_course.checks.last_mile import _codes, _line


def by_column(codes, i):
    return [
        codes[row][4 * i + c] | codes[row][16 + 4 * i + c] << 4
        for c in range(4)
        for row in range(16)
    ]


def neighbours(codes, i):
    return [
        codes[row][8 * i + 2 * c] | codes[row][8 * i + 2 * c + 1] << 4
        for row in range(16)
        for c in range(4)
    ]


def test_right_answers_pass():
    assert (
        ex.check_memory_limit(34.1333)
        and ex.check_packed_line(_line)
        and ex.check_part_for_free(1.43)
    )


@pytest.mark.parametrize(
    ("check", "answer", "named"),
    [
        (ex.check_memory_limit, 42.667, "scale and the minimum"),
        (ex.check_memory_limit, 4.2667, "5/8"),
        (ex.check_memory_limit, 0.0292969, "give the inverse"),
        (ex.check_packed_line, by_column, "column by column"),
        (ex.check_packed_line, neighbours, "neighbours"),
        (
            ex.check_packed_line,
            lambda codes, i: [b >> 4 | (b & 15) << 4 for b in _line(codes, i)],
            "swapped",
        ),
        (ex.check_packed_line, lambda codes, i: _line(codes, i)[:32], "64 bytes"),
        (ex.check_packed_line, lambda codes, i: _line(codes, 0), "should be"),
        (ex.check_part_for_free, 2.5, "Only half"),
        (ex.check_part_for_free, 2, "limit"),
    ],
)
def test_mistakes_are_named(capsys, check, answer, named):
    assert not check(answer)
    assert named in capsys.readouterr().out


def test_placeholders_are_not_mistakes():
    for check in (ex.check_memory_limit, ex.check_packed_line, ex.check_part_for_free):
        assert check(...).state == "not attempted"


def test_a_line_is_what_the_kernel_reads():
    import torch

    from labkit.formats import round_to_nearest
    from labkit.kernels.native.packed import NativePack

    codes = _codes(5)
    for row in codes:
        row[0], row[1] = 0, 15  # the whole range, so that each code is its number
    held = round_to_nearest(torch.tensor(codes).float(), "int4_g32_min")
    assert NativePack(held).blocks[64 + 128 : 64 + 192].tolist() == _line(codes, 2)
