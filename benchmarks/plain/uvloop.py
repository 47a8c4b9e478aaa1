"""First on the path of subjects that are measured as installed, without uvloop."""

raise ImportError("measured without uvloop")
