"""The checks of notebook 00: right answers pass, also rounded ones, and each mistake is named."""

import pytest

from labkit_course.checks.where_time_goes import (
    check_decode_limit,
    check_first_token,
    check_price,
    check_ridge_batch,
)


def price(price_per_hour, batch, tpot_s):
    return price_per_hour / 3600 * tpot_s / batch * 1e6


def test_right_answers_pass():
    assert check_decode_limit(18.75) and check_decode_limit(300 / 16)
    assert check_first_token(16e12 / 60e12) and check_first_token(0.267)
    assert check_ridge_batch(200)
    assert check_price(price)


@pytest.mark.parametrize(
    ("check", "answer", "named"),
    [
        (check_decode_limit, 16 / 300, "seconds per token"),
        (check_decode_limit, 37.5, "one byte"),
        (check_decode_limit, 9.375, "4 bytes"),
        (check_decode_limit, 3750, "limit of the arithmetic"),
        (check_decode_limit, 17.46, "GiB"),
        (check_decode_limit, 5, "divide bandwidth by the bytes"),
        (check_first_token, 0.133, "multiplication and an addition"),
        (check_first_token, 0.000267, "one token"),
        (check_first_token, 0.0533, "read the weights once"),
        (check_first_token, 53.3, "again for each token"),
        (check_first_token, 267, "milliseconds"),
        (check_first_token, 3.75, "prefills per second"),
        (check_ridge_batch, 0.005, "That is the inverse"),
        (check_ridge_batch, 400, "Factor two"),
        (check_ridge_batch, 100, "Factor two"),
        (check_ridge_batch, 0.2, "powers of ten"),
        (check_price, lambda p, b, t: price(p, 1, t), "batch is missing"),
        (check_price, lambda p, b, t: price(p, 1, t) * b, "multiplied by the batch"),
        (check_price, lambda p, b, t: price(p, b, t) * 3600, "per hour"),
        (check_price, lambda p, b, t: price(p, b, t) * 60, "not 60"),
        (check_price, lambda p, b, t: price(p, b, t) / 1e6, "one token"),
        (check_price, lambda p, b, t: p / 3600 / t * b * 1e6, "do not divide"),
    ],
)
def test_each_mistake_is_named(check, answer, named, capsys):
    assert not check(answer)
    assert named in capsys.readouterr().out
