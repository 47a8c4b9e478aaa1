"""The rules of `holdfast deploy check`: one module per concern, each with its `RULES`.

A rule takes the inventory of rendered files and yields problems: where, what is wrong and what to
do. Rules look at manifests only, so they also apply to files edited by hand or made by other tools.
"""
