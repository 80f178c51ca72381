"""The `labkit` command: parse, call the lab, print, exit 0 / 1 / 2.

0: it ran and the answer is yes. 1: it ran and the answer is no. 2: the request cannot be carried out; one
sentence on stderr says what was wrong and what would be right. 130: interrupted. A traceback is a bug.

Nothing heavy is imported here or in the command files: each command imports what it needs when it runs,
so that `labkit --help` answers at once.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Sequence
from difflib import get_close_matches

from labkit.errors import BadRequest

MAY_BE_EMPTY = ("--prompt", "--formats", "--peers")  # the empty text, and a list of nothing


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    from labkit.cli import answer

    answer.stdout = sys.stdout
    try:
        # With --json everything but the object itself goes to stderr, whoever prints it.
        with contextlib.redirect_stdout(sys.stderr) if "--json" in arguments else contextlib.nullcontext():
            with warnings.catch_warnings():
                warnings.showwarning = lambda message, *where, **more: _complain(message)
                return _run(arguments or ["--help"])
    except BadRequest as error:
        return _complain(error)
    except FileNotFoundError as error:
        return _complain(f"there is no file {error.filename!r}" if error.filename else error)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        with contextlib.suppress(OSError):
            sys.stdout.close()
        return 0
    except OSError as error:
        return _complain(error, status=1)
    except KeyboardInterrupt:
        return _complain("interrupted", status=130)


def _run(arguments: list[str]) -> int:
    import typer

    from labkit.cli.app import app

    for option, value in zip(arguments, [*arguments[1:], None]):
        option, value = (option[:-1], "") if option.startswith("--") and option.endswith("=") else (option, value)
        if value == "" and option.startswith("--") and option not in MAY_BE_EMPTY:  # an unset variable of a script
            raise BadRequest(f"{option} is empty; give it a value, or leave it out for its default")
    command = typer.main.get_command(app)
    try:
        status = command.main(arguments, prog_name="labkit", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except Exception as error:
        if not hasattr(error, "format_message"):  # not typer's own complaint about the request
            raise
        return _complain(_sentence(error, arguments))
    return status if isinstance(status, int) else 0


def _sentence(error, arguments: list[str]) -> str:
    """typer's usage error as one sentence with a suggestion and where to read on."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "labkit"
    text = " ".join(error.format_message().split()).rstrip(".")
    given, known = "", []
    if hasattr(error, "option_name") and hasattr(error, "possibilities"):
        given = error.option_name
        known = [option for parameter in context.command.params for option in parameter.opts] if context else []
        text = f"{path} has no option {given}"
    elif text == "Missing command":
        text = f"{path} needs a command: {', '.join(sorted(getattr(context.command, 'commands', {})))}"
    elif "No such command" in text:
        given = text.split("'")[1]
        known = list(getattr(context.command, "commands", {}))
        text = f"{path} has no command {given!r}; it has {', '.join(sorted(known))}"
    else:
        named = [option for option in getattr(getattr(error, "param", None), "opts", ()) if option in arguments]
        # given twice, the last counts
        value = arguments[len(arguments) - arguments[::-1].index(named[0]) :][:1] if named else []
        if value and "nvalid value" in text:  # typer does not say what was given
            text = f"{named[0]} {value[0]!r} is not allowed: {text.partition(': ')[2]}"
    near = get_close_matches(given, known, 1, 0.5) if known else []
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{text}; {hint}See `{path} --help`" if hint else f"{text}; see `{path} --help`"


def _complain(error: object, status: int = 2) -> int:
    text = " ".join(str(error).split()) or type(error).__name__
    print(f"labkit: {text if text.endswith(('.', '?', '`')) else text + '.'}", file=sys.stderr)
    return status
