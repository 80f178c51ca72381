"""The `labkit` command: parse, call the lab, print, exit with a status.

    0      the command ran, and its answer is yes
    1      the command ran, and its answer is no; or it was ended
    2      the request is not valid; one line on stderr says why and what is allowed
    130    interrupted by the keyboard

A traceback is a bug. Nothing heavy is imported here or in the command files, so that
`labkit --help` answers at once. Each command imports what it needs when it runs.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Sequence

from labkit.errors import BadRequest

MAY_BE_EMPTY = ("--prompt", "--formats", "--peers")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    from labkit.lab.cli import answer

    answer.stdout = sys.stdout
    with contextlib.ExitStack() as stack:
        if "--json" in arguments:  # stdout then carries the object and nothing else
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        stack.enter_context(warnings.catch_warnings())
        warnings.showwarning = lambda message, *where, **more: _complain(message)
        try:
            return _run(arguments or ["--help"])
        except BadRequest as error:
            return _complain(error)
        except FileNotFoundError as error:
            return _complain(f"There is no file {error.filename!r}" if error.filename else error)
        except BrokenPipeError:  # the reader of the pipe has closed it
            with contextlib.suppress(OSError):
                sys.stdout.close()
            return 0
        except OSError as error:
            return _complain(error, status=1)
        except KeyboardInterrupt:
            return _complain("interrupted", status=130)


def _run(arguments: list[str]) -> int:
    import typer

    from labkit.lab.cli.app import app

    values = {}
    for argument, following in zip(arguments, [*arguments[1:], None]):
        option, equals, value = argument.partition("=")
        values[option] = value if equals else following
        if values[option] == "" and option.startswith("--") and option not in MAY_BE_EMPTY:
            # Usually a variable of a script is not set, and the default is not meant.
            raise BadRequest(f"{option} is empty; give it a value, or leave it out for its default")
    try:
        command = typer.main.get_command(app)
        return command.main(arguments, prog_name="labkit", standalone_mode=False) or 0
    except typer.Abort:
        raise KeyboardInterrupt from None
    except Exception as error:
        if not hasattr(error, "format_message"):  # not an error in the command line
            raise
        text = error.format_message().rstrip(".")
        for option in getattr(getattr(error, "param", None), "opts", ()):
            if values.get(option):
                text = f"{option} is {values[option]!r}: {error.message.replace('Input', 'it', 1)}"
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "labkit"
        return _complain(f"{text} (see `{path} --help`)")


def _complain(error: object, status: int = 2) -> int:
    text = " ".join(str(error).split()) or type(error).__name__
    print(f"labkit: {text if text.endswith(('.', '?')) else text + '.'}", file=sys.stderr)
    return status
