"""`python -m labkit.runner sync [--outputs] [--check]`, for those who write notebooks."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from labkit.errors import BadRequest


def main() -> int:
    """Run one command line and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m labkit.runner")
    parser.add_argument("command", choices=["sync"])
    parser.add_argument("--outputs", action="store_true", help="take outputs from runs/quick/")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a pair differs")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[2] / "notebooks")
    options = parser.parse_args()
    from labkit.runner.sync import differs, sync

    try:
        if options.check:
            stale = [script.name for script in sorted(options.folder.glob("[0-9][0-9]_*.py")) if differs(script)]
            print("\n".join(f"{name} and its .ipynb differ; run python -m labkit.runner sync" for name in stale))
            return 1 if stale else 0
        changed = sync(options.folder, options.folder.parent / "runs" / "quick" if options.outputs else None)
    except BadRequest as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(f"wrote {path}" for path in changed) or "nothing to do")
    return 0


if __name__ == "__main__":
    sys.exit(main())
