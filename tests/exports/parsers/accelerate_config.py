"""python accelerate_config.py FILE: what accelerate's own loader and launcher make of a YAML."""

import json
import sys

from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

read = load_config_from_file(sys.argv[1])
words = ["--config_file", sys.argv[1], "train.py"]
arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
document = {
    "kind": str(read.distributed_type.value),
    "processes": arguments.num_processes,
    "machines": arguments.num_machines,
    "precision": arguments.mixed_precision,
    "version": arguments.fsdp_version,
    "reshards": str(arguments.fsdp_reshard_after_forward).lower(),
    "recompute": str(arguments.fsdp_activation_checkpointing).lower(),
    "shards": arguments.parallelism_config_dp_shard_size,
    "replicas": arguments.parallelism_config_dp_replicate_size,
    "tp": arguments.parallelism_config_tp_size,
    "cp": arguments.parallelism_config_cp_size,
}
print(json.dumps(document))
