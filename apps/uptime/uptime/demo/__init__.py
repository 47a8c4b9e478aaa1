"""The monitor on one machine, with everything that can go wrong: `make demo`, and its own tests.

This part is no monitor: it starts a server and processes, kills them and counts, so it may use more
of Holdfast than its public API.
"""
