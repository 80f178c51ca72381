"""`python -m labkit_course sync [--outputs] [--check]`, for authors of notebooks."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from labkit.errors import BadRequest


def main() -> int:
    """Run one command line and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m labkit_course")
    parser.add_argument("command", choices=["sync"])
    parser.add_argument("--outputs", action="store_true", help="take outputs from runs/quick/")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on differences")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[1])
    options = parser.parse_args()
    from labkit_course.sync import differs, scripts_of, sync

    if options.check:
        stale = [script.name for script in scripts_of(options.folder) if differs(script)]
        for name in stale:
            print(f"{name} and its .ipynb differ; run python -m labkit_course sync")
        return 1 if stale else 0
    try:
        runs = options.folder.parent / "runs" / "quick"
        changed = sync(options.folder, runs if options.outputs else None)
    except BadRequest as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(f"wrote {path}" for path in changed) or "nothing to do")
    return 0


if __name__ == "__main__":
    sys.exit(main())
