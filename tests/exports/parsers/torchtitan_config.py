"""python torchtitan_config.py ARGUMENTS...: what torchtitan's own parser makes of them."""

import dataclasses
import json
import sys

from torchtitan.config import ConfigManager

read = ConfigManager().parse_args(sys.argv[1:])
names = [name for name in ("model", "training", "parallelism", "compile") if hasattr(read, name)]
print(json.dumps({name: dataclasses.asdict(getattr(read, name)) for name in names}))
