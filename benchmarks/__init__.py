"""Benchmarks: Holdfast beside its peers and two raw loops, in one run on one machine.

`python -m benchmarks` (that is `make bench`) measures; `subjects/` holds what is measured, each in
processes of its own. Nothing in `subjects/`, `tally.py` and `sending.py` imports Holdfast unless it
is the subject, because peers run in an environment where it is not installed.
"""
