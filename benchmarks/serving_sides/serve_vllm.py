"""Serves prompts with vLLM's CPU build at its best: compiled, both cores, its own libraries."""

from __future__ import annotations

import sys

from vllm import LLM, SamplingParams

from serve_jobs import answer_jobs


def main(folder: str) -> None:
    engine = LLM(
        folder,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=64,
        enable_prefix_caching=False,
        disable_log_stats=False,
    )

    def run(prompts: list[list[int]], count: int) -> tuple[list[list[int]], list[float]]:
        wanted = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = engine.generate(inputs, wanted, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs], []

    answer_jobs(run)


if __name__ == "__main__":
    main(sys.argv[1])
