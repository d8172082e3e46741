"""Serving on real processes: makes the helpers here and the engine of the pure tests importable."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "pure" / "serve")]
