"""Training runs on real ranks: makes the helpers here and the sample jobs importable."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "pure" / "train")]
