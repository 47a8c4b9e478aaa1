"""What `benchmarks.fleet` must show: each figure beside its goal, and a verdict for all."""

from __future__ import annotations

from benchmarks.fleet_stage import say


class Goals:
    """Prints a line for each goal; `missed` has those that were not met."""

    def __init__(self) -> None:
        self.missed: list[str] = []

    def check(self, met: bool, text: str) -> None:
        say("PASS" if met else "FAIL", text)
        if not met:
            self.missed.append(text)

    def below(self, what: str, figure: float, most: float, unit: str = "s") -> None:
        self.check(figure < most, f"{what}: {figure:.2f} {unit}, goal: below {most:g} {unit}")

    def once(self, what: str, told: dict[str, float], agents: int) -> None:
        """Every agent executed it, and none twice."""
        ran, times = int(told["agents"]), int(told["executions"])
        self.check(
            ran == times == agents,
            f"{what}: {ran:,} of {agents:,} agents executed it, {times:,} times",
        )
