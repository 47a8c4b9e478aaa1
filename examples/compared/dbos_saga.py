"""`examples/order_saga.py` with DBOS.

Postgres, and the program itself: workers are its threads.
"""

from __future__ import annotations

from dbos import DBOS, SetWorkflowID

ledger: list[str] = []


@DBOS.step()
def charge(id: str, card: str, total: int) -> str:
    ledger.append(f"charge {total} with {id}")
    return f"payment-{card}"


@DBOS.step()
def refund(payment: str) -> None:
    ledger.append(f"refund {payment}")


@DBOS.step()
def reserve(items: list[str]) -> list[str]:
    if "unicorn" in items:
        raise ValueError("out of stock: unicorn")
    ledger.append(f"reserve {len(items)}")
    return items


@DBOS.step()
def release(items: list[str]) -> None:
    ledger.append(f"release {len(items)}")


@DBOS.step(retries_allowed=True, max_attempts=3)
def ship_step(item: str) -> str:
    ledger.append(f"ship {item}")
    return f"parcel of {item}"


@DBOS.workflow()
def ship(item: str) -> str:
    return ship_step(item)


@DBOS.workflow()
def order(id: str, card: str, items: list[str]) -> list[str]:
    payment = charge(id, card, 10 * len(items))
    try:
        reserved = reserve(items)
        try:
            handles = [DBOS.enqueue_workflow("shipping", ship, item) for item in reserved]
            return [handle.get_result() for handle in handles]
        except Exception:
            release(reserved)
            raise
    except Exception:
        refund(payment)
        raise


def start(url: str) -> None:
    DBOS(config={"name": "saga", "system_database_url": url})
    DBOS.launch()
    DBOS.register_queue("shipping")


def send(id: str, card: str, items: list[str]) -> list[str]:
    with SetWorkflowID(id):
        return DBOS.start_workflow(order, id, card, items).get_result()
