"""The shape of the project: who may import whom, how large it is, and what every file says of itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from fakes import load_script

ROOT = Path(__file__).parents[1]
COURSE = ROOT / "notebooks" / "labkit_course"
FILES = sorted([*(ROOT / "labkit").rglob("*.py"), *COURSE.rglob("*.py")])

# From the ground up. A room imports only from rooms below it; rooms in one set do not know each other.
CORE = (
    {"errors"},
    {"files"},
    {"formats"},
    {"plan"},
    {"kernels"},
    {"cache", "quant"},
    {"model"},
    {"generate"},
    {"speculate", "batching"},
)
LAB = (
    {"measure", "assets", "tables"},
    {"texts", "plan"},
    {"stack"},
    {"cuda", "hf"},
    {"bench"},
    {"evals"},
    {"distill"},
    {"runner", "doctor"},
    {"cli"},
)
FLOORS = {room: (0, n) for n, rooms in enumerate(CORE) for room in rooms}
FLOORS |= {f"lab.{room}": (1, n) for n, rooms in enumerate(LAB) for room in rooms}

NO_TORCH = (
    "labkit",
    "labkit.plan",
    "labkit.formats",
    "labkit.errors",
    "labkit.files",
    "labkit.lab.assets",
    "labkit.lab.plan.memory",
    "labkit.lab.texts",
    "labkit.lab.cli",
    "labkit.lab.cli.app",
    "labkit.lab.runner",
    "labkit.lab.doctor",
    "labkit_course.start",
)

every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))


def module_of(path: Path, base: Path) -> str:
    name = ".".join(path.relative_to(base).with_suffix("").parts)
    return name.removesuffix(".__init__")


def modules(root: Path) -> dict[str, Path]:
    """Every module of labkit and of the course, by its dotted name."""
    found = {module_of(path, root): path for path in (root / "labkit").rglob("*.py")}
    course = root / "notebooks"
    found |= {module_of(path, course): path for path in (course / "labkit_course").rglob("*.py")}
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> dict[str, int]:
    """{module: line} of every import in a file, also inside functions, as the deepest known module."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: dict[str, int] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(up if node.level else ()), *filter(None, [node.module])])
            targets = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            if target.split(".")[0] in ("labkit", "labkit_course"):
                while target and target not in known:
                    target = target.rpartition(".")[0]
                if target and target != name:
                    found.setdefault(target, node.lineno)
    return found


def room_of(module: str) -> str:
    parts = module.split(".")
    if parts[0] == "labkit_course":
        return "course"
    return ".".join(parts[1:3]) if parts[1] == "lab" and len(parts) > 2 else parts[1]


def broken_rules(root: Path) -> list[str]:
    """Imports that the storeys or the floors forbid."""
    known, broken = modules(root), []
    for name, path in sorted(known.items()):
        if name in ("labkit", "labkit.__main__", "labkit.lab"):
            continue  # may name lab, lazily
        here = room_of(name)
        if here != "course" and here not in FLOORS:
            broken.append(f"{name}: the room {here} has no floor")
            continue
        for target, line in imports(name, path, known).items():
            if target in ("labkit", "labkit.lab"):
                continue
            there = room_of(target)
            if here == "course" or here == there:
                continue
            if there == "course" or there not in FLOORS or FLOORS[there] >= FLOORS[here]:
                broken.append(f"{name}:{line} imports {target}, which is not below it")
    return broken


def circles(root: Path) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others (Tarjan 1972)."""
    known = modules(root)
    graph = {name: list(imports(name, path, known)) for name, path in known.items()}
    graph["labkit"] = []  # lazy by name
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph[node]:
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            group = []
            while True:
                group.append(stack.pop())
                if group[-1] == node:
                    break
            if len(group) > 1:
                found.append(sorted(group))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def test_core_never_imports_lab_nothing_imports_the_course_and_rooms_import_downwards():
    assert broken_rules(ROOT) == []


def test_there_are_no_import_circles():
    assert circles(ROOT) == []


@pytest.mark.parametrize(
    ("line", "allowed"),
    [
        ("from labkit.model import x", False),  # upwards
        ("from labkit.quant import x", False),  # sideways
        ("from labkit import quant", False),
        ("from ..quant import rtn", False),
        ("from labkit.lab.measure import x", False),  # core to lab
        ("from labkit_course import x", False),
        ("def f():\n    import labkit.generate", False),  # late is no better
        ("from .contract import x", True),
        ("from labkit.kernels import x", True),
        ("import torch", True),
    ],
)
def test_the_rule_sees_every_kind_of_import(tmp_path, line, allowed):
    for room in ("cache", "model", "quant", "generate", "kernels", "lab/measure"):
        (tmp_path / "labkit" / room).mkdir(parents=True)
        (tmp_path / "labkit" / room / "__init__.py").write_text("")
    (tmp_path / "labkit" / "lab" / "__init__.py").write_text("")
    (tmp_path / "labkit" / "__init__.py").write_text("")
    (tmp_path / "notebooks" / "labkit_course").mkdir(parents=True)
    (tmp_path / "notebooks" / "labkit_course" / "__init__.py").write_text("")
    (tmp_path / "labkit" / "cache" / "one.py").write_text(line)
    (tmp_path / "labkit" / "cache" / "contract.py").write_text("")
    assert (broken_rules(tmp_path) == []) == allowed


def test_a_circle_through_a_late_import_is_seen(tmp_path):
    for name, text in (("a", "import labkit.b"), ("b", "def f():\n    from labkit import a")):
        (tmp_path / "labkit").mkdir(exist_ok=True)
        (tmp_path / "labkit" / f"{name}.py").write_text(text)
    (tmp_path / "labkit" / "__init__.py").write_text("")
    assert circles(tmp_path) == [["labkit.a", "labkit.b"]]


def test_the_sizes_stay_within_their_budgets():
    size = load_script("tests/size.py")
    assert size.over_budget(size.measure(ROOT), size.budgets(ROOT)) == []


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
    """A function of a few lines, or a class of named fields only, explains itself."""
    if isinstance(node, ast.ClassDef):
        fields = (ast.AnnAssign, ast.Assign)
        return all(isinstance(line, fields) or _is_short(line) for line in node.body)
    return node.end_lineno - node.lineno < 12


def test_no_function_has_more_than_seven_parameters_without_a_reason():
    """Command functions apart: their parameters are the options of a command line."""
    size = load_script("tests/size.py")
    long = size.long_signatures(ROOT)
    assert set(long) <= set(size.ALLOWED_LONG), sorted(set(long) - set(size.ALLOWED_LONG))
    assert len(size.ALLOWED_LONG) <= 8


@pytest.mark.parametrize("module", NO_TORCH)
def test_importing_it_loads_nothing_heavy(module):
    heavy = "{'torch', 'transformers', 'matplotlib', 'pandas', 'papermill', 'IPython', 'numpy'}"
    code = f"import sys, {module}; loaded = {heavy} & set(sys.modules); sys.exit(str(loaded) if loaded else 0)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


# ---- what the repository says ----------------------------------------------------------------------------------

# Put together here so that this file does not hold them.
FORBIDDEN = [
    "/" + "work/",
    "/" + "tmp/lab",
    "sha" + "red/DESIGN",
    "cas" + "es.md",
    "CONTR" + "ACT.md",
]


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
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
    assert all(path.parent.name == "data" and path.stat().st_size <= 15_000_000 for path in large)


def test_no_weights_are_read_by_pickle():
    """Weights are safetensors or GGUF: nobody calls torch.load or pickle."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("torch.load", "pickle.load", "pickle.loads"), path.name


def test_at_most_twenty_lines_are_kept_from_the_formatter():
    marks = [
        path
        for path in tracked()
        if path.suffix == ".py"
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.rstrip().endswith(("# fmt: " + "skip", "# fmt: " + "off"))
    ]
    assert len(marks) <= 20
