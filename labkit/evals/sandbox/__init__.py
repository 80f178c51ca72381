"""Running code that a model wrote: in a process of its own, behind the best walls that this machine offers.

pool.py judges samples, isolation.py finds the walls, grader.py holds the tests, child.py runs the code, ending.py leaves
nothing behind. A sample that cannot be run is an error and never a wrong answer.
"""

from labkit.evals.sandbox.isolation import ALLOW, BUBBLEWRAP, Isolation, SandboxUnavailable, best_isolation
from labkit.evals.sandbox.pool import Limits, Sample, Verdict, check, check_all

__all__ = [
    "ALLOW", "BUBBLEWRAP", "Isolation", "Limits", "Sample", "SandboxUnavailable", "Verdict", "best_isolation", "check",
    "check_all",
]  # fmt: skip
