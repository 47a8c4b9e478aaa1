"""Count words in many files: a child for each file on any worker, then one step adds up.

holdfast dev map_reduce:app          # in this directory
holdfast enqueue count_all '{"folder": "docs"}'
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from holdfast import Flow, Holdfast

app = Holdfast("words")


def list_files(folder: str) -> list[str]:
    """What is in the folder now; a replay sees the same list."""
    return sorted(str(path) for path in Path(folder).rglob("*.md"))


@app.job
def count(path: str) -> dict[str, int]:
    """Count the words of one file."""
    return dict(Counter(Path(path).read_text().split()).most_common(100))


def add_up(counts: list[dict[str, int]]) -> dict[str, int]:
    """Add the counts of all files."""
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total.most_common(10))


@app.flow
async def count_all(ctx: Flow, folder: str) -> dict[str, int]:
    """The ten most common words of a folder; files that cannot be read are left out."""
    files = await ctx.step(list_files, folder)
    ends = await ctx.gather((count.request(path) for path in files), settled=True)
    return await ctx.step(add_up, [end.result for end in ends if end.result is not None])
