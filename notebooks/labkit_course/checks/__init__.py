"""Checks of the exercises, one file per notebook; `check.py` says how to write one."""
