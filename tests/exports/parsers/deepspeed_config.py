"""python deepspeed_config.py FILE DATA_RANKS: what DeepSpeed's own parser makes of a JSON."""

import json
import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

from deepspeed.runtime.config import DeepSpeedConfig


class Ranks:
    """So many data ranks: all that the parser asks of a running job."""

    def get_data_parallel_world_size(self) -> int:
        return int(sys.argv[2])


import deepspeed.runtime.config as module

module.dist.get_rank = lambda *_: 0
read = DeepSpeedConfig(sys.argv[1], mpu=Ranks())
document = {
    "batch": read.train_batch_size,
    "microbatch": read.train_micro_batch_size_per_gpu,
    "accumulation": read.gradient_accumulation_steps,
    "zero": int(read.zero_optimization_stage),
    "bucket": read.zero_config.reduce_bucket_size,
    "offload": str(
        read.zero_config.offload_optimizer and read.zero_config.offload_optimizer.device
    ),
    "bf16": read.bfloat16_config.enabled,
    "reduction": str(read.communication_data_type),
    "tp": max(1, read.tensor_parallel_config.autotp_size),
    "ep": read.expert_parallel_config.autoep_size,
    "shards_activations": read.activation_checkpointing_config.partition_activations,
}
print(json.dumps(document))
