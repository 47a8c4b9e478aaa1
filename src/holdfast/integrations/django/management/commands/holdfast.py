"""`manage.py holdfast …`: Holdfast's command line inside the Django project."""

from __future__ import annotations

import sys
from argparse import REMAINDER
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser

from holdfast.integrations.django.apps import project_app

WITH_APP = frozenset({"worker", "dev", "control"})
"""Commands whose first argument is the app, which the settings name."""


class Command(BaseCommand):
    """Run a command of Holdfast with the project's app: `manage.py holdfast worker`."""

    help = (
        "Run 'holdfast COMMAND' with the app of HOLDFAST_APP: worker, dev, control, runs, …; "
        "'relay' sends what waits in the outbox."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Everything after the command's name goes to it."""
        parser.add_argument("arguments", nargs=REMAINDER, metavar="COMMAND …")

    def handle(self, *args: Any, **options: Any) -> None:
        """Run it; the exit code is the command's."""
        given: list[str] = options["arguments"]
        if given[:1] == ["relay"]:
            sys.exit(_relay())
        from holdfast.cli import main

        if given and given[0] in WITH_APP:
            project_app()
            given = [given[0], settings.HOLDFAST_APP, *given[1:]]
        main(given)


def _relay() -> int:
    from holdfast.integrations.django.outbox import Relay
    from holdfast.process import run_role

    return run_role(lambda: Relay(project_app()))
