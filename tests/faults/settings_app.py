"""Jobs that use a secret from the settings, and fail while holding it."""

from __future__ import annotations

from holdfast import Backoff, Context, Holdfast

app = Holdfast("settings")


@app.job
async def login(ctx: Context) -> str:
    """Uses the secret as it should."""
    ctx.logger.info("logging in with %s", ctx.settings)
    return f"{ctx.settings['db.host']} at revision {ctx.settings.revision}"


@app.job(retry=Backoff.never())
async def leak(ctx: Context) -> None:
    """Does what drivers do: puts the password into its error, and logs it."""
    password = ctx.settings["db.password"]
    ctx.logger.error("cannot log in with %r", {"password": password})
    await ctx.progress(0.5, f"trying {password}")
    raise ConnectionError(f"postgres://app:{password}@db1: authentication failed")
