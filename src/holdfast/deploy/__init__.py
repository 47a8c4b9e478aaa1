"""Holdfast on Kubernetes: projects, manifests, and the check of what was rendered.

A project is a directory with `jobs/`; each directory in it that has a `pyproject.toml` is an app of
its own, an image and a set of workers. Everything else follows from these directories: `render`
writes manifests, dashboards, alert rules and the script that applies them; `check` reads what was
written, by whomever, and says what is wrong with it; `scaffold` makes new projects and jobs;
`register` makes an app's consumers before any worker runs.

Nothing here talks to a Kubernetes cluster.
"""
