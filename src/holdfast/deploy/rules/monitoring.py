"""Monitoring: no panel and no rule asks for a metric that nobody makes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from holdfast.deploy.inventory import Inventory, Item, Problem
from holdfast.deploy.promql import unknown


def rules(inventory: Inventory) -> Iterator[Problem]:
    """Alert rules name metrics that exist, and say what they mean."""
    for item in inventory.of("PrometheusRule"):
        for group in item.spec.get("groups") or []:
            for rule in group.get("rules") or []:
                for name in unknown(str(rule.get("expr", ""))):
                    yield item.problem(f"rule {rule.get('alert')}: there is no metric {name!r}")
                if not (rule.get("annotations") or {}).get("summary"):
                    yield item.problem(f"rule {rule.get('alert')}: it has no summary")


def panels(inventory: Inventory) -> Iterator[Problem]:
    """Panels name metrics that exist."""
    for item in inventory.of("ConfigMap"):
        if "grafana_dashboard" not in item.labels:
            continue
        for name, text in (item.resource.get("data") or {}).items():
            yield from _of_dashboard(item, name, text)


def _of_dashboard(item: Item, name: str, text: str) -> Iterator[Problem]:
    try:
        board = json.loads(text)
    except ValueError as error:
        yield item.problem(f"{name} is not JSON: {error}")
        return
    for title, expression in expressions(board):
        for metric in unknown(expression):
            yield item.problem(f"{name}, panel {title!r}: there is no metric {metric!r}")


def expressions(board: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Every expression of a dashboard with its panel's title."""
    for panel in board.get("panels") or []:
        for target in panel.get("targets") or []:
            yield str(panel.get("title")), str(target.get("expr", ""))


RULES = (rules, panels)
