"""The server: OpenAI's HTTP interface before an engine in a process of its own."""
