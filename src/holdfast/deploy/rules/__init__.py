"""What `holdfast deploy check` looks for: one module for each concern, each with its `RULES`.

A rule takes the inventory of what was rendered and yields problems: where, and a sentence that says
what is wrong and what to do. Rules look at manifests only, so they hold for files that were edited
or made by other means, too.
"""
