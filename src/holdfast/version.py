"""The version of this package: the only place that has it."""

__version__ = "0.1.0"
DISTRIBUTION = "holdfast-jobs"
"""The name of this package on PyPI, where `holdfast` is another project."""
