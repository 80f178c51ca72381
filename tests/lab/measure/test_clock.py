"""Test timing with a fake clock: synchronization, warm-up, interleaving, paired ratios."""

import pytest

from labkit.errors import BadRequest
from labkit.lab.measure import clock


@pytest.fixture
def fake(monkeypatch):
    """A clock that moves only when work is done, and a device that works only while the caller waits."""

    class Fake:
        def __init__(self):
            self.now, self.queued, self.events = 0.0, 0.0, []

        def work(self, name, seconds):
            self.events.append(name)
            self.queued += seconds

        def synchronize(self, device="cpu"):
            self.now += self.queued
            self.queued = 0.0
            self.events.append("sync")

        def look(self):
            self.events.append("look")
            return self.now

    fake = Fake()
    monkeypatch.setattr(clock, "now", fake.look)
    monkeypatch.setattr(clock, "synchronize", fake.synchronize)
    return fake


def test_the_device_is_idle_before_the_clock_is_read(fake):
    assert clock.measure(lambda: fake.work("a", 2.0), repeats=3, warmup=0).times_s == (
        2.0,
        2.0,
        2.0,
    )
    looks = [i for i, event in enumerate(fake.events) if event == "look"]
    assert len(looks) == 6 and all(fake.events[i - 1] == "sync" for i in looks)


def test_work_queued_earlier_does_not_count(fake):
    fake.queued = 100.0
    assert clock.time_once(lambda: fake.work("a", 1.0)) == 1.0


def test_warm_up_calls_do_not_count(fake):
    lengths = iter([50.0, 40.0, 1.0, 1.0, 1.0])
    timing = clock.measure(lambda: fake.work("a", next(lengths)), repeats=3, warmup=2)
    assert timing.times_s == (1.0, 1.0, 1.0) and timing.median_s == 1.0


def test_each_round_starts_with_another_function(fake):
    clock.interleave(
        {name: (lambda name=name: fake.work(name, 1.0)) for name in "abc"}, repeats=3, warmup=0
    )
    assert [event for event in fake.events if event in "abc"] == list("abcbcacab")


def test_a_ratio_is_paired_by_round_so_that_a_slow_round_cancels(fake):
    pace = [1.0, 10.0, 2.0, 5.0, 1.0, 3.0]
    a, b = iter(pace), iter(pace)
    timings = clock.interleave(
        {"a": lambda: fake.work("a", next(a)), "b": lambda: fake.work("b", 2 * next(b))},
        repeats=6,
        warmup=0,
    )
    ratio = clock.ratio(timings["a"], timings["b"])
    assert (ratio.value, ratio.low, ratio.high) == (2.0, 2.0, 2.0)
    assert clock.ratio(timings["b"], timings["a"]).value == 0.5  # a slowdown is a ratio below 1


def test_a_ratio_of_timings_with_unequal_repeats_raises():
    with pytest.raises(BadRequest, match="1 and 2 repeats"):
        clock.ratio(clock.Timing((1.0,)), clock.Timing((1.0, 2.0)))


def test_zero_repeats_raise():
    with pytest.raises(BadRequest, match="repeats"):
        clock.measure(lambda: None, repeats=0)


@pytest.mark.parametrize(
    "n, low, high, coverage",
    [
        (1, 0, 0, 0.0),
        (5, 0, 4, 0.9375),
        (6, 0, 5, 0.96875),
        (9, 1, 7, 0.9609375),
        (20, 5, 14, 0.9586105346679688),
    ],
)
def test_order_statistics_have_the_binomial_coverage(n, low, high, coverage):
    assert clock.median_interval(reversed(range(n))) == (low, high, pytest.approx(coverage))


def test_the_interval_covers_as_often_as_it_says():
    import random

    source = random.Random(0)
    hits = sum(
        low <= 0 <= high
        for low, high, _ in (
            clock.median_interval([source.gauss(0, 1) for _ in range(9)]) for _ in range(4000)
        )
    )
    assert 0.95 < hits / 4000 < 0.972


def test_an_unknown_device_raises():
    with pytest.raises(BadRequest, match="cannot be timed"):
        clock.synchronize("tpu")
