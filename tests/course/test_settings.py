"""Settings are predicted before they run, run in turns, and give both times with their spread."""

import pytest

from labkit.errors import BadRequest
from labkit.lab.measure.clock import Timing
from labkit.lab.plan.memory import resolve
from labkit.lab.plan.operator_times import Curve, OperatorTimes, Prediction
from labkit.model.tiny import tiny_model
from labkit_course.experiments.serving_grid import Served, Setting, serve

FLAT = Curve(((1, 1e-6),))
TIMES = OperatorTimes(FLAT, FLAT, FLAT, {1: FLAT, 16: FLAT}, FLAT, FLAT)


def test_each_setting_has_as_many_times_as_rounds_and_its_own_prediction():
    model = tiny_model(seed=0)
    settings = [Setting(1, 4), Setting(3, 9)]
    served = serve(model, resolve(model.config), TIMES, settings, new_tokens=4, repeats=2)
    assert [one.setting for one in served] == settings
    assert all(len(one.ttft.times_s) == len(one.tpot.times_s) == 2 for one in served)
    assert served[1].predicted.ttft_s > served[0].predicted.ttft_s  # 27 rows against 4
    assert all(one.ttft.median_s > 0 and one.tpot.median_s > 0 for one in served)


def test_a_request_is_its_first_token_and_the_steps_after_it():
    one = Served(Setting(1, 4), Timing((2.0,)), Timing((0.5,)), Prediction(1.0, 0.25, {}))
    assert one.request_s(5) == 4.0
    assert one.predicted_request_s(5) == 2.0


def test_one_token_has_no_time_per_output_token():
    model = tiny_model(seed=0)
    with pytest.raises(BadRequest, match="at least 2"):
        serve(model, resolve(model.config), TIMES, [Setting(1, 4)], new_tokens=1)
