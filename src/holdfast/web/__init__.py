"""The API and the pages: watch and operate Holdfast from a browser or a program.

`holdfast web` runs it; `create_app` and `mount` put it into your own app; `Queue` is a FastAPI
dependency that sends runs. Needs the extra `web`: `pip install 'holdfast-jobs[web]'`.
"""

from holdfast.web.app import Queue, create_app, mount
from holdfast.web.auth import User

__all__ = ["Queue", "User", "create_app", "mount"]
