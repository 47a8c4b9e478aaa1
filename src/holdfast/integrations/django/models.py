"""The table of the outbox."""

from __future__ import annotations

from django.db import models


class OutboxRow(models.Model):
    """A run that waits to be sent. Rows are deleted once they are sent.

    Those that the server refused stay, with the reason in `error`:

        OutboxRow.objects.exclude(error=None).update(error=None)  # have them sent again
    """

    id = models.BigAutoField(primary_key=True)
    job = models.CharField(max_length=128)
    run = models.CharField(max_length=400)
    order_key = models.CharField(max_length=400, null=True)
    entry = models.BinaryField()
    created_at = models.DateTimeField(auto_now_add=True)
    error = models.TextField(null=True)
    """Why it cannot be sent; such a row is left alone until this is set to NULL."""

    class Meta:
        db_table = "holdfast_outbox"
        verbose_name = "outbox row"
