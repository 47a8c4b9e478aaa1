"""A Django project: jobs that are found, `manage.py holdfast`, and runs that commit."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest

from holdfast.integrations.django.management.commands.holdfast import with_target
from holdfast.server import Server
from holdfast.server.process import free_ports
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

@app.job(execution="process")
def count(order: int) -> None:
    with Path("charged").open("a") as file:
        file.write(f"{Order.objects.filter(id=order).count()} counted\\n")

@app.job
def greet_all() -> str:
    return "hello"
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
from holdfast import SyncApp
from holdfast.integrations.django import outbox
from project.holdfast_app import app
from shop.jobs import charge, count, greet
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
with SyncApp(app) as shop:
    for fails in (False, True):
        try:
            with transaction.atomic():
                order = Order.objects.create(item="dinghy")
                transaction.on_commit(lambda: shop.enqueue(charge, order.id))
                transaction.on_commit(lambda: shop.enqueue(count, order.id))
                if fails:
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
def folder(tmp_path: Path) -> Path:
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


class Project:
    """A project on disk, and its `manage.py`."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.charged = folder / "charged"
        self._folder = folder
        self._environment = {**os.environ, "HOLDFAST_HEALTH_PORT": "0", **environment}

    async def manage(self, *arguments: str, **options: Any) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "manage.py",
            *arguments,
            cwd=self._folder,
            env=self._environment,
            **options,
        )


async def ended(*processes: asyncio.subprocess.Process) -> list[int]:
    """Their exit codes after SIGTERM."""
    for process in processes:
        process.terminate()
    return [await process.wait() for process in processes]


async def test_project_sends_what_it_commits(
    folder: Path, nats: Server, namespace: str, postgres: Postgres
) -> None:
    """The migration fits the model; committed runs are relayed and executed, others are not.

    Two worker processes and a process of their pool find the jobs and models by themselves.
    """
    port = str(postgres.port)
    project = Project(folder, PGPORT=port, HOLDFAST_NATS_URL=nats.url, HOLDFAST_NAMESPACE=namespace)
    for command in (["makemigrations", "holdfast", "--check"], ["migrate"], ["shell", "-c", BUY]):
        assert await (await project.manage(*command)).wait() == 0, command
    processes = [
        await project.manage("holdfast", "relay"),
        await project.manage("holdfast", "worker", "--processes", "2"),
    ]
    charged = project.charged
    try:
        await until(lambda: charged.exists() and len(charged.read_text().split("\n")) > 6)
    finally:
        codes = await ended(*processes)
    assert sorted(charged.read_text().splitlines()) == [
        "1 counted",
        "anchor",
        "compass",
        "dinghy",
        "hello anchor",
        "hello compass",
    ]
    assert codes == [0, 0]


async def test_dev_finds_the_jobs(folder: Path, namespace: str) -> None:
    """The processes that `manage.py holdfast dev` starts are programs of their own."""
    (port,) = free_ports(1)
    url = f"nats://127.0.0.1:{port}"
    project = Project(folder, PGPORT="1", HOLDFAST_NATS_URL=url, HOLDFAST_NAMESPACE=namespace)
    dev = await project.manage("holdfast", "dev", "--no-web", "--port", str(port), stdout=PIPE)
    try:
        assert dev.stdout
        assert b"project.holdfast_app:app runs on" in await dev.stdout.readline()
        asking = await project.manage("holdfast", "enqueue", "greet_all", "--wait", stdout=PIPE)
        answer, _ = await asking.communicate()
    finally:
        codes = await ended(dev)
    assert answer == b'"hello"\n'
    assert codes == [0]


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("worker", "worker shop.app:app"),
        ("scheduler --health-port 0", "scheduler shop.app:app --health-port 0"),
        ("schedules sync", "schedules sync shop.app:app"),
        ("worker other:app", "worker other:app"),
        ("relay", "relay holdfast.integrations.django.outbox:project_relay"),
        ("relay shop.db:orders", "relay shop.db:orders"),
        ("runs list", "runs list"),
    ],
)
def test_app_of_the_settings_is_filled_in(given: str, made: str) -> None:
    """Unless the command names one, or takes none."""
    assert with_target(given.split(), "shop.app:app") == made.split()
