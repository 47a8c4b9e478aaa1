"""The API and the pages: see it and steer it from a browser or a program.

`holdfast web` runs it; `create_app` and `mount` put it into an app of your own; `Queue` is a
FastAPI dependency that sends runs. It needs the extra `web`: `pip install 'holdfast[web]'`.
"""

from holdfast.web.app import create_app, mount
from holdfast.web.auth import User
from holdfast.web.queue import Queue

__all__ = ["Queue", "User", "create_app", "mount"]
