"""Count lines of code per room and hold them against the budgets in pyproject.toml.

    python tests/size.py      print the table; exit status 1 if a budget is exceeded

A line of code is a line that is not blank, not a comment alone, and not part of a docstring.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

ALLOWED_LONG: dict[str, str] = {  # function -> why it has more than seven parameters
    "kernels/cuda/triton_packed.py:multiply": "a Triton kernel takes tensors and numbers one by one",
    "lab/hf.py:attention": "the signature is that of transformers' attention functions",
}
READING = ("formats", "cache", "quant", "generate", "speculate", "model", "plan", "kernels")
NOT_READING = ("cache/prefix", "model/files", "model/native", "kernels/native", "kernels/cuda")


def code_lines(path: Path) -> int:
    text = path.read_text(encoding="utf-8")
    code = [bool(line.strip()) and not line.strip().startswith("#") for line in text.splitlines()]
    for node in ast.walk(ast.parse(text)):
        holds = (ast.Module, ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
        if isinstance(node, holds) and ast.get_docstring(node, clean=False) is not None:
            for line in range(node.body[0].lineno - 1, node.body[0].end_lineno):
                code[line] = False
    return sum(code)


def room(path: Path) -> str:
    """The room of a file inside labkit/, such as `cache`, `cache/prefix` or `lab/evals`."""
    parts = path.with_suffix("").parts
    two = "/".join(parts[:2])
    return two if parts[0] == "lab" or two in NOT_READING else parts[0]


def measure(root: Path) -> dict[str, int]:
    """Lines of code per room, and the totals that have budgets."""
    rooms: dict[str, int] = {}
    for path in sorted((root / "labkit").rglob("*.py")):
        name = room(path.relative_to(root / "labkit"))
        rooms[name] = rooms.get(name, 0) + code_lines(path)
    outside = {name: lines for name, lines in rooms.items() if not name.startswith("lab/")}
    cpp = sum(
        sum(bool(line.strip()) and not line.strip().startswith("//") for line in path.open())
        for path in (root / "labkit").rglob("*.cpp")
    )
    others = {
        "course": sum(map(code_lines, (root / "notebooks" / "labkit_course").rglob("*.py"))),
        "makers": sum(
            code_lines(p) for place in ("data", "figures") for p in (root / place).glob("*.py")
        ),
    }
    return (
        rooms
        | {
            "reading core": sum(lines for name, lines in outside.items() if name in READING),
            "core": sum(outside.values()),
            "labkit": sum(rooms.values()),
            "C++": cpp,
        }
        | others
    )


def budgets(root: Path, kind: str = "limit") -> dict[str, int]:
    """The limits (what was reached, and must not be exceeded) or the goals."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["tool"]["labkit"]["size"][kind]


def over_budget(lines: dict[str, int], allowed: dict[str, int]) -> list[str]:
    return [
        f"{name}: {lines[name]} of {most}" for name, most in allowed.items() if lines[name] > most
    ]


def long_signatures(root: Path) -> dict[str, int]:
    """Functions of labkit with more than seven parameters, command functions apart."""
    found = {}
    for path in sorted((root / "labkit").rglob("*.py")):
        if "cli" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = len([name for name in names if name.arg not in ("self", "cls")])
                if count > 7:
                    found[f"{path.relative_to(root / 'labkit').as_posix()}:{node.name}"] = count
    return found


def main() -> int:
    root = Path(__file__).parents[1]
    lines, allowed, goals = measure(root), budgets(root), budgets(root, "goal")
    for name, count in lines.items():
        budget = f" (limit {allowed[name]:,}, goal {goals[name]:,})" if name in allowed else ""
        print(f"{name:<16} {count:>7,}{budget}")
    for name, count in long_signatures(root).items():
        print(f"{count} parameters: {name}")
    broken = over_budget(lines, allowed)
    print("\n".join(f"over budget: {line}" for line in broken))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
