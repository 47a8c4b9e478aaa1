"""Holdfast on Kubernetes: projects, manifests, and checks of rendered manifests.

A project is a directory with `jobs/`; each directory in it that has a `pyproject.toml` is an app
with an image and a set of workers. Everything else follows from these directories: `render` writes
manifests, dashboards, alert rules and the script that applies them; `check` finds flaws in rendered
files, hand-written ones included; `scaffold` creates projects and jobs; `register` creates an app's
consumers before any worker runs.

Nothing here talks to a Kubernetes cluster.
"""
