"""A model read off its Hugging Face module: no weights, no downloads, tensors without memory."""
