"""Triptych plans, trains and serves large language models with hybrid parallelism.

The public functions live in `triptych.api` and load on first use, so that
`import triptych` and `triptych plan` stay fast and never import torch.
"""

from __future__ import annotations

__version__ = "0.1.0"
