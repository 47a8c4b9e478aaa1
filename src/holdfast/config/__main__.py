"""`python -m holdfast.config` prints the page `docs/configuration.md`."""

import sys

from holdfast.config.page import markdown

sys.stdout.write(markdown())
