"""Training tests: makes `job_samples.py` importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
