"""Functions of Python's own as they were at the start: tests put others in their places.

They are attributes of a class, since pyfakefs looks for them among the globals of every module.
PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import json
import os


class Kept:
    """What the plugin calls while a test may have changed it for itself."""

    getpid, kill, listdir = staticmethod(os.getpid), staticmethod(os.kill), staticmethod(os.listdir)
    open, close = staticmethod(os.open), staticmethod(os.close)
    read, write, seek = staticmethod(os.read), staticmethod(os.write), staticmethod(os.lseek)
    dumps, loads = staticmethod(json.dumps), staticmethod(json.loads)
