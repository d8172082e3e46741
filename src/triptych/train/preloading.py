"""Imported first by the fork server: imports make many objects and no garbage.

To look for it among them, again and again, is a tenth of their time.
"""

from __future__ import annotations

import gc

gc.disable()
