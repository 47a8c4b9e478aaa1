"""Creates the table of the outbox."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    """The first version."""

    initial = True
    dependencies = ()
    operations = (
        migrations.CreateModel(
            name="OutboxRow",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("job", models.CharField(max_length=128)),
                ("run", models.CharField(max_length=400)),
                ("order_key", models.CharField(max_length=400, null=True)),
                ("entry", models.BinaryField()),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("error", models.TextField(null=True)),
            ],
            options={"db_table": "holdfast_outbox", "verbose_name": "outbox row"},
        ),
    )
