"""`examples/order_saga.py` with Temporal.

A Temporal server with its database, and a worker process.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError, ChildWorkflowError
from temporalio.worker import Worker

QUEUE = "saga"
TIMEOUT = timedelta(minutes=5)
ledger: list[str] = []


@activity.defn
async def charge(id: str, card: str, total: int) -> str:
    ledger.append(f"charge {total} with {id}")
    return f"payment-{card}"


@activity.defn
async def refund(payment: str) -> None:
    ledger.append(f"refund {payment}")


@activity.defn
async def reserve(items: list[str]) -> list[str]:
    if "unicorn" in items:
        raise ApplicationError("out of stock: unicorn", non_retryable=True)
    ledger.append(f"reserve {len(items)}")
    return items


@activity.defn
async def release(items: list[str]) -> None:
    ledger.append(f"release {len(items)}")


@activity.defn
async def ship(item: str) -> str:
    ledger.append(f"ship {item}")
    return f"parcel of {item}"


@workflow.defn
class Order:
    @workflow.run
    async def run(self, id: str, card: str, items: list[str]) -> list[str]:
        total = 10 * len(items)
        payment = await workflow.execute_activity(
            charge, args=[id, card, total], start_to_close_timeout=TIMEOUT
        )
        undo = [(refund, payment)]
        try:
            reserved = await workflow.execute_activity(
                reserve, items, start_to_close_timeout=TIMEOUT
            )
            undo.append((release, reserved))
            shipped = [
                workflow.execute_activity(
                    ship,
                    item,
                    start_to_close_timeout=TIMEOUT,
                    retry_policy=RetryPolicy(maximum_attempts=3),
                )
                for item in reserved
            ]
            return list(await asyncio.gather(*shipped))
        except (ActivityError, ChildWorkflowError):
            for compensate, value in reversed(undo):
                await workflow.execute_activity(compensate, value, start_to_close_timeout=TIMEOUT)
            raise


def worker(client: Client) -> Worker:
    activities = [charge, refund, reserve, release, ship]
    return Worker(client, task_queue=QUEUE, workflows=[Order], activities=activities)


async def send(client: Client, id: str, card: str, items: list[str]) -> list[str]:
    return await client.execute_workflow(Order.run, args=[id, card, items], id=id, task_queue=QUEUE)
