"""The version of this package: the only place that has it."""

__version__ = "0.1.0"
DISTRIBUTION = "holdfast-jobs"
"""What an index calls this package; `holdfast` there is another project's."""
