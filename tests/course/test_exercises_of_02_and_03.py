"""The checks of notebooks 02 and 03: right answers pass, and each mistake is named."""

from math import log

import pytest

from labkit_course.checks import fewer_bits, what_to_lose


def hold(weights, bits, top=None, reach=None, whole=round):
    reach = max(map(abs, weights)) if reach is None else reach(weights)
    top = top(bits) if top else (1 << (bits - 1)) - 1
    return [whole(w / reach * top) * reach / top if reach else 0.0 for w in weights]


def kl(p, q):
    return sum(a * (log(a) - log(b)) for a, b in zip(p, q) if a > 0)


def compensate(w, H):
    return w[1] - (round(w[0]) - w[0]) * H[0][1] / H[1][1]


def test_right_answers_pass():
    assert fewer_bits.check_bits_all_in(4.15625) and fewer_bits.check_bits_all_in(4 + 20 / 128)
    assert fewer_bits.check_round_trip(hold)
    assert fewer_bits.check_most_speedup(2.695) and fewer_bits.check_where_it_stops(50, 200)
    assert (
        what_to_lose.check_kl(kl)
        and what_to_lose.check_rule_of_four(0.015)
        and what_to_lose.check_compensate(compensate)
    )
    assert what_to_lose.check_spend({"attention": 4, "gate_up": 3, "down": 8})


def unguarded(weights, bits):
    scale = max(abs(w) for w in weights) / (2 ** (bits - 1) - 1)
    return [round(w / scale) * scale for w in weights]


@pytest.mark.parametrize(
    ("check", "answer", "named"),
    [
        (fewer_bits.check_bits_all_in, 4.125, "zero point is missing"),
        (fewer_bits.check_bits_all_in, 4.25, "16 bits"),
        (fewer_bits.check_bits_all_in, 4, "codes alone"),
        (fewer_bits.check_bits_all_in, 24, "divide them"),
        (fewer_bits.check_bits_all_in, 5.5, "over the 128"),
        (fewer_bits.check_round_trip, unguarded, "zeros"),
        (
            fewer_bits.check_round_trip,
            lambda w, b: hold(w, b, top=lambda b: 1 << (b - 1)),
            "signed bits",
        ),
        (fewer_bits.check_round_trip, lambda w, b: hold(w, b, whole=int), "fraction"),
        (fewer_bits.check_round_trip, lambda w, b: hold(w, b, reach=max), "abs before max"),
        (fewer_bits.check_round_trip, lambda w, b: w, "Nothing was rounded"),
        (fewer_bits.check_round_trip, lambda w, b: w[:1], "came out"),
        (fewer_bits.check_most_speedup, 16 / 4.5, "all weights"),
        (fewer_bits.check_most_speedup, 4, "Four times"),
        (fewer_bits.check_most_speedup, 1 / 2.695, "That is the inverse"),
        (fewer_bits.check_where_it_stops, (200, 200), "First number"),
        (fewer_bits.check_where_it_stops, (50, 50), "Second number"),
        (what_to_lose.check_kl, lambda p, q: kl(q, p), "other direction"),
        (what_to_lose.check_kl, lambda p, q: kl(p, q) / log(2), "bits"),
        (
            what_to_lose.check_kl,
            lambda p, q: sum(a * (log(a) - log(b)) for a, b in zip(p, q)),
            "adds nothing",
        ),
        (what_to_lose.check_kl, lambda p, q: -kl(p, q), "sign"),
        (what_to_lose.check_rule_of_four, 0.06, "add two"),
        (what_to_lose.check_rule_of_four, 3.84, "wrong direction"),
        (what_to_lose.check_compensate, lambda w, H: w[1], "did not change the second"),
        (what_to_lose.check_compensate, lambda w, H: 2 * w[1] - compensate(w, H), "sign"),
        (
            what_to_lose.check_compensate,
            lambda w, H: w[1] - (round(w[0]) - w[0]) * H[0][1] / H[0][0],
            "H[1][1]",
        ),
        (what_to_lose.check_spend, {"attention": 4, "gate_up": 4, "down": 4}, "Find the part"),
        (what_to_lose.check_spend, {"attention": 3, "gate_up": 4, "down": 8}, "possible"),
        (what_to_lose.check_spend, {"attention": 8, "gate_up": 4, "down": 8}, "at most 15"),
        (what_to_lose.check_spend, {"attention": 5, "gate_up": 4, "down": 4}, "3, 4 or 8 bits"),
        (what_to_lose.check_spend, 15, "dictionary"),
    ],
)
def test_each_mistake_is_named(check, answer, named, capsys):
    assert not (check(*answer) if isinstance(answer, tuple) else check(answer))
    assert named in capsys.readouterr().out
