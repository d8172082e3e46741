"""python torchtitan_config.py FILE: what torchtitan's own parser makes of a TOML."""

import dataclasses
import json
import sys

from torchtitan.config import ConfigManager

read = ConfigManager().parse_args(["--job.config_file", sys.argv[1]])
names = ("model", "training", "parallelism", "activation_checkpoint", "compile")
print(json.dumps({name: dataclasses.asdict(getattr(read, name)) for name in names}))
