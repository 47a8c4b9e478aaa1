"""Finds the jobs of a project when Django is ready."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from asgiref.sync import sync_to_async
from django.apps import AppConfig
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import close_old_connections
from django.utils.module_loading import autodiscover_modules, import_string

from holdfast.app import Holdfast


class HoldfastConfig(AppConfig):
    """The Django app; its table is `holdfast_outbox`."""

    name = "holdfast.integrations.django"
    label = "holdfast"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Import the jobs of every app, and give each run fresh database connections."""
        autodiscover_modules("jobs")
        if getattr(settings, "HOLDFAST_APP", ""):
            for job in project_app().jobs.values():
                job.func = _with_fresh_connections(job.func, job.is_async)


def project_app() -> Holdfast:
    """The app that the setting `HOLDFAST_APP` names."""
    target = str(getattr(settings, "HOLDFAST_APP", ""))
    try:
        found = import_string(target.replace(":", "."))
    except ImportError as error:
        raise ImproperlyConfigured(
            f"HOLDFAST_APP = {target!r} must name your app as module:object, such as "
            f"'shop.tasks:app' ({error})"
        ) from None
    if not isinstance(found, Holdfast):
        raise ImproperlyConfigured(
            f"HOLDFAST_APP = {target!r} is a {type(found).__name__}, not a Holdfast app"
        )
    return found


def _with_fresh_connections(function: Callable[..., Any], is_async: bool) -> Callable[..., Any]:
    """Close connections that have expired around each call, as Django does for a web request.

    Connections belong to a thread, so this happens in the thread that runs the handler's queries.
    """
    if is_async:
        close = sync_to_async(close_old_connections)

        @functools.wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            await close()
            try:
                return await function(*args, **kwargs)
            finally:
                await close()

        return run_async

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        close_old_connections()
        try:
            return function(*args, **kwargs)
        finally:
            close_old_connections()

    return run
