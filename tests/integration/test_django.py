"""A Django project: jobs that are found, `manage.py holdfast`, and runs that commit."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from holdfast.server import Server
from tests.postgres import Postgres
from tests.support import until

SETTINGS = """
import os
INSTALLED_APPS = ["holdfast.integrations.django", "shop"]
HOLDFAST_APP = "project.holdfast_app:app"
DATABASES = {"default": {
    "ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "USER": "shop",
    "HOST": "127.0.0.1", "PORT": os.environ["PGPORT"], "CONN_MAX_AGE": 60,
}}
USE_TZ = True
"""

JOBS = """
from pathlib import Path
from project.holdfast_app import app
from shop.models import Order

@app.job
def charge(order: int) -> None:
    with Path("charged").open("a") as file:
        file.write(f"{Order.objects.get(id=order).item}\\n")

@app.job
async def greet(order: int) -> None:
    found = await Order.objects.aget(id=order)
    with Path("charged").open("a") as file:
        file.write(f"hello {found.item}\\n")
"""

MODELS = """
from django.db import models
class Order(models.Model):
    item = models.CharField(max_length=50)
    class Meta:
        app_label = "shop"
"""

BUY = """
from django.db import connection, transaction
from holdfast.integrations.django import outbox
from shop.jobs import charge, greet
from shop.models import Order
with connection.schema_editor() as editor:
    editor.create_model(Order)
for item in ("anchor", "broken", "compass"):
    try:
        with transaction.atomic():
            order = Order.objects.create(item=item)
            outbox.enqueue(charge, order.id)
            outbox.ordered(item).enqueue(greet.options(key=item), order.id)
            if item == "broken":
                raise ValueError
    except ValueError:
        pass
"""

MANAGE = """
import os, sys
os.environ["DJANGO_SETTINGS_MODULE"] = "project.settings"
from django.core.management import execute_from_command_line
execute_from_command_line(sys.argv)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {
        "manage.py": MANAGE,
        "project/__init__.py": "",
        "project/settings.py": SETTINGS,
        "project/holdfast_app.py": "from holdfast import Holdfast\napp = Holdfast('shop')\n",
        "shop/__init__.py": "",
        "shop/jobs.py": JOBS,
        "shop/models.py": MODELS,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


async def test_project_sends_what_it_commits(
    project: Path, nats: Server, namespace: str, postgres: Postgres
) -> None:
    """The migration fits the model; committed runs are relayed and executed, others are not."""
    environment = {
        **os.environ,
        "PGPORT": str(postgres.port),
        "HOLDFAST_NATS_URL": nats.url,
        "HOLDFAST_NAMESPACE": namespace,
        "HOLDFAST_HEALTH_PORT": "0",
    }

    async def manage(*arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "manage.py", *arguments, cwd=project, env=environment
        )

    for command in (["makemigrations", "holdfast", "--check"], ["migrate"], ["shell", "-c", BUY]):
        assert await (await manage(*command)).wait() == 0, command
    charged = project / "charged"
    processes = [await manage("holdfast", "relay"), await manage("holdfast", "worker")]
    try:
        await until(lambda: charged.exists() and len(charged.read_text().split("\n")) > 4)
    finally:
        for process in processes:
            process.terminate()
        codes = [await process.wait() for process in processes]
    assert sorted(charged.read_text().splitlines()) == [
        "anchor",
        "compass",
        "hello anchor",
        "hello compass",
    ]
    assert codes == [0, 0]
