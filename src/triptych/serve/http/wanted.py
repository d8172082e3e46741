"""From the body of a request to what the engine is asked, and how the answer is shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from triptych.errors import DataError
from triptych.serve.engine.sampling import Grammar, Sampling
from triptych.serve.engine.source import ModelSource
from triptych.serve.engine.values import Ask
from triptych.serve.http.answer import Answer
from triptych.serve.http.bodies import ChatBody, CompletionBody, Generation, Message, ResponseFormat
from triptych.serve.http.errors import ApiError
from triptych.tokenizer.chat import ChatTemplate, load_chat_template
from triptych.tokenizer.load import load_tokenizer

DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI has it
_MOST_SEED = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The asks of one request, one for each prompt, and how their answers become text."""

    asks: tuple[Ask, ...]
    stop: tuple[str, ...]
    end_ids: frozenset[int]
    echo: bool = False
    is_prompt_only: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(len(ask.prompt) for ask in self.asks)

    def answers(self, tokenizer: Tokenizer, ask: Ask) -> list[Answer]:
        """The answers to a prompt, which have not begun."""
        return [
            Answer(
                tokenizer,
                ask.prompt,
                stop=self.stop,
                end_ids=self.end_ids,
                echo=self.echo,
                keeps_tokens=ask.sampling.logprobs is not None,
                is_prompt_only=self.is_prompt_only,
            )
            for _ in range(ask.n)
        ]


class Prompter:
    """Turns bodies into asks, with the tokenizer and the chat template of a model."""

    def __init__(self, source: ModelSource) -> None:
        self.tokenizer = source.tokenizer()
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self._end_ids = source.end_tokens()
        self._chat, self._no_chat = _chat_template(source.folder)

    def completion(self, body: CompletionBody, most_answers: int) -> Wanted:
        """What a completion wants. Raises ApiError or InputError for what cannot work."""
        prompts = self._prompts(body)
        if len(prompts) * body.n > most_answers:
            message = f"{len(prompts)} prompts with n = {body.n}; up to {most_answers} answers"
            raise ApiError(400, message, param="prompt")
        sampling = _sampling(body)
        most = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        is_prompt_only = most == 0 and body.echo and body.logprobs is not None
        if body.logprobs is not None:
            sampling = replace(sampling, logprobs=body.logprobs, prompt_logprobs=body.echo)
        asks = [
            Ask(id=0, prompt=ids, max_tokens=most or int(is_prompt_only), n=body.n,
                sampling=_of_prompt(sampling, place))
            for place, ids in enumerate(prompts)
        ]  # fmt: skip
        return self._wanted(body, asks, sampling, echo=body.echo, is_prompt_only=is_prompt_only)

    def chat(self, body: ChatBody) -> Wanted:
        """What a chat wants. Raises ApiError or InputError for what cannot work."""
        if self._chat is None:
            raise ApiError(400, f"this model has no chat: {self._no_chat}")
        try:
            ids = self._chat.prompt_ids([_as_message(each) for each in body.messages])
        except DataError as error:
            raise ApiError(400, str(error), param="messages") from error
        sampling = _sampling(body)
        if body.logprobs:
            sampling = replace(sampling, logprobs=body.top_logprobs or 0)
        if not body.ignore_eos:
            ends = sampling.stop_ids | (self._chat.end_ids - self._end_ids)
            sampling = replace(sampling, stop_ids=ends)
        most = body.max_completion_tokens
        most = body.max_tokens if most is None else most
        ask = Ask(id=0, prompt=ids, max_tokens=most, n=body.n, sampling=sampling)
        return self._wanted(body, [ask], sampling)

    def _wanted(
        self,
        body: Generation,
        asks: Sequence[Ask],
        sampling: Sampling,
        *,
        echo: bool = False,
        is_prompt_only: bool = False,
    ) -> Wanted:
        ends = frozenset() if body.ignore_eos else self._end_ids
        return Wanted(
            asks=tuple(asks),
            stop=tuple(body.stops),
            end_ids=ends | sampling.stop_ids,
            echo=echo,
            is_prompt_only=is_prompt_only,
        )

    def _prompts(self, body: CompletionBody) -> list[list[int]]:
        """Token ids of each prompt: texts by the tokenizer's own rule, ids as they are."""
        match body.prompt:
            case str(text):
                return [self._ids(text)]
            case [int(), *_] as ids:
                return [list(ids)]  # type: ignore[arg-type]
            case texts_or_ids:
                return [self._ids(p) if isinstance(p, str) else list(p) for p in texts_or_ids]  # type: ignore[arg-type]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids


def _chat_template(folder: Path) -> tuple[ChatTemplate | None, str]:
    """The chat template, or why there is none."""
    try:
        return load_chat_template(load_tokenizer(folder)), ""
    except DataError as error:
        return None, str(error)


def _as_message(message: Message) -> dict[str, str]:
    """A message as templates know it: the developer's is the system's."""
    role = message.role if message.role != "developer" else "system"
    return {"role": role, "content": message.text}


def _sampling(body: Generation) -> Sampling:
    """How tokens are chosen; OpenAI's defaults, which are not greedy."""
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k if body.top_k is not None and body.top_k > 0 else None,
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        logit_bias={int(key): bias for key, bias in (body.logit_bias or {}).items()},
        seed=None if body.seed is None else body.seed % _MOST_SEED,
        min_tokens=body.min_tokens,
        ignores_end=body.ignore_eos,
        stop_ids=frozenset(body.stop_token_ids or ()),
        grammar=_grammar(body.response_format),
    )


def _of_prompt(sampling: Sampling, place: int) -> Sampling:
    """Prompts of one request draw differently, the first one as if it were alone."""
    if sampling.seed is None or place == 0:
        return sampling
    return replace(sampling, seed=(sampling.seed + place * 1_000_003) % _MOST_SEED)


def _grammar(wanted: ResponseFormat | None) -> Grammar | None:
    match wanted:
        case None | ResponseFormat(type="text"):
            return None
        case ResponseFormat(type="json_object"):
            return Grammar(kind="json")
        case ResponseFormat(type="json_schema", json_schema=named):
            assert named is not None
            return Grammar(kind="json_schema", text=json.dumps(named.json_schema))
        case ResponseFormat(type="regex"):
            return Grammar(kind="regex", text=wanted.regex or "")
        case _:
            return Grammar(kind="lark", text=wanted.lark or "")
