"""Actions on pages: each has a confirmation that says what it would do, and a form that does it.

Role, effects, call and audit line come from the actions of `holdfast.status`; this module has
only the URLs, the form fields, and what the next page says. A URL answers GET with the confirmation
and POST with the action.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, NamedTuple
from urllib.parse import quote

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from holdfast.client.fleet import new_run
from holdfast.errors import HoldfastError, InvalidInput, NotFound, RunError, Unavailable
from holdfast.model.fleet import FleetRequest, FleetRun
from holdfast.status import actions as table
from holdfast.status import fleet_actions, schedule_actions
from holdfast.status.dead import GROUP_LOOK, Replayed, check_id
from holdfast.status.jobs import Purged
from holdfast.status.operators import Action
from holdfast.web.pages.rendering import Question, many
from holdfast.web.pages.request import AdminPage, OperatorPage, PageRequest, page_for
from holdfast.web.security import Fields

router = APIRouter(include_in_schema=False)

Given = dict[str, str]
"""The fields of a form; a repeated field has its values on separate lines."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Message = tuple[str, str, str]
"""Where to go after an action, what to say there, and whether that is `good` or `bad`."""


class Form(NamedTuple):
    """One action on the pages."""

    action: Action[..., Any]
    fields: tuple[str, ...]
    back: str
    """The page to return to, with form fields in its URL; refusals are shown there too."""
    done: Callable[[Any, Given], Message]
    read: Callable[[PageRequest, Given], Arguments] | None = None
    """Turns the fields into arguments; by default they are passed as they are."""
    refusals: tuple[type[HoldfastError], ...] = ()
    """Errors shown on that page, because they are no fault of the request."""
    asks: bool = True
    """Whether GET asks for its confirmation; long fields come by POST."""

    def arguments(self, page: PageRequest, given: Given) -> Arguments:
        for name in self.fields:
            if not given.get(name):
                raise InvalidInput(f"the field {name!r} is missing")
        if self.read:
            return self.read(page, given)
        return tuple(given[name] for name in self.fields), {}


def at(path: str, given: Given) -> str:
    """A URL with form fields filled in."""
    return path.format(**{name: quote(value, safe="/=") for name, value in given.items()})


def says(text: str, to: str) -> Callable[[Any, Given], Message]:
    """Go to a page and show a sentence with form fields filled in."""
    return lambda _, given: (at(to, given), text.format(**given), "good")


# ---- what the next page says


def _purged(done: Sequence[Purged], given: Given) -> Message:
    count = sum(one.waiting + one.parked for one in done)
    return "/jobs", f"{many(count, 'run')} of {given['job']} removed", "good"


def _cancelled(cancelled: bool, given: Given) -> Message:
    if cancelled:
        return at("/runs/{run}", given), "The run is cancelled", "good"
    return at("/runs/{run}", given), "The run had already ended: nothing was changed", "bad"


def _triggered(run: str, given: Given) -> Message:
    return at("/runs/{run}", {"run": run}), f"A run of {given['name']} was sent", "good"


def _letters(verb: str) -> Callable[[Sequence[Replayed], Given], Message]:
    def message(done: Sequence[Replayed], _: Given) -> Message:
        refused = [one for one in done if one.result not in ("replayed", "dropped")]
        text = f"{many(len(done) - len(refused), 'dead letter')} {verb}"
        if refused:
            text += f"; {len(refused)} not: {refused[0].why or 'already gone'}"
        return "/dead", text, "bad" if refused else "good"

    return message


def _commanded(record: FleetRun, _: Given) -> Message:
    to = at("/fleet/runs/{run}", {"run": record.run})
    return to, f"The command was sent to {many(len(record.targets), 'agent')}", "good"


def _stopped(record: FleetRun, given: Given) -> Message:
    to = at("/fleet/runs/{run}", given)
    if record.over and not record.cancelled_by:
        return to, f"The run had already ended ({record.status}): nothing was changed", "bad"
    return to, "The run is cancelled: agents that are running it stop", "good"


# ---- arguments


def _ids(page: PageRequest, given: Given) -> Arguments:
    """Dead letters; with a body, one letter and its new payload."""
    ids = given["id"].split()
    if not all(one.isascii() and one.isdigit() and len(one) < 19 for one in ids):
        raise InvalidInput("select at least one dead letter")
    if len(ids) > GROUP_LOOK:
        raise InvalidInput(f"at most {GROUP_LOOK:,} dead letters at once")
    edited = {"edited": given["body"].replace("\r\n", "\n").encode()} if "body" in given else {}
    return (sorted({check_id(int(one)) for one in ids}),), edited


def _run(page: PageRequest, given: Given) -> Arguments:
    """A run, and with a body its new payload."""
    edited = {"edited": given["body"].replace("\r\n", "\n").encode()} if "body" in given else {}
    return (given["run"],), edited


def _command(page: PageRequest, given: Given) -> Arguments:
    try:
        words = tuple(shlex.split(given.get("words", "")))
    except ValueError as error:
        raise InvalidInput(f"invalid arguments: {error}") from None
    run, target, function = given["run"], given["target"].strip(), given["function"].strip()
    return (FleetRequest(run, target, function, words, raw=True, user=page.user.name),), {}


def _joining(_: PageRequest, given: Given) -> Arguments:
    """The host that the page has shown; as a replacement only if the page said that it replaces
    another."""
    shown = {"fingerprint": given["fingerprint"], "replace": given["replace"] == "yes"}
    return (given["agent"],), shown


def _numbers(_: PageRequest, given: Given) -> Arguments:
    """The numbers of a limit as people write them: `5`, `100/s`, `100/s burst 20`, `code`."""
    name, text = given["name"], given["value"].strip()
    starts, _burst, burst = text.partition(" burst ")
    if text == "code":
        return (name,), {}
    if text.isascii() and text.isdigit() and len(text) < 9:
        return (name,), {"running": int(text)}
    if burst and not (burst.isascii() and burst.isdigit() and len(burst) < 9):
        raise InvalidInput(f"burst {burst!r} must be a whole number")
    return (name,), {"starts": starts.strip(), "burst": int(burst) if burst else None}


def _event(_: PageRequest, given: Given) -> Arguments:
    """The event that a flow waits for, with data as JSON."""
    body = given["data"].encode()
    try:
        msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidInput(f"the data is not JSON ({error}): a text needs quotes") from None
    return (given["event"], given["key"], body), {}


# ---- the forms

REPLAY: Final = Form(table.replay_dead, ("id",), "/dead", _letters("sent again"), _ids)
COMMAND: Final = Form(
    fleet_actions.command_fleet,
    ("target", "function", "run"),
    "/fleet",
    _commanded,
    _command,
    asks=False,
)
JOB: Final = ("job", "group")
FORMS: Final[dict[str, Form]] = {
    "jobs/pause": Form(table.pause_job, JOB, "/jobs", says("{job} is paused", "/jobs")),
    "jobs/resume": Form(table.resume_job, JOB, "/jobs", says("{job} is resumed", "/jobs")),
    "jobs/purge": Form(table.purge_job, JOB, "/jobs", _purged),
    "runs/cancel": Form(
        table.cancel_run, ("run",), "/runs/{run}", _cancelled, refusals=(RunError,)
    ),
    "runs/retry": Form(
        table.retry_run,
        ("run",),
        "/runs/{run}",
        lambda said, given: (at("/runs/{run}", given), said[:1].upper() + said[1:], "good"),
        _run,
        refusals=(RunError,),
    ),
    "flows/cancel": Form(
        table.cancel_flow,
        ("run",),
        "/flows/{run}",
        says("{run} is cancelled", "/flows/{run}"),
        refusals=(RunError,),
    ),
    "flows/resume": Form(
        table.resume_flow,
        ("run",),
        "/flows/{run}",
        says("{run} is resumed", "/flows/{run}"),
        refusals=(RunError, InvalidInput),
    ),
    "flows/signal": Form(
        table.signal_flow,
        ("event", "key", "data", "run"),
        "/flows/{run}",
        says("{event} was sent", "/flows/{run}"),
        _event,
        refusals=(InvalidInput,),
    ),
    "limits/set": Form(
        table.set_limit,
        ("name", "value"),
        "/limits/{name}",
        says("{name} is changed", "/limits/{name}"),
        _numbers,
        refusals=(InvalidInput,),
    ),
    "limits/pause": Form(
        table.pause_limit,
        ("name",),
        "/limits/{name}",
        says("{name} is paused", "/limits/{name}"),
        refusals=(InvalidInput,),
    ),
    "limits/resume": Form(
        table.resume_limit,
        ("name",),
        "/limits/{name}",
        says("{name} is resumed", "/limits/{name}"),
        refusals=(InvalidInput,),
    ),
    "schedules/pause": Form(
        schedule_actions.pause_schedule,
        ("name",),
        "/schedules/{name}",
        says("{name} is paused", "/schedules/{name}"),
    ),
    "schedules/resume": Form(
        schedule_actions.resume_schedule,
        ("name",),
        "/schedules/{name}",
        says("{name} is resumed", "/schedules/{name}"),
    ),
    "schedules/trigger": Form(
        schedule_actions.trigger_schedule, ("name",), "/schedules/{name}", _triggered
    ),
    "schedules/remove": Form(
        schedule_actions.remove_schedule,
        ("name",),
        "/schedules/{name}",
        says("{name} is removed", "/schedules"),
    ),
    "dead/replay": REPLAY,
    "dead/drop": Form(table.drop_dead, ("id",), "/dead", _letters("dropped"), _ids),
    "cluster/drain": Form(
        fleet_actions.drain_node,
        ("node",),
        "/cluster/{node}",
        says("{node} is draining: it stops when its runs have ended", "/cluster/{node}"),
        refusals=(NotFound,),
    ),
    "fleet/command": COMMAND,
    "fleet/cancel": Form(
        fleet_actions.cancel_fleet, ("run",), "/fleet/runs/{run}", _stopped, refusals=(Unavailable,)
    ),
    "fleet/accept": Form(
        fleet_actions.accept_agent,
        ("agent", "fingerprint", "replace"),
        "/fleet",
        says("{agent} is approved: it joins when its login is issued", "/fleet"),
        _joining,
        refusals=(InvalidInput, NotFound),
    ),
    "fleet/reject": Form(
        fleet_actions.reject_agent,
        ("agent",),
        "/fleet",
        says("{agent} is rejected", "/fleet"),
        refusals=(InvalidInput, NotFound),
    ),
    "fleet/forget": Form(
        fleet_actions.forget_agent,
        ("agent",),
        "/fleet/agents/{agent}",
        says("{agent} is forgotten", "/fleet"),
        refusals=(InvalidInput,),
    ),
}


async def confirm(page: PageRequest, path: str, given: Given) -> Response:
    """The confirmation of an action."""
    form = FORMS[path]
    args, kwargs = form.arguments(page, given)
    preview = await form.action.preview(page, *args, **kwargs)
    hidden = [
        (name, one)
        for name, value in given.items()
        for one in (value.split() if name == "id" else [value])
    ]
    ids = given.get("id", "").split()
    question = Question(
        preview.title,
        preview.effects,
        form.action.button,
        f"/do/{path}",
        hidden,
        f"/dead/{ids[0]}" if len(ids) == 1 else at(form.back, given),
        form.action.danger,
        preview.listed,
    )
    return page.ask(question, path.partition("/")[0])


def _offer(path: str, form: Form) -> None:
    """Add the routes of one action."""
    allowed = Depends(page_for(form.action.role))

    async def ask(request: Request, page: Annotated[PageRequest, allowed]) -> Response:
        query = request.query_params
        given = {n: "\n".join(query.getlist(n)) for n in form.fields if n in query}
        return await confirm(page, path, given)

    async def act(page: Annotated[PageRequest, allowed], fields: Fields) -> Response:
        args, kwargs = form.arguments(page, fields)
        try:
            result = await form.action(page, *args, **kwargs)
        except form.refusals as error:
            return page.done(at(form.back, fields), str(error), "bad")
        return page.done(*form.done(result, fields))

    # FastAPI would look up the names of string annotations in the module.
    ask.__annotations__ = {"request": Request, "page": Annotated[PageRequest, allowed]}
    act.__annotations__ = {"page": Annotated[PageRequest, allowed], "fields": Fields}
    if form.asks:
        router.get(f"/do/{path}")(ask)
    router.post(f"/do/{path}")(act)


for _path, _form in FORMS.items():
    _offer(_path, _form)


@router.post("/do/dead/edit")
async def ask_edited(page: OperatorPage, fields: Fields) -> Response:
    """Confirm a replay with a new payload, which is too long for an address."""
    return await confirm(page, "dead/replay", fields)


@router.post("/do/fleet/ask")
async def ask_command(page: AdminPage, fields: Fields) -> Response:
    """Confirm a command; its id is chosen here, so sending the form twice is one run."""
    return await confirm(page, "fleet/command", fields | {"run": new_run()})
