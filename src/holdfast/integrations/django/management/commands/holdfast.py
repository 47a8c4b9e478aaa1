"""`manage.py holdfast …`: Holdfast's command line inside the Django project."""

from __future__ import annotations

from argparse import REMAINDER
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser

from holdfast.integrations.django.apps import project_app

WITH_APP = ("worker", "dev", "control", "scheduler", "schedules sync", "deploy register")
"""Commands that take the app first, which the settings name."""
RELAY = "holdfast.integrations.django.outbox:project_relay"


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
        from holdfast.cli import main

        project_app()
        main(with_target(options["arguments"], settings.HOLDFAST_APP))


def with_target(given: list[str], app: str) -> list[str]:
    """A command with the project's app or relay as its first argument, unless it names one."""
    for known in (*WITH_APP, "relay"):
        words = known.split()
        rest = given[len(words) :]
        if given[: len(words)] == words and (not rest or rest[0].startswith("-")):
            return [*words, RELAY if known == "relay" else app, *rest]
    return given
