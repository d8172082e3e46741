"""Text to token ids and back: tokenizer files, and the chat templates in them."""
