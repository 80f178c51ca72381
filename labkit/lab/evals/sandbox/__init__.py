"""Run code that a model wrote in a process of its own, in the best isolation of this machine.

pool.py judges samples. isolation.py builds the isolation, grader.py runs the tests, child.py runs
the code, and ending.py ends every process of a sample. A sample that cannot be run is an error and
never a wrong answer.
"""
