"""The shape of the package: rooms import downwards only, files stay small, importing it is light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "labkit").rglob("*.py"))

# From the ground up; what stands in one row does not know its neighbours.
ROOMS = [
    {"errors"},
    {"formats", "measure", "assets"},
    {"kernels", "plan", "texts"},
    {"cache", "quant"},
    {"model"},
    {"generate"},
    {"speculate", "batching"},
    {"evals", "bench", "show"},
    {"stack", "hf"},
    {"out"},
    {"cli", "runner", "doctor", "notebook", "__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
ONE_ROOM = ROOMS[-1]  # the top is one room in several files: the command line calls the runner
NO_TORCH = ("labkit.plan", "labkit.plan.memory", "labkit.formats", "labkit.errors", "labkit.assets", "labkit.texts",
            "labkit.cli", "labkit.cli.app", "labkit.runner", "labkit.doctor", "labkit.notebook")  # fmt: skip

every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "labkit")))


def room_of(module: str) -> str | None:
    """`labkit.cache.paged` -> `cache`; None for what is not labkit's, or is the package itself."""
    parts = module.split(".")
    return parts[1] if parts[0] == "labkit" and len(parts) > 1 else None


def rooms_imported(source: str, package: str) -> set[str]:
    """Rooms that a file imports from anywhere in it, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], *filter(None, [base])])
            modules = [f"{base}.{alias.name}" for alias in node.names] if base == "labkit" else [base]
        else:
            continue
        found |= {room for module in modules if (room := room_of(module)) in LEVEL}
        unknown = [m for m in modules if room_of(m) and room_of(m) not in LEVEL and base_is_room(m)]
        assert not unknown, f"{unknown[0]} belongs to no room: give it a row in ROOMS"
    return found


def base_is_room(module: str) -> bool:
    """Whether a file or folder of that name lies in the package (and it is not a name of `labkit` itself)."""
    room = room_of(module)
    return (ROOT / "labkit" / f"{room}.py").exists() or (ROOT / "labkit" / room).is_dir()


def violations(room: str, imported: set[str]) -> set[str]:
    same_top = ONE_ROOM if room in ONE_ROOM else {room}
    return {other for other in imported - same_top if LEVEL[other] >= LEVEL[room]}


@every_file
def test_a_room_imports_only_from_rooms_below_it(path):
    parts = path.relative_to(ROOT / "labkit").with_suffix("").parts
    if parts == ("__init__",):
        return  # offers names of every room, lazily
    room = parts[0]
    assert room in LEVEL, f"{room} belongs to no row of ROOMS"
    package = ".".join(["labkit", *parts[:-1]])
    wrong = violations(room, rooms_imported(path.read_text(encoding="utf-8"), package))
    assert not wrong, f"{room} must not know {', '.join(sorted(wrong))}; hand in what it needs"


def test_the_check_sees_lazy_relative_and_sideways_imports():
    lazy = "def f():\n    from labkit.generate import loop\n"
    assert violations("model", rooms_imported(lazy, "labkit.model")) == {"generate"}
    assert violations("model", rooms_imported("from ..runner import x", "labkit.model")) == {"runner"}
    assert violations("cache", rooms_imported("from labkit import quant", "labkit.cache")) == {"quant"}
    assert violations("cache", rooms_imported("import labkit.kernels.reference", "labkit.cache")) == set()
    assert violations("cli", rooms_imported("from labkit.runner import x", "labkit.cli")) == set()


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
    if module != "labkit" and not base_is_room(module):
        pytest.skip("not here yet")
    heavy = "{'torch', 'transformers', 'matplotlib', 'pandas', 'papermill', 'IPython', 'numpy'}"
    code = f"import sys, {module}; loaded = {heavy} & set(sys.modules); sys.exit(str(loaded) if loaded else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_every_name_the_package_offers_exists():
    import labkit

    missing = []
    for name in labkit.__all__:
        try:
            getattr(labkit, name)
        except (AttributeError, ImportError) as error:
            missing.append(f"{name}: {error}")
    assert not missing


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
