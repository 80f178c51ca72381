"""Test the command line: exit status, one sentence per error, one JSON object."""

import json
import math
import subprocess
import sys
from dataclasses import dataclass

import pytest

from labkit.errors import BadRequest
from labkit.lab.cli import answer as answering
from labkit.lab.cli import main

COMMANDS = [
    ["doctor"],
    ["pull"],
    ["run"],
    ["generate"],
    ["plan"],
    ["bench", "decode"],
    ["bench", "prefill"],
    ["bench", "kernels"],
    ["bench", "speculate"],
    ["quantize"],
    ["distill"],
    ["eval"],
]


def one_sentence(captured) -> str:
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("labkit: "), captured.err
    assert "Traceback" not in captured.err
    return lines[0]


def last_object(captured) -> dict:
    def reject(name):
        raise AssertionError(f"{name} is not JSON")

    lines = captured.out.splitlines()
    assert len(lines) == 1, "with --json the object is all there is on stdout"
    return json.loads(lines[-1], parse_constant=reject)


def test_this_file_lists_every_command():
    import typer

    from labkit.lab.cli.app import app

    commands = typer.main.get_command(app).commands
    there = [
        [name, *sub]
        for name, c in commands.items()
        for sub in ([[s] for s in getattr(c, "commands", ())] or [[]])
    ]
    assert sorted(there) == sorted(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(command, capsys):
    assert main([*command, "--help"]) == 0
    assert f"Example:  labkit {' '.join(command)}" in capsys.readouterr().out


def test_the_help_of_generate_names_the_caches_and_drafters(capsys):
    from labkit.cache import CACHES
    from labkit.speculate import DRAFTERS

    assert main(["generate", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert ", ".join(CACHES) in text and ", ".join(DRAFTERS) in text


def test_without_arguments_the_help_is_printed(capsys):
    assert main([]) == 0
    assert "Commands:" in capsys.readouterr().out


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from labkit.lab.cli import main; main(['--help'])\n"
        "heavy = {'torch', 'numpy', 'transformers', 'papermill', 'nbclient', 'nbformat', 'matplotlib', 'pandas'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rnu"], ["'rnu'", "Did you mean 'run'?"]),
        (["run", "--scael", "quick"], ["--scael", "--scale"]),
        (["run", "--scale", "quik"], ["'quik'", "quick, standard, full"]),
        (["run", "zz_nothing", "--scale", "quick"], ["no"]),
        (["run", "-p", "repeats"], ["'repeats'", "NAME=VALUE"]),
        (["bench"], ["Missing command", "labkit bench --help"]),
        (["bench", "decod"], ["'decod'", "Did you mean 'decode'?"]),
        (["bench", "decode", "--formats", ""], ["arms is empty", "at least one"]),
        (["bench", "decode", "--formats", "fp33"], ["fp33"]),
        (["bench", "decode", "--formats", "fp32,fp32"], ["fp32, fp32", "each arm once"]),
        (["bench", "speculate", "--arms", "lookup:poetry"], ["lookup:poetry", "humaneval"]),
        (["bench", "speculate", "--arms", "lookup"], ["DRAFTER:TASK"]),
        (["bench", "speculate", "--draft-length", "-3"], ["--draft-length", "-3"]),
        (
            ["generate", "--prompt", "x", "--drafter", "lookup", "--draft-length", "some"],
            ["'some'", "auto"],
        ),
        (["generate"], ["--prompt"]),
        (["generate", "--prompt"], ["--prompt", "requires an argument"]),
        (
            ["generate", "--prompt", "x", "--max-new-tokens", "abc"],
            ["--max-new-tokens is 'abc'", "integer"],
        ),
        (
            ["generate", "--prompt", "x", "--max-new-tokens", "-1"],
            ["--max-new-tokens is '-1'", "greater than or equal to 0"],
        ),
        (["generate", "--prompt", "x", "--dtype", "int3"], ["'int3'", "bf16"]),
        (["generate", "--prompt", "x", "--temperature", "-1"], ["temperature", "-1"]),
        (["generate", "--prompt", "x", "--threads=0"], ["--threads is '0'", "1"]),
        (["plan", "--config", "no/such.json"], ["no/such.json"]),
        (["plan", "--model", "llama-3.1-8b", "--config", "x"], ["two models"]),
        (["plan", "--budget", "much"], ["much"]),
        (["plan", "--tokens", "0"], ["--tokens is '0'"]),
        (["eval", "txt"], ["'txt'", "text"]),
        (["eval", "text", "--method", "gptq"], ["--method gptq", "--recipe"]),
        (["eval", "text", "--recipe", "int99"], ["int99"]),
        (["quantize", "small.safetensors"], ["name of a folder", "small"]),
        (["quantize", f"{__file__}/a"], ["not a folder", "test_cli.py"]),
        (["quantize", "a", "--method", "gptq+magic"], ["'magic'"]),
        (["distill", "draft.bin"], ["draft.bin", ".safetensors"]),
        (["distill", "a.safetensors", "--kind", "eagle"], ["'eagle'", "medusa"]),
        (["distill", "a.safetensors", "--steps", "0"], ["--steps is '0'"]),
        (["distill", "a.safetensors", "--learning-rate", "-1"], ["learning_rate"]),
        (["eval", "text", "--peer", "torchao", "--recipe", "int4"], ["--peer torchao", "--recipe"]),
        (["eval", "text", "--peer", "vllm"], ["'vllm'", "torchao-int4"]),
        (["plan", "--tokens", "5", "--tokens", "0"], ["--tokens is '0'"]),
        (["pull", "no-such-asset"], ["no-such-asset"]),
        (["pull", "default", "--all"], ["not both"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_bad_request_is_one_sentence_and_status_2(arguments, expected, capsys):
    assert main(arguments) == 2
    sentence = one_sentence(capsys.readouterr())
    for part in expected:
        assert part in sentence


@pytest.mark.parametrize(
    "empty",
    [["--kv-format", ""], ["--kv-format="], ["--recipe", ""], ["--model", ""]],
    ids=" ".join,
)
def test_an_empty_option_is_an_error(empty, capsys):
    assert main(["eval", "text", *empty]) == 2
    assert f"{empty[0].rstrip('=')} is empty" in one_sentence(capsys.readouterr())


@pytest.mark.parametrize("name", ["nonsense", "bf16_prerope", "int4_nonsense"])
def test_an_unknown_kv_format_is_an_error_that_lists_the_formats(name, capsys):
    assert main(["eval", "text", "--kv-format", name, "--limit", "640"]) == 2
    assert "int4_kivi" in one_sentence(capsys.readouterr())


def test_a_missing_model_folder_is_a_bad_request(capsys, monkeypatch):
    monkeypatch.setenv("LABKIT_OFFLINE", "1")
    assert main(["generate", "--prompt", "x", "--model", "/no/such/folder"]) == 2
    assert "/no/such/folder" in one_sentence(capsys.readouterr())


def test_plan_prints_its_keys_and_the_sum(capsys):
    assert main(["plan", "--model", "qwen3-8b", "--tokens", "1000", "--json"]) == 0
    plan = last_object(capsys.readouterr())
    assert {
        "kv_bytes_per_token",
        "kv_bytes",
        "weight_bytes",
        "total_bytes",
        "max_sequences",
    } <= set(plan)
    assert plan["kv_bytes_per_token"] == 147_456 and plan["kv_bytes"] == 147_456_000
    assert plan["max_sequences"] is None, "nothing fits or not without a budget"


def test_a_plan_that_does_not_fit_exits_with_1(capsys):
    assert main(["plan", "--model", "llama-3.1-8b", "--budget", "1GiB", "--json"]) == 1
    assert last_object(capsys.readouterr())["max_sequences"] == 0
    eight = ["plan", "--model", "llama-3.1-8b", "--sequences", "8", "--tokens", "32768"]
    assert main([*eight, "--budget", "24GiB", "--json"]) == 1


@dataclass
class Fake:
    name: str


def test_run_passes_its_options_and_exits_with_1_if_a_notebook_fails(capsys, monkeypatch):
    import labkit.lab.runner

    seen = {}

    def fake(names, scale, *, parameters, limits):
        seen.update(names=names, scale=scale, parameters=parameters, seconds=limits.seconds)
        print("chatter on stdout")
        return labkit.lab.runner.RunReport(
            1.0, [labkit.lab.runner.NotebookResult("01_x", False, 1.0, "cell 3 raised")]
        )

    monkeypatch.setattr(labkit.lab.runner, "run_notebooks", fake)
    arguments = [
        "run",
        "01",
        "--scale",
        "full",
        "--threads",
        "2",
        "-p",
        "repeats=3",
        "-p",
        "name=x",
        "--json",
    ]
    assert main([*arguments, "--time-limit", "9"]) == 1
    report = last_object(capsys.readouterr())
    assert set(report) == {"ok", "seconds", "notebooks"} and report["ok"] is False
    assert {"name", "ok", "seconds"} <= set(report["notebooks"][0])
    assert seen == {
        "names": ["01"],
        "scale": "full",
        "seconds": 9.0,
        "parameters": {"threads": 2, "repeats": 3, "name": "x"},
    }


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (KeyboardInterrupt(), 130),
        (BadRequest("no"), 2),
        (PermissionError(13, "not allowed", "/x"), 1),
        (FileNotFoundError(2, "missing", "/x"), 2),
        (BrokenPipeError(), 0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_exception_of_a_command_becomes_a_status(raised, status, capsys, monkeypatch):
    import labkit.lab.assets

    def fail(*_, **__):
        raise raised

    monkeypatch.setattr(labkit.lab.assets, "pull", fail)
    monkeypatch.setattr(sys, "stdout", open(1, "w", closefd=False) if status == 0 else sys.stdout)
    assert main(["pull"]) == status
    assert "Traceback" not in capsys.readouterr().err


def test_a_bug_is_not_reported_as_a_bad_request(monkeypatch):
    import labkit.lab.assets

    monkeypatch.setattr(labkit.lab.assets, "pull", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["pull"])


def test_values_are_converted_to_the_types_of_json():
    torch = pytest.importorskip("torch")
    value = {
        "nan": math.nan,
        "inf": [math.inf],
        "tensor": torch.tensor(2),
        "tuple": (1, True),
        3: Fake("x"),
    }
    assert answering.plain(value) == {
        "nan": None,
        "inf": [None],
        "tensor": 2,
        "tuple": [1, True],
        "3": {"name": "x"},
    }


@pytest.fixture
def tiny(monkeypatch):
    """`load_model` gives a tiny random model whose tokens are bytes and whose chat template adds two of them."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    import labkit.lab.stack.open
    from labkit.model.tiny import tiny_model
    from labkit.model.tokenizer import Tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()

    def load(name="default", **_):
        model = tiny_model(vocab_size=256)
        model.tokenizer, model.name = (
            Tokenizer(backend, chat_template="<{{ messages[0].content }}>"),
            name,
        )
        return model

    monkeypatch.setattr(labkit.lab.stack.open, "load_model", load)


def test_generate_prints_its_keys_and_applies_the_chat_template_unless_raw(tiny, capsys):
    assert main(["generate", "--prompt", "hello", "--max-new-tokens", "5", "--json"]) == 0
    chat = last_object(capsys.readouterr())
    assert {"tokens", "text", "stop_reason", "ttft_s", "tpot_s"} <= set(chat)
    assert chat["prompt_tokens"] == 7 and len(chat["tokens"]) <= 5
    assert (
        main(
            [
                "generate",
                "--prompt",
                "hello",
                "--max-new-tokens",
                "5",
                "--json",
                "--raw",
                "--cache",
                "none",
            ]
        )
        == 0
    )
    assert last_object(capsys.readouterr())["prompt_tokens"] == 5


def test_generate_takes_a_recipe_or_a_dtype(tiny, capsys, monkeypatch):
    assert (
        main(
            ["generate", "--prompt", "hello", "--max-new-tokens", "5", "--recipe", "bf16", "--json"]
        )
        == 0
    )
    assert len(last_object(capsys.readouterr())["tokens"]) <= 5
    assert main(["generate", "--prompt", "hello", "--recipe", "int4", "--dtype", "bf16"]) == 2
    assert "give one of them" in capsys.readouterr().err
    assert main(["generate", "--prompt", "hello", "--recipe", "int5000"]) == 2
    assert "int5000" in capsys.readouterr().err


def test_generate_streams_the_text_of_its_json(tiny, capsys):
    assert main(["generate", "--prompt", "hello", "--max-new-tokens", "5", "--json"]) == 0
    text = last_object(capsys.readouterr())["text"]
    assert main(["generate", "--prompt", "hello", "--max-new-tokens", "5"]) == 0
    captured = capsys.readouterr()
    assert captured.out == text + "\n" and "tokens" in captured.err


def test_a_drafter_does_not_change_the_text_and_is_counted(tiny, capsys):
    request = ["generate", "--prompt", "hello hello", "--max-new-tokens", "12", "--json"]
    assert main(request) == 0
    plain = last_object(capsys.readouterr())
    for drafter, length in (("lookup", "3"), ("int8_channel", "auto"), ("lookup_first", "0")):
        assert main([*request, "--drafter", drafter, "--draft-length", length]) == 0
        done = last_object(capsys.readouterr())
        assert done["tokens"] == plain["tokens"] and done["text"] == plain["text"]
        assert (
            done["accepted"] <= done["examined"] <= done["drafted"] and done["target_passes"] < 12
        )
    assert main([*request, "--drafter", "oracle"]) == 2
    assert "oracle" in one_sentence(capsys.readouterr())


def test_times_without_tokens_are_null(tiny, capsys):
    assert main(["generate", "--prompt", "hello", "--max-new-tokens", "0", "--json"]) == 0
    assert last_object(capsys.readouterr())["ttft_s"] is None


def test_quantize_writes_a_folder_that_is_a_model(tiny, tmp_path, capsys):
    from labkit.lab.stack.open import open_model
    from labkit.model.files.quantized import WEIGHTS, read_header

    folder = tmp_path / "small"
    assert main(["quantize", str(folder), "--recipe", "int8", "--json"]) == 0
    result = last_object(capsys.readouterr())
    assert (folder / WEIGHTS).stat().st_size == result["file_bytes"] > result["weight_bytes"] / 2
    assert result["weight_bytes"] < result["original_bytes"]
    assert read_header(folder / WEIGHTS)["method"] == result["method"] == "rtn"
    assert open_model(folder).tokenizer.chat("a") == open_model("x").tokenizer.chat("a")


def test_layer_by_layer_changes_the_file_and_needs_a_calibrated_method(tiny, tmp_path, capsys):
    folders = tmp_path / "once", tmp_path / "layers"
    request = ["--recipe", "int3_g16_zp", "--method", "gptq", "--calibration", "4"]
    assert main(["quantize", str(folders[0]), *request]) == 0
    assert main(["quantize", str(folders[1]), *request, "--layer-by-layer"]) == 0
    once, twice = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert once != twice and len(once) == len(twice)
    capsys.readouterr()
    no = str(tmp_path / "no")
    assert main(["quantize", no, "--recipe", "int8", "--layer-by-layer"]) == 2
    assert "--method gptq" in one_sentence(capsys.readouterr())
    assert main(["quantize", no, "--recipe", "bf16"]) == 2
    assert "nothing to pack" in one_sentence(capsys.readouterr())
    assert not (tmp_path / "no").exists()


def test_quantize_replaces_only_its_own_folders(tiny, tmp_path, capsys, monkeypatch):
    import labkit.lab.stack.open

    mine, other, folder = (tmp_path / name for name in ("mine", "model", "folder"))
    other.write_bytes(b"the original")
    folder.mkdir()
    for _ in range(2):
        assert main(["quantize", str(mine), "--recipe", "int8"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(labkit.lab.stack.open, "load_model", lambda *_, **__: pytest.fail("loaded"))
    for path in (other, folder, other / "below"):
        assert main(["quantize", str(path), "--recipe", "int8"]) == 2
        sentence = one_sentence(capsys.readouterr())
        assert path.name in sentence or path.parent.name in sentence
    assert other.read_bytes() == b"the original"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "mine", "model"]


def test_a_warning_is_one_line(capsys, monkeypatch):
    import warnings

    import labkit.lab.assets

    monkeypatch.setattr(
        labkit.lab.assets,
        "pull",
        lambda *_, **__: warnings.warn("this takes long", stacklevel=2) or {},
    )
    before = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        main(["pull"])
    assert "labkit: this takes long.\n" in capsys.readouterr().err
    assert warnings.showwarning is before
