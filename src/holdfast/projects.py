"""Sets Django up, in processes of a project that `manage.py` is not in.

The processes of `dev`, of `--processes` and of the pool are Python programs of their own. They
inherit DJANGO_SETTINGS_MODULE, but models can only be imported after `django.setup()`, which also
finds the jobs. Nothing happens in a program without that variable, or whose settings do not list
`holdfast.integrations.django`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any, Final

SETTINGS_VARIABLE: Final = "DJANGO_SETTINGS_MODULE"
OURS: Final = "holdfast.integrations.django"


def set_up_django() -> None:
    """Set up the project that the environment names; raises what its code raises."""
    if not os.environ.get(SETTINGS_VARIABLE) or importlib.util.find_spec("django") is None:
        return
    settings: Any = importlib.import_module("django.conf").settings
    apps: Any = importlib.import_module("django.apps").apps
    if not apps.apps_ready and any(name.startswith(OURS) for name in settings.INSTALLED_APPS):
        importlib.import_module("django").setup()
