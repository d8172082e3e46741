"""Imported last by the fork server: what is there by now is never garbage.

Ranks that collect garbage would otherwise look at every object of every module that was imported,
and with that copy the pages which they share.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
gc.enable()
