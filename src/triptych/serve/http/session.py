"""One HTTP request from its asks to its answer, whole or as a stream of events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from tokenizers import Tokenizer

from triptych.errors import TriptychError
from triptych.serve.engine.values import Output, PromptLogprob
from triptych.serve.http.answer import Answer, Piece
from triptych.serve.http.client import Conversation, Refused
from triptych.serve.http.errors import of_failure
from triptych.serve.http.metrics import Stopwatch
from triptych.serve.http.replies import Choice, Reply
from triptych.serve.http.wanted import Wanted


class Told(NamedTuple):
    """A piece of a choice."""

    choice: int
    piece: Piece


class Session:
    """The answers to one request, which the engine has admitted."""

    def __init__(
        self,
        conversation: Conversation,
        wanted: Wanted,
        tokenizer: Tokenizer,
        reply: Reply,
        watch: Stopwatch,
    ) -> None:
        self._conversation, self._wanted, self._reply = conversation, wanted, reply
        self._watch = watch
        self._answers: dict[tuple[int, int], tuple[int, Answer]] = {}
        self._prompts: dict[int, tuple[PromptLogprob, ...]] = {}
        for ask in conversation.asks:
            for continuation, answer in enumerate(wanted.answers(tokenizer, ask)):
                self._answers[ask.id, continuation] = (len(self._answers), answer)

    async def whole(self) -> dict[str, Any]:
        """The answer at once. Raises TriptychError if the engine is lost."""
        choices = [Choice() for _ in self._answers]
        try:
            async for told in self._pieces():
                choices[told.choice].add(told.piece)
        finally:
            self.close()
        return self._reply.whole(choices, self.usage)

    async def events(self, includes_usage: bool) -> AsyncIterator[str]:
        """Server-sent events: an opening of each choice, its pieces, usage if wanted, the end."""
        frame = self._reply.frame
        try:
            for index in range(len(self._answers)):
                if (opening := self._reply.opening(index)) is not None:
                    yield _event(frame([opening], None), includes_usage)
            async for index, piece in self._pieces():
                if piece.text or piece.tokens or piece.finish:
                    chunk = self._reply.chunk(index, piece)
                    yield _event(frame([chunk], None), includes_usage)
            if includes_usage:
                yield _event(frame([], self.usage), True)
        except (TriptychError, Refused) as error:
            yield f"data: {json.dumps(of_failure(error).document)}\n\n"
        finally:
            self.close()
        yield "data: [DONE]\n\n"

    @property
    def usage(self) -> dict[str, int]:
        """Tokens so far: of each prompt once, of all answers."""
        prompt = self._wanted.num_prompt_tokens
        answers = sum(answer.num_tokens for _, answer in self._answers.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answers,
            "total_tokens": prompt + answers,
        }

    def close(self) -> None:
        """Nobody listens any more, or all has been said."""
        if self._conversation.close():
            self._watch.left()
        self._watch.ended(self.usage["completion_tokens"], len(self._answers))

    async def _pieces(self) -> AsyncIterator[Told]:
        async for outputs in self._conversation.outputs():
            self._watch.heard(outputs)
            for output in outputs:
                yield self._told(output)

    def _told(self, output: Output) -> Told:
        index, answer = self._answers[output.request_id, output.continuation]
        piece = answer.add(self._with_prompt(output))
        if piece.finish is not None:
            self._conversation.stop(output.request_id, output.continuation)
        return Told(index, piece)

    def _with_prompt(self, output: Output) -> Output:
        """What the model thought of a prompt comes once and is for all its continuations."""
        if not self._wanted.echo:
            return output
        if output.prompt:
            self._prompts[output.request_id] = output.prompt
        return output._replace(prompt=self._prompts.get(output.request_id, ()))


def _event(document: dict[str, Any], has_usage: bool) -> str:
    if not has_usage:
        del document["usage"]
    return f"data: {json.dumps(document)}\n\n"


class EventStream(StreamingResponse):
    """A stream of events that ends its session however it ends itself."""

    media_type = "text/event-stream"

    def __init__(self, session: Session, events: AsyncIterator[str]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._session = session

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._session.close()
