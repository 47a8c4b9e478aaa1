"""Summaries by a language model: retries, and at most five calls a second over all workers.

    holdfast dev llm_pipeline:app    # in this directory
    holdfast enqueue digest '{"texts": ["one", "two"]}'

The model is a function here; put the call of your provider into `complete`. Each call is a child
run under a limit, so calls that wait for the rate hold no worker, and a crash repeats no paid call
whose answer is stored.
"""

from __future__ import annotations

from holdfast import Backoff, Flow, Holdfast

app = Holdfast("digest")
calls = app.limit("llm", starts="5/s", burst=5)
prompts: list[str] = []


async def complete(prompt: str) -> str:
    """Ask the model."""
    prompts.append(prompt)
    if prompt.endswith("flaky") and prompts.count(prompt) == 1:
        raise ConnectionError("the provider is overloaded")
    return prompt.rpartition(": ")[2].upper()


@app.job(limits=[calls], retry=Backoff.exponential("2s", attempts=5))
async def ask(prompt: str) -> str:
    """One call, repeated while the provider is overloaded."""
    return await complete(prompt)


@app.flow(timeout="1h")
async def digest(ctx: Flow, texts: list[str]) -> str:
    """Summarise each text, then all of them."""
    parts = await ctx.gather(ask.request(f"summarise: {text}") for text in texts)
    await ctx.progress(0.9, f"{len(parts)} of {len(texts)} summarised")
    return await ctx.call(ask.request(f"combine: {' '.join(parts)}"))
