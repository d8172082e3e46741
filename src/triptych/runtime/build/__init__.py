"""From a plan and a Hugging Face configuration to this rank's modules."""
