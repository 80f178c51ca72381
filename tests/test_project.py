"""What holds for the project as a whole: its layout, its metadata, its commands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

# Importing


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout


def test_every_name_that_labkit_offers_is_there():
    code = (
        "import labkit\nfor name in labkit.__all__: assert getattr(labkit, name) is not None, name"
    )
    run_python(code)
    import labkit

    assert 25 <= len(labkit.__all__) <= 36 and set(labkit.__all__) <= set(dir(labkit))
    with pytest.raises(AttributeError, match="nonsense"):
        labkit.nonsense  # noqa: B018
    # A name that is also a room would mean a function before the room is imported and a module after.
    assert not set(labkit._NAMES) & set(labkit._ROOMS)


# Metadata


def bounds(requirements) -> dict[str, str]:
    pattern = re.compile(r"([A-Za-z0-9_.-]+)>=([0-9.]+)$")
    return {
        match[1].lower(): match[2]
        for line in requirements
        if (match := pattern.match(line.strip()))
    }


def declared(*extras: str) -> dict[str, str]:
    project = PYPROJECT["project"]
    lines = project["dependencies"] + [
        line for name in extras for line in project["optional-dependencies"][name]
    ]
    lines = sorted(set(lines))  # an extra may repeat what another asks for, with the same bound
    assert len(bounds(lines)) == len(lines), (
        "every requirement has one lower bound and nothing else"
    )
    return bounds(lines)


def test_requirements_admit_colab_and_are_only_lower_bounds():
    def version(text):
        return tuple(int(part) for part in text.split("."))

    names = declared("lab", "test", "peers", "ray", "export")
    for name, installed in {
        "torch": "2.11",
        "pandas": "2.2",
        "ipywidgets": "7.7",
        "ipython": "7.34",
    }.items():
        assert version(names[name]) <= version(installed), name


def test_conda_says_what_pyproject_says():
    conda_names = {"pytorch": "torch", "matplotlib-base": "matplotlib"}
    text = (ROOT / "environment.yml").read_text(encoding="utf-8")
    listed = yaml.safe_load(text)["dependencies"]
    conda = bounds(line for line in listed if isinstance(line, str))
    assert PYPROJECT["project"]["requires-python"] == ">=" + conda.pop("python")
    assert {conda_names.get(name, name): bound for name, bound in conda.items()} == declared(
        "lab", "test"
    )
    for line in text.splitlines():  # each line says what it is for
        assert not re.match(r"\s+- [\w-]+>=", line) or "  # " in line, line


def test_the_tested_set_covers_what_is_declared():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.lower().split("==") for line in lines if line and not line.startswith("#"))
    assert pins["torch"] == "2.13.0"  # no build suffix: a CPU or a CUDA build
    assert set(declared("lab", "test", "peers", "ray", "export")) <= {
        name.replace("_", "-") for name in pins
    }


def test_the_version_is_said_once():
    import labkit

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(citation["version"]) == labkit.__version__
    assert citation["authors"] == [{"name": "The labkit authors"}]
    assert citation["repository-code"] == PYPROJECT["project"]["urls"]["Source"]
    assert "Changes to the design" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "Attribution 4.0 International" in (ROOT / "LICENSE-notebooks").read_text(
        encoding="utf-8"
    )
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


# Commands


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@needs_make
def test_make_help_lists_every_target():
    shown = subprocess.run(
        ["make", "help"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    for target in ("lab", "test", "check", "jupyter", "peers", "bench", "clean", "help"):
        assert re.search(rf"^  {target} +\w", shown, re.MULTILINE), target


def fake_checkout(folder: Path, python_says: str = "3.13.0") -> dict[str, str]:
    """The Makefile beside stand-ins for Python that write down what they are asked; returns the environment."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "setup.py"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "bin").mkdir()
    new_enough = tuple(map(int, python_says.split(".")[:2])) >= (3, 11)
    script = f"""#!/bin/sh
echo "$@" >> "{folder}/asked"
case "$1" in
  -c) exit {0 if new_enough else 1};;
  --version) echo "Python {python_says}";;
  -m) if [ "$2" = venv ]; then mkdir -p .venv/bin && cp "$0" .venv/bin/python && cp "$0" .venv/bin/labkit; fi
      if [ "$2" = pip ]; then echo "index=$PIP_NO_INDEX links=$PIP_FIND_LINKS" >> "{folder}/asked"; fi
      [ -f "{folder}/fail-$2" ] && exit 1 || exit 0;;
esac
"""
    for name in ("python3", "python3.14", "python3.13", "python3.12", "python3.11", "python"):
        (folder / "bin" / name).write_text(script)
        (folder / "bin" / name).chmod(0o755)
    return {"PATH": f"{folder / 'bin'}:/usr/bin:/bin"}


def make(folder: Path, environment, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [shutil.which("make"), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


def asked(folder: Path) -> str:
    return (folder / "asked").read_text() if (folder / "asked").exists() else ""


@needs_make
def test_make_lab_sets_up_once_and_runs_the_three_commands(tmp_path):
    environment = fake_checkout(tmp_path)
    for _ in range(2):
        done = make(tmp_path, environment, "lab")
        assert done.returncode == 0, done.stderr
    said = asked(tmp_path)
    assert said.count("pip install -c constraints.txt -e .[lab,test]") == 1
    assert said.count("-m venv .venv") == 1
    assert (
        re.findall(r"^(doctor|pull|run --scale quick)$", said, re.MULTILINE)
        == ["doctor", "pull", "run --scale quick"] * 2
    )
    (tmp_path / "constraints.txt").write_text(
        "torch==2.14.0\n"
    )  # another set: installed once more, same .venv
    make(tmp_path, environment, "lab")
    assert asked(tmp_path).count("pip install") == 2 and asked(tmp_path).count("-m venv") == 1


@needs_make
def test_an_installation_that_was_killed_starts_afresh(tmp_path):
    environment = fake_checkout(tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "half a package").write_text("")
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / ".venv" / ".installing").write_text(str(dead.pid))
    done = make(tmp_path, environment, "install")
    assert done.returncode == 0 and "interrupted" in done.stdout
    assert (
        not (tmp_path / ".venv" / "half a package").exists()
        and not (tmp_path / ".venv" / ".installing").exists()
    )


@needs_make
def test_an_installation_under_way_is_left_alone(tmp_path):
    environment = fake_checkout(tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installing").write_text(str(os.getpid()))
    done = make(tmp_path, environment, "install")
    assert done.returncode != 0 and f"process {os.getpid()} is installing" in done.stderr
    assert asked(tmp_path) == "" and (tmp_path / ".venv" / ".installing").exists()


@needs_make
def test_a_failed_installation_is_tried_again_in_the_same_folder(tmp_path):
    environment = fake_checkout(tmp_path)
    (tmp_path / "fail-pip").write_text("")
    assert make(tmp_path, environment, "install").returncode != 0
    (tmp_path / "fail-pip").unlink()
    assert make(tmp_path, environment, "install").returncode == 0
    assert asked(tmp_path).count("-m venv") == 1 and asked(tmp_path).count("-m pip install") == 2


@needs_make
def test_no_suitable_python_is_one_sentence(tmp_path):
    environment = fake_checkout(tmp_path, python_says="3.10.4")
    done = make(tmp_path, environment, "install")
    assert done.returncode != 0 and "no Python 3.11 or newer was found" in done.stderr
    assert not (tmp_path / ".venv").exists()


@needs_make
def test_the_variables_reach_pip(tmp_path):
    environment = fake_checkout(tmp_path)
    make(tmp_path, environment, "install", "TORCH_INDEX=https://example.org/cpu")
    assert "--extra-index-url https://example.org/cpu" in asked(tmp_path)
    assert "index= links=\n" in asked(tmp_path)
    shutil.rmtree(tmp_path / ".venv")
    make(tmp_path, environment, "install", "WHEELS=stick")
    assert f"index=1 links={tmp_path / 'stick'}" in asked(tmp_path)


def test_ci_runs_the_commands_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert [
        line.split(maxsplit=2)[2] for line in script.splitlines() if line.startswith("phase ")
    ] == [
        "make install",
        "make test",
        "make lab",
        "make check",
    ]
    assert "set -euo pipefail" in script and (ROOT / ".ci" / "run").stat().st_mode & 0o100
    if shutil.which("bash"):
        subprocess.run(["bash", "-n", ".ci/run"], check=True, cwd=ROOT)


@pytest.mark.slow
def test_the_wheel_carries_code_and_data(tmp_path):
    """Builds with the build backend from the index pip is configured for."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("labkit-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    packaged = {name for name in names if name.startswith("labkit/") and name.endswith(".py")}
    assert packaged >= {
        f"labkit/{path.relative_to(ROOT / 'labkit').as_posix()}"
        for path in (ROOT / "labkit").rglob("*.py")
    }
    assert {"labkit/py.typed", "labkit/data/assets.json"} <= set(names)
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        "import labkit.files as f, labkit.lab.assets as a; print(f.data_path('assets.json')); "
        "print(a.find('default').name); import labkit_course.start, labkit_course.show.plots; "
        "from labkit_course.checks import kv_cache; print(kv_cache.__file__); "
        "print(len(labkit_course.start.bootstrap()) > 0)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site)!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    ).stdout.split()
    assert (
        Path(shown[0]) == site / "labkit" / "data" / "assets.json"
        and shown[1] == "smollm2-135m-instruct"
    )
    assert Path(shown[2]) == site / "labkit_course" / "checks" / "kv_cache.py"
    assert shown[3] == "True"
