"""`examples/order_saga.py` in Celery's canvas.

A broker (here Redis), a result backend, and `celery -A celery_saga worker`.
"""

from __future__ import annotations

from typing import Any

from celery import Celery, chain, chord

app = Celery("saga", broker="redis://localhost", backend="redis://localhost")
app.conf.task_acks_late = True
app.conf.task_reject_on_worker_lost = True
ledger: list[str] = []


@app.task
def charge(id: str, card: str, total: int) -> str:
    ledger.append(f"charge {total} with {id}")
    return f"payment-{card}"


@app.task
def refund(id: str, card: str) -> None:
    ledger.append(f"refund payment-{card}")


@app.task
def reserve(payment: str, items: list[str]) -> list[str]:
    if "unicorn" in items:
        raise ValueError("out of stock: unicorn")
    ledger.append(f"reserve {len(items)}")
    return items


@app.task
def release(items: list[str]) -> None:
    ledger.append(f"release {len(items)}")


@app.task(autoretry_for=(Exception,), retry_backoff=1, max_retries=2)
def ship(item: str) -> str:
    ledger.append(f"ship {item}")
    return f"parcel of {item}"


@app.task
def shipped(parcels: list[str]) -> list[str]:
    return parcels


def order(id: str, card: str, items: list[str]) -> Any:
    back = refund.si(id, card)
    both = chain(release.si(items), back)
    parcels = chord([ship.si(item) for item in items], shipped.s().on_error(both))
    paid = charge.s(id, card, 10 * len(items))
    return chain(paid, reserve.s(items).on_error(back), parcels).apply_async(task_id=id)
