"""Dialogues as token ids, by the tokenizer's own chat template.

What is trained are the answers: from behind the words that ask for one (the template's generation
prompt) up to and with the token that ends it. So the ids before an answer are those that a server
gives the model when it asks for that answer.

    <|user|> Hello <|end|> <|assistant|> Good morning. <|end|>
                                         ^^^^^^^^^^^^^^^^^^^^^ trained
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from triptych.errors import DataError, Problem
from triptych.tokenizer.load import TextTokenizer, read_json, special_token

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")

Message = Mapping[str, Any]  # role and content


class EncodedDialogue(NamedTuple):
    """The ids of a dialogue, and which of them are answers."""

    ids: list[int]
    trained: list[bool]


class _Rendered(NamedTuple):
    """The text of a dialogue, and where in it answers stand."""

    text: str
    answers: list[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A tokenizer with its chat template; the text and the ids are those of stock `transformers`,
    with a begin-of-text token before them where the tokenizer sets one and the template does not.
    """

    tokenizer: TextTokenizer
    template: str
    special: Mapping[str, str]
    end_ids: frozenset[int]  # that end an answer

    @property
    def digest(self) -> str:
        """Of what decides the ids."""
        words = [self.tokenizer.digest, self.template, sorted(self.special), sorted(self.end_ids)]
        return hashlib.blake2b(repr(words).encode(), digest_size=16).hexdigest()

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The ids that ask for the next answer, as a server gives them to the model."""
        text = self.render(messages, add_generation_prompt=True)
        return [*self._start_ids(text), *self.tokenizer.encode([text])[0]]

    def encode(self, dialogues: Sequence[Sequence[Message]]) -> list[EncodedDialogue]:
        """The ids of whole dialogues, each ended by an end token if its last message is an answer.

        Raises DataError for a dialogue that the template refuses, or whose answers it rewrites.
        """
        rendered = [self._with_answers(messages) for messages in dialogues]
        texts = [one.text for one in rendered]
        encodings = self.tokenizer.tokenizer.encode_batch(texts, add_special_tokens=False)
        return [
            self._marked(one, encoding.ids, encoding.offsets)
            for one, encoding in zip(rendered, encodings, strict=True)
        ]

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The text of messages. Raises DataError with the template's own words."""
        return self._render(messages, False, add_generation_prompt)[0]

    def _render(
        self, messages: Sequence[Message], marks: bool, prompts: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        try:
            texts, spans = render_jinja_template(
                [list(messages)],
                chat_template=self.template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompts,
                **self.special,
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise DataError(f"the chat template refuses the messages: {error}") from None
        return texts[0], [(start, stop) for start, stop in spans[0]] if marks else []

    def _with_answers(self, messages: Sequence[Message]) -> _Rendered:
        if _MARKS_ANSWERS.search(self.template):
            return _Rendered(*self._render(messages, True, False))
        text = self.render(messages)
        answers = []
        for index, message in enumerate(messages):
            if message.get("role") == "assistant":
                span = self._answer(messages, index, text)
                answers += [span] if span else []
        return _Rendered(text, answers)

    def _answer(self, messages: Sequence[Message], index: int, text: str) -> tuple[int, int] | None:
        """Where an answer stands; None for an earlier one that the template shows otherwise once
        later messages follow: it would not be what a server asks for.
        """
        prompt = self.render(messages[:index], add_generation_prompt=True)
        upto = self.render(messages[: index + 1])
        if text.startswith(upto) and upto.startswith(prompt):
            return len(prompt), len(upto)
        if index < len(messages) - 1:
            return None
        rule = "the words that ask for an answer are the beginning of the dialogue with it"
        works = "a template with {% generation %} marks, in chat_template.jinja"
        raise DataError(Problem("the chat template rewrites what is before an answer", rule, works))

    def _marked(
        self, rendered: _Rendered, ids: list[int], offsets: Sequence[tuple[int, int]]
    ) -> EncodedDialogue:
        trained = [False] * len(ids)
        for start, stop in rendered.answers:
            inside = [i for i, (a, b) in enumerate(offsets) if a >= start and b <= stop]
            for i in self._with_end(inside, ids):
                trained[i] = True
        if trained and trained[-1] and ids[-1] not in self.end_ids:  # the template ends no answer
            ids, trained = [*ids, self.tokenizer.end_id], [*trained, True]
        before = self._start_ids(rendered.text)
        return EncodedDialogue([*before, *ids], [*([False] * len(before)), *trained])

    def _with_end(self, inside: list[int], ids: Sequence[int]) -> list[int]:
        """The tokens of an answer up to its last end token, or to one right behind it."""
        ends = [place for place, i in enumerate(inside, start=1) if ids[i] in self.end_ids]
        if ends:
            return inside[: ends[-1]]
        behind = inside[-1] + 1 if inside else len(ids)
        return [*inside, behind] if behind < len(ids) and ids[behind] in self.end_ids else inside

    def _start_ids(self, text: str) -> tuple[int, ...]:
        """What goes before a text: begin-of-text, if the tokenizer sets one and the text has none.

        So there is exactly one.
        """
        token = self.special.get("bos_token", "")
        return () if token and text.startswith(token) else self.tokenizer.start_ids


def load_chat_template(tokenizer: TextTokenizer) -> ChatTemplate:
    """The chat template of a tokenizer's folder. Raises DataError if it has none."""
    config = read_json(tokenizer.folder / "tokenizer_config.json")
    file = tokenizer.folder / "chat_template.jinja"
    template = file.read_text("utf-8") if file.is_file() else _named(config.get("chat_template"))
    if template is None:
        rule = "dialogues become text by the tokenizer's own template"
        works = f"{file} as its model's authors give it"
        raise DataError(Problem(f"{tokenizer.folder} has no chat template", rule, works))
    special = {name: token for name in _SPECIAL if (token := special_token(config, name))}
    return ChatTemplate(
        tokenizer=tokenizer,
        template=template,
        special=special,
        end_ids=_end_ids(tokenizer, tokenizer.folder),
    )


def _named(value: object) -> str | None:
    """The template of a configuration: one text, or the one called default of several."""
    if isinstance(value, list):
        value = next((each.get("template") for each in value if each["name"] == "default"), None)
    return value if isinstance(value, str) else None


def _end_ids(tokenizer: TextTokenizer, folder: Path) -> frozenset[int]:
    """The tokens that end an answer: the tokenizer's own, and those of generation."""
    found = read_json(folder / "generation_config.json").get("eos_token_id")
    more = found if isinstance(found, list) else [] if found is None else [found]
    return frozenset([tokenizer.end_id, *map(int, more)])
