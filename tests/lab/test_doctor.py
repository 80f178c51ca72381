"""Test the doctor: problems keep the quick lab from running, notes do not."""

import shutil
from importlib import metadata

import pytest

from labkit.lab import assets, doctor


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """A machine without problems; nothing is measured, and the cache folder is empty."""
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "not" / "there" / "yet"))
    monkeypatch.delenv("LABKIT_OFFLINE", raising=False)
    facts = {
        "memory_available_bytes": 8 * 2**30,
        "gpu": None,
        "instruction_sets": [],
        "bf16": "emulated",
    }
    monkeypatch.setattr(doctor, "_machine", lambda: dict(facts))
    monkeypatch.setattr(assets, "cached", lambda name="default": tmp_path)
    return facts


def whats(entries):
    return " | ".join(entry["what"] for entry in entries)


def test_no_gpu_compiler_sandbox_or_peer_leaves_it_ok(quick, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(
        doctor.importlib.util,
        "find_spec",
        lambda name: object() if name in ("torch", "psutil") else None,
    )
    diagnosis = doctor.examine()
    assert diagnosis["ok"] and diagnosis["problems"] == []
    notes = whats(diagnosis["notes"])
    for missing in ("GPU", "compiler", "bubblewrap", "JupyterLab", "llama-cpp-python"):
        assert missing in notes
    assert all(entry["fix"] for entry in diagnosis["notes"])
    assert "can run here" in doctor.render(diagnosis)


def test_a_missing_and_an_old_package_are_problems_with_a_command_to_fix_them(quick, monkeypatch):
    real = metadata.version

    def version(name):
        if name == "papermill":
            raise metadata.PackageNotFoundError(name)
        return "0.0.1" if name == "torch" else real(name)

    monkeypatch.setattr(doctor.metadata, "version", version)
    diagnosis = doctor.examine()
    assert not diagnosis["ok"]
    fixes = {entry["what"]: entry["fix"] for entry in diagnosis["problems"]}
    assert fixes["papermill is missing"].startswith('pip install "papermill')
    assert "torch is 0.0.1" in fixes
    assert "cannot run yet" in doctor.render(diagnosis)


def test_extras_are_not_required(quick):
    assert not {"ray", "torchao"} & {
        entry["what"].split()[0] for entry in doctor.examine()["problems"]
    }


def test_a_missing_model_is_a_note_and_offline_a_problem(quick, monkeypatch):
    monkeypatch.setattr(assets, "cached", lambda name="default": None)
    diagnosis = doctor.examine()
    assert diagnosis["ok"] and "default model" in whats(diagnosis["notes"])
    monkeypatch.setenv("LABKIT_OFFLINE", "1")
    diagnosis = doctor.examine()
    assert not diagnosis["ok"] and "default model" in whats(diagnosis["problems"])


def test_too_little_memory_or_disk_is_a_problem(quick, monkeypatch):
    monkeypatch.setattr(doctor, "_machine", lambda: {**quick, "memory_available_bytes": 2**30})
    monkeypatch.setattr(assets, "cached", lambda name="default": None)
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    problems = whats(doctor.examine()["problems"])
    assert "1.0 GiB of memory" in problems and "MB free" in problems
