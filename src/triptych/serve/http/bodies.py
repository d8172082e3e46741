"""The bodies of requests, as OpenAI's documentation has them, with what vLLM's users add.

Types are strict and unknown keys are refused, unless they are null or say nothing about the answer.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

MOST_CHOICES = 128
MOST_STOPS = 16
_SAYS_NOTHING = {"user", "metadata", "store", "safety_identifier"} | {
    "prompt_cache_key", "parallel_tool_calls", "prediction", "verbosity", "reasoning_effort"
}  # fmt: skip


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half a surrogate pair at character {error.start}") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
TokenIds = list[int]


class Body(BaseModel):
    """Refuses keys that it does not know; those that are null or `ignored` count as absent."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _without_ignored(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = cls.model_fields
        return {
            key: value
            for key, value in given.items()
            if key not in cls.ignored and (value is not None or key in known)
        }


class JsonSchema(Body):
    """A schema with its name."""

    ignored = frozenset({"name", "description", "strict"})
    name: Text | None = None
    json_schema: dict[str, Any] | bool = Field(default=True, alias="schema")


class ResponseFormat(Body):
    """What an answer must look like; `regex` and `lark` beside OpenAI's kinds."""

    type: Literal["text", "json_object", "json_schema", "regex", "lark"]
    json_schema: JsonSchema | None = None
    regex: Text | None = None
    lark: Text | None = None

    @model_validator(mode="after")
    def _has_its_part(self) -> Self:
        if self.type in ("json_schema", "regex", "lark") and getattr(self, self.type) is None:
            raise ValueError(f"type {self.type!r} needs the key {self.type!r}")
        return self


class StreamOptions(Body):
    """What a stream has besides the answer."""

    ignored = frozenset({"include_obfuscation"})
    include_usage: bool = False


class Generation(Body):
    """What both kinds of requests have in common."""

    ignored = frozenset(_SAYS_NOTHING)
    model: Text | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Text | list[Text] | None = None
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    response_format: ResponseFormat | None = None
    top_k: int | None = Field(default=None, ge=-1, description="-1 or 0: all tokens")
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    min_tokens: int = Field(default=0, ge=0)
    ignore_eos: bool = False
    service_tier: Text | None = Field(default=None, description="a latency class")
    stop_token_ids: TokenIds | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        stops = self.stops
        if not all(stops) or len(stops) > MOST_STOPS:
            raise ValueError(f"stop: up to {MOST_STOPS} texts of at least a character")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream = true")
        for key in self.logit_bias or {}:
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise ValueError(f"logit_bias: {key[:80]!r} is no token id")
        return self

    @property
    def stops(self) -> list[str]:
        """The stop texts."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(Generation):
    """`POST /v1/completions`."""

    prompt: Text | list[Text] | TokenIds | list[TokenIds]
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=20)

    @model_validator(mode="after")
    def _has_prompts(self) -> Self:
        if self.prompt == []:
            raise ValueError("prompt: an empty list; a text, token ids, or a list of them")
        return self


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: Text


class Message(Body):
    """A message of a dialogue."""

    ignored = frozenset({"annotations", "refusal"})  # of answers that are sent back
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    name: Text | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatBody(Generation):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=0)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @model_validator(mode="after")
    def _asks_consistently(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs = true")
        return self
