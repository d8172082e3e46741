"""Serves prompts with the continuous batching of `transformers`, tuned for CPUs."""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from serve_jobs import answer_jobs


def main(folder: str) -> None:
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    batching = ContinuousBatchingConfig(
        num_blocks=200, page_size=32, max_batch_tokens=512, use_async_batching=False
    )

    def run(prompts: list[list[int]], count: int) -> tuple[list[list[int]], list[float]]:
        wanted = GenerationConfig(
            max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=-1
        )
        found = model.generate_batch(
            inputs=prompts,
            generation_config=wanted,
            continuous_batching_config=batching,
            progress_bar=False,
        )
        ordered = sorted(found.values(), key=lambda output: int(output.request_id.split("_")[-1]))
        return [list(output.generated_tokens) for output in ordered], []

    answer_jobs(run)


if __name__ == "__main__":
    main(sys.argv[1])
