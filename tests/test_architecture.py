"""The shape of the package: files stay small and say what they are, importing is light. (Rooms: test_project.)"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "labkit").rglob("*.py"))

NO_TORCH = ("labkit.plan", "labkit.plan.memory", "labkit.formats", "labkit.errors", "labkit.assets", "labkit.texts",
            "labkit.cli", "labkit.cli.app", "labkit.runner", "labkit.doctor", "labkit.notebook")  # fmt: skip

every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "labkit")))


@every_file
def test_a_file_holds_one_idea(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 220, "split it: one idea a file"


@every_file
def test_what_others_use_says_what_it_is(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if tree.body:
        assert ast.get_docstring(tree), "the file has no docstring"
    silent = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
        and not _is_short(node)
    ]
    assert not silent, f"no docstring: {', '.join(silent)}"


def _is_short(node) -> bool:
    """A function of a few lines, or a class that is only named fields, explains itself."""
    if isinstance(node, ast.ClassDef):
        return all(isinstance(line, ast.AnnAssign | ast.Assign) or _is_short(line) for line in node.body)
    return node.end_lineno - node.lineno < 12


@pytest.mark.parametrize("module", ["labkit", *NO_TORCH])
def test_importing_it_loads_nothing_heavy(module):
    heavy = "{'torch', 'transformers', 'matplotlib', 'pandas', 'papermill', 'IPython', 'numpy'}"
    code = f"import sys, {module}; loaded = {heavy} & set(sys.modules); sys.exit(str(loaded) if loaded else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# ---- what the repository says ----------------------------------------------------------------------------------

# Put together here so that this file does not hold them.
FORBIDDEN = ["/" + "work/", "/" + "tmp/lab", "sha" + "red/DESIGN", "cas" + "es.md", "CONTR" + "ACT.md"]


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_no_tracked_file_names_a_private_place():
    found = []
    for path in tracked():
        if path.is_file() and path.stat().st_size < 2_000_000:
            text = path.read_bytes().decode("utf-8", errors="ignore")
            found += [f"{path.relative_to(ROOT)}: {word}" for word in FORBIDDEN if word in text]
    assert not found


def test_no_large_file_is_tracked_but_the_one_agreed():
    large = [path for path in tracked() if path.is_file() and path.stat().st_size > 1_000_000]
    assert all(path.parent.name == "data" and path.stat().st_size <= 15_000_000 for path in large), large


def test_no_weights_are_read_by_pickle():
    """Weights are safetensors or GGUF: nobody calls torch.load or pickle."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("torch.load", "pickle.load", "pickle.loads"), f"{path.name}: {called}"
