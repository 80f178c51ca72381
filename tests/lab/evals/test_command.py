"""`labkit eval` with a tiny model: its keys, resuming, --against, and errors in one line."""

from __future__ import annotations

import json

import pytest

from labkit.lab.cli import main
from labkit.lab.evals.sandbox.isolation import SandboxUnavailable
from labkit.lab.measure.record import read_records

SHORT = ("--dtype", "fp32", "--max-new-tokens", "4")


@pytest.fixture
def tiny(monkeypatch, make_byte_model):
    import labkit.lab.stack.open

    monkeypatch.setattr(
        labkit.lab.stack.open, "load_model", lambda name="default", **_: make_byte_model(name=name)
    )


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "mine.jsonl"
    lines = [
        {
            "prompt": f"Number {i}?",
            "reference": f"it is {i}",
            "wrong": f"not {i + 1}",
            "slice": "ab"[i % 2],
        }
        for i in range(8)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def answered(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_there_is_one_row_per_task_slice_and_metric(tiny, prompts, capsys):
    assert (
        main(
            [
                "eval",
                "text",
                "structured",
                prompts,
                "--slices",
                "code,prose",
                "--limit",
                "3",
                "--json",
                *SHORT,
            ]
        )
        == 0
    )
    rows = answered(capsys)["results"]
    assert all({"task", "slice", "metric", "value", "low", "high", "n"} <= set(row) for row in rows)
    places = [(row["task"], row["slice"], row["metric"]) for row in rows]
    assert len(set(places)) == len(places) and {task for task, *_ in places} == {
        "text",
        "structured",
        "mine",
    }
    for task in ("text", "structured", "mine"):
        assert any((t, s) == (task, "all") for t, s, _ in places)
    assert {"bits_per_byte", "nats_per_token"} == {m for t, _, m in places if t == "text"}
    assert {s for t, s, _ in places if t == "mine"} == {"a", "b", "all"}


def test_a_recipe_is_compared_with_the_unchanged_model(tiny, capsys):
    assert (
        main(
            [
                "eval",
                "text",
                "--slices",
                "code",
                "--recipe",
                "int4_g32_zp",
                "--limit",
                "200",
                "--json",
            ]
        )
        == 0
    )
    result = answered(capsys)
    value = {row["metric"]: row["value"] for row in result["results"] if row["slice"] == "all"}
    assert value["kl"] > 0 and 0 < value["top1"] < 1 and result["recipe"] == "int4_g32_zp"
    assert (
        main(
            ["eval", "text", "--slices", "code", "--kv-format", "int4", "--limit", "700", "--json"]
        )
        == 0
    )
    result = answered(capsys)
    assert {row["metric"]: row["value"] for row in result["results"]}["kl"] > 0 and result[
        "kv_format"
    ] == "int4_kivi"


def test_a_quantized_file_is_scored_in_either_arithmetic(
    make_byte_model, prompts, monkeypatch, capsys
):
    import labkit.lab.stack.open
    from labkit.quant import quantize_model

    def small(name="default", **_):
        model = make_byte_model(name=name)
        quantize_model(model, "int8")
        return model

    monkeypatch.setattr(labkit.lab.stack.open, "load_model", small)
    for dtype in ("fp32", "bf16"):
        assert (
            main(
                [
                    "eval",
                    prompts,
                    "--model",
                    "small",
                    "--dtype",
                    dtype,
                    "--max-new-tokens",
                    "4",
                    "--json",
                ]
            )
            == 0
        )
        assert answered(capsys)["results"]


def test_items_are_read_and_written_through_a_kv_format(tiny, prompts, capsys):
    bits = {}
    for kv_format in (None, "int8", "int4"):
        options = ["--kv-format", kv_format] if kv_format else []
        assert (
            main(
                [
                    "eval",
                    "mmlu",
                    prompts,
                    "--limit",
                    "2",
                    "--scoring",
                    "text,generated",
                    "--json",
                    *SHORT,
                    *options,
                ]
            )
            == 0
        )
        result = answered(capsys)
        rows = {
            (row["task"], row["metric"]): row for row in result["results"] if row["slice"] == "all"
        }
        assert all((row["errors"], row["n"]) == (0, 2) for row in rows.values())
        assert {"text_margin", "generated_right"} <= {m for t, m in rows if t == "mmlu"} and (
            "mine",
            "right",
        ) in rows
        bits[kv_format] = [rows[task, "bits_per_byte"]["value"] for task in ("mmlu", "mine")]
    assert result["kv_format"] == "int4_kivi"
    for exact, eight, four in zip(bits[None], bits["int8"], bits["int4"]):
        assert eight == pytest.approx(exact, rel=0.01) and four == pytest.approx(exact, rel=0.1)
    exact, eight, four = (
        bits[kv_format][0] for kv_format in bits
    )  # MMLU's prompts are longer than the tail kept as it is
    assert 1e-6 < abs(eight - exact) < abs(four - exact), bits


def test_a_run_is_stored_resumed_and_compared(tiny, prompts, tmp_path, capsys):
    before, after = str(tmp_path / "before.jsonl"), str(tmp_path / "after.jsonl")
    command = ["eval", prompts, *SHORT, "--json"]
    assert main([*command, "--out", before]) == 0
    first = answered(capsys)["results"]
    lines = open(before).read().splitlines(keepends=True)
    open(before, "w").write("".join(lines[:3]) + lines[3][:50])
    assert main([*command, "--out", before]) == 0
    assert answered(capsys)["results"] == first and len(read_records(before)) == 8
    assert main([*command, "--recipe", "int2_g32_zp", "--against", before, "--out", after]) == 0
    result = answered(capsys)
    rows = {(row["slice"], row["metric"]): row for row in result["comparisons"]}
    assert (
        rows["all", "bits_per_byte"]["n"] == 8 and rows["all", "bits_per_byte"]["difference"] != 0
    )
    assert all(
        row["verdict"].split()[0] in ("worse", "better", "not", "at") for row in rows.values()
    )
    hits = {s.item: s.details["metrics"]["prefers"][0] for s in read_records(before)}
    now = {s.item: s.details["metrics"]["prefers"][0] for s in read_records(after)}
    flips = {one["item"] for one in result["flipped"] if one["metric"] == "prefers"}
    assert flips == {item for item in hits if hits[item] != now[item]}
    assert main([*command[:-1], "--against", before]) == 0
    assert "not decidable with n = 8" in capsys.readouterr().out


def test_a_verdict_does_not_change_the_exit_status(tiny, prompts, tmp_path, capsys):
    before, lines = tmp_path / "before.jsonl", []
    assert main(["eval", prompts, *SHORT, "--json", "--out", str(before)]) == 0
    for line in before.read_text().splitlines():  # an earlier run that was surer of every item
        record = json.loads(line)
        record["details"]["metrics"]["bits_per_byte"][0] /= 2
        lines.append(json.dumps(record) + "\n")
    before.write_text("".join(lines))
    capsys.readouterr()
    assert main(["eval", prompts, *SHORT, "--json", "--against", str(before)]) == 0
    rows = {
        (row["slice"], row["metric"]): row["verdict"] for row in answered(capsys)["comparisons"]
    }
    assert rows["all", "bits_per_byte"] == "worse"
    assert main(["eval", "--help"]) == 0 and "also if a score fell" in " ".join(
        capsys.readouterr().out.split()
    )


def test_humaneval_uses_the_mode_chat_for_a_chat_model_by_default(
    tiny, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("labkit.lab.evals.humaneval.best_isolation", _no_isolation)
    for options, mode in (((), "chat"), (("--mode", "plain"), "plain")):
        out = str(tmp_path / f"{mode}.jsonl")
        assert (
            main(["eval", "humaneval", "--limit", "1", "--out", out, "--json", *SHORT, *options])
            == 0
        )
        assert "because of this test" in answered(capsys)["notes"]["humaneval"][0]
        (record,) = read_records(out)
        assert record.details["settings"]["mode"] == mode


def _no_isolation():
    raise SandboxUnavailable("Generated code is not run here, because of this test.")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no_such_task"], ["'no_such_task'", "humaneval", ".jsonl"]),
        (["no_such.jsonl"], ["no_such.jsonl"]),
        (["mmlu", "--shots", "5"], ["--shots is '5'"]),
        (["mmlu", "--scoring", "words"], ["'words'", "letter"]),
        (["mmlu", "--languages", "en,xx"], ["'xx'", "th"]),
        (["text", "--slices", "verse"], ["'verse'", "code"]),
        (["humaneval", "--mode", "loud"], ["'loud'", "chat"]),
        (["text", "--dtype", "int3"], ["'int3'", "bf16"]),
        (["mmlu", "--peer", "torchao"], ["--peer torchao", "mmlu"]),
        (["text", "--against", "no.jsonl"], ["no.jsonl", "--out"]),
        (["text", "text"], ["text", "twice"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_an_error_is_one_line(arguments, said, capsys, monkeypatch):
    import labkit.lab.stack.open

    monkeypatch.setattr(
        labkit.lab.stack.open,
        "load_model",
        lambda *_, **__: pytest.fail("a model was loaded first"),
    )
    assert main(["eval", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    for part in said:
        assert part in captured.err


def test_files_that_do_not_match_raise(tiny, prompts, tmp_path, capsys):
    before = str(tmp_path / "before.jsonl")
    assert main(["eval", prompts, "--limit", "2", "--out", before, *SHORT]) == 0
    capsys.readouterr()
    for arguments, said in (
        (["structured", "--against", before], "has mine, not structured"),
        ([prompts, "--limit", "2", "--against", before, "--out", before], "both"),
        ([prompts, "--limit", "2", "--recipe", "int8", "--out", before, *SHORT], "recipe None"),
        ([prompts, "--limit", "3", "--against", before, *SHORT], "differ in 1 items"),
        (
            [prompts, "--limit", "2", "--against", before, *SHORT[:2]],
            "max_new_tokens 4, and this run has 128",
        ),
    ):
        assert main(["eval", *arguments]) == 2
        assert said in capsys.readouterr().err
