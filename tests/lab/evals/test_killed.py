"""A killed `labkit eval` changes no record, alone or with a second process on the same file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from labkit.lab.evals.report import compare
from labkit.lab.evals.task import Metric, read_scores
from labkit.lab.measure.record import read_records

COMMAND = """
import sys, time
sys.path.insert(0, {here!r})
import fakes
import labkit.lab.stack.open
from labkit.lab.cli import answer, main
labkit.lab.stack.open.load_model = lambda name, **_: fakes.byte_model_of(name=name)
answer.Steps.__call__ = lambda self, text: time.sleep(0.03)  # after each item, so that there is a middle on a fast machine
sys.exit(main(sys.argv[1:]))
"""


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="kills as POSIX does")
def test_killed_and_concurrent_runs_write_the_records_of_one_run(tmp_path):
    prompts, whole, killed = (
        tmp_path / "mine.jsonl",
        tmp_path / "whole.jsonl",
        tmp_path / "killed.jsonl",
    )
    asked = [
        {"prompt": f"Number {i}?" * (1 + i % 5), "reference": f"it is {i}", "wrong": f"not {i + 1}"}
        for i in range(40)
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in asked))
    code = COMMAND.format(here=str(Path(__file__).parents[2]))
    options = [
        "eval",
        str(prompts),
        "--dtype",
        "fp32",
        "--max-new-tokens",
        "8",
        "--threads",
        "1",
        "--json",
    ]

    def begin(out: Path) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-c", code, *options, "--out", str(out)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def kill_at(count: int, run: subprocess.Popen) -> None:
        until = time.monotonic() + 60
        while lines(killed) < count and run.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
        assert run.poll() is None, "it had ended before it could be killed"
        run.kill()
        run.communicate()

    expected = begin(whole)
    kill_at(3, begin(killed))
    held = lines(killed)
    assert 3 <= held < 40
    first, second = begin(killed), begin(killed)
    kill_at(held + 8, first)
    kill_at(held + 12, second)
    assert lines(killed) < 80
    first, second = begin(killed), begin(killed)  # and both to the end
    answers = [
        json.loads(run.communicate(timeout=60)[0].splitlines()[-1])["results"]
        for run in (expected, first, second)
    ]
    assert answers[0] == answers[1] == answers[2]
    plain = {record.item: replace(record, date="") for record in read_records(whole)}
    assert len(plain) == 40 and all(
        plain[record.item] == replace(record, date="") for record in read_records(killed)
    )
    assert {record.item for record in read_records(killed)} == set(plain)
    metrics = (Metric("bits_per_byte"), Metric("right", share=True))
    for row in compare(metrics, "mine", read_scores(whole, "mine"), read_scores(killed, "mine")):
        assert (row["n"], row["ties"], row["difference"]) == (40, 40, 0)
