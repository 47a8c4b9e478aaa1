"""DBOS: a queue in Postgres, partitioned by customer, three at a time of each.

Usage: `python -m benchmarks.subjects.dbos_jobs URL RUNS CUSTOMERS SECONDS`; prints the seconds from
the first start to the last end. It polls once a second, DBOS's default.
"""

from __future__ import annotations

import sys
import time

from dbos import DBOS, SetEnqueueOptions

times: list[float] = []


@DBOS.workflow()
def work(seconds: float) -> None:
    times.append(time.monotonic())
    time.sleep(seconds)
    times.append(time.monotonic())


def main() -> None:
    url, runs, customers, seconds = sys.argv[1:]
    DBOS(config={"name": "bench", "system_database_url": url, "log_level": "ERROR"})
    DBOS.launch()
    DBOS.register_queue("customers", partition_concurrency=3)
    handles = []
    for number in range(int(runs)):
        with SetEnqueueOptions(queue_partition_key=f"c{number % int(customers)}"):
            handles.append(DBOS.enqueue_workflow("customers", work, float(seconds)))
    for handle in handles:
        handle.get_result()
    print(max(times) - min(times))
    DBOS.destroy()


if __name__ == "__main__":
    main()
