"""Text <-> token ids of one model, and its chat template: the same object in an engine and in the router.

Owns the rule of the start token and which ids end a generation. BPE itself is the ``tokenizers`` library's. Does not
know weights; ``loading`` makes one from a model's files, ``to_dict``/``from_dict`` carry it to another process.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tokenizers import Tokenizer as Library

from microserving.errors import ContextLengthExceeded, InvalidRequest, ModelLoadError
from microserving.tokenizer.chat_template import ChatTemplate, Messages, TemplateUnusableError
from microserving.tokenizer.panics import raising
from microserving.tokenizer.pieces import IncrementalDetokenizer, Pieces
from microserving.tokenizer.text_bound import text_bound

if TYPE_CHECKING:
    from microserving.model_files.resolved_model import ResolvedModel

FORMAT_VERSION = 1
_SHORT_CHARS: Final = 4096
"""Up to here the library's plain ``encode`` is used, which holds the GIL. Longer texts go through its batch call, which
does not, but may wait for the library's own threads."""


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What a tokenizer is besides the library's part; everything JSON can carry.

    prefix_ids, suffix_ids: put around every text (a start token, say). special_tokens: name -> text, as templates
    use them (``bos_token``, ``eos_token``, ...). eos_token_ids: sorted.
    tool_call_format, reasoning_format: how the model writes calls of tools and its thoughts, as the operator has said;
    ``auto``: as the template shows.
    """

    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    special_tokens: Mapping[str, str]
    chat_template: str | None
    tool_call_format: str = "auto"
    reasoning_format: str = "auto"


class Tokenizer:
    """Thread-safe. ``chat_unavailable`` says why chat is off; None when there is a usable template.

    text_bytes_per_token: UTF-8 bytes of the longest text that one token stands for; None when that has no bound.
    """

    def __init__(self, library: Library, facts: TokenizerFacts) -> None:
        """Raises ModelLoadError when the library's tokenizer has a decoder that is not understood."""
        library.no_truncation()
        library.no_padding()
        self._library = library
        self._facts = facts
        self._serialised = library.to_str()
        document = json.loads(self._serialised)
        self._pieces = Pieces(library, document["decoder"])
        self._text_bound = text_bound(document)
        self.text_bytes_per_token = self._text_bound.bytes_per_token if self._text_bound else None
        self.chat_unavailable: str | None = None
        self._template = self._compile()
        vocabulary = library.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)

    @classmethod
    def load(cls, model: ResolvedModel) -> Tokenizer:
        """The tokenizer that comes with a model; raises ModelLoadError."""
        # Imported here: the router uses this class, but must not import the code that reads model files.
        from microserving.tokenizer.loading import load_tokenizer

        return load_tokenizer(model)

    def _compile(self) -> ChatTemplate | None:
        source = self._facts.chat_template
        if source is None:
            self.chat_unavailable = "the model has no chat template"
            return None
        try:
            return ChatTemplate(source, self._facts.special_tokens)
        except TemplateUnusableError as error:
            self.chat_unavailable = f"the model's chat template cannot be used: {error}"
            return None

    @property
    def bos_token_id(self) -> int | None:
        return self._facts.bos_token_id

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends a generation."""
        return frozenset(self._facts.eos_token_ids)

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Every id that is no part of the text."""
        return frozenset(filter(self._pieces.special, range(self.vocab_size)))

    @property
    def strips_first_space(self) -> bool:
        """Whether a space at the very beginning of a decoded text is left out."""
        return self._pieces.strips_first_space

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, a special one for its name; empty for an id that there is not."""
        return self._pieces.bytes_of(token_id)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_context: int | None = None
    ) -> list[int]:
        """Token ids of ``text``; the texts of special tokens become those tokens.

        add_special_tokens: put the model's prefix and suffix around it (a start token, say); a text that already
        begins with that prefix does not get a second one. max_context: a text that is certain to give more tokens is
        refused before any work. Raises InvalidRequest (``prompt``) for text that is not valid Unicode,
        ContextLengthExceeded (``prompt``).
        """
        return self._encode(text, add_special_tokens, max_context, "prompt")

    def _encode(self, text: str, add_special_tokens: bool, max_context: int | None, param: str) -> list[int]:
        try:
            data = text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest("the text holds half a surrogate pair", param=param) from None
        bound = self._text_bound
        if max_context is not None and bound is not None and not bound.may_fit(data, max_context):
            raise ContextLengthExceeded(
                f"the text has {len(data)} bytes, which no tokens of the context of {max_context} can hold",
                param=param,
            )
        with raising(InvalidRequest("the model's tokenizer cannot encode the text", param=param)):
            ids = self._library_ids(text)
        if not add_special_tokens:
            return ids
        prefix = self._facts.prefix_ids
        doubled = bool(prefix) and tuple(ids[: len(prefix)]) == prefix
        return [*(() if doubled else prefix), *ids, *self._facts.suffix_ids]

    def _library_ids(self, text: str) -> list[int]:
        if len(text) <= _SHORT_CHARS:
            ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        else:
            ids = self._library.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; unknown ids give nothing, ill-formed bytes U+FFFD."""
        detokenizer = IncrementalDetokenizer(self._pieces, skip_special_tokens=skip_special_tokens)
        return "".join([*map(detokenizer.put, ids), detokenizer.flush()])

    def token_strings(self, ids: Iterable[int]) -> list[str]:
        """Each token as the vocabulary has it; "" for an unknown id."""
        return [self._library.id_to_token(token) or "" for token in ids]

    def detokenizer(self) -> IncrementalDetokenizer:
        """A new one for one sequence; it skips special tokens."""
        return IncrementalDetokenizer(self._pieces)

    @property
    def chat_template(self) -> str | None:
        """The template's source."""
        return self._facts.chat_template

    def render_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a chat; the options as ``ChatTemplate.render`` has them. Raises InvalidRequest."""
        if self._template is None:
            raise InvalidRequest(f"chat is not available: {self.chat_unavailable}", param="messages")
        return self._template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )

    def encode_chat(self, messages: Messages, *, max_context: int | None = None, **options: Any) -> list[int]:
        """Token ids of a chat: the model's start token exactly once, whether or not the template writes it.

        max_context: as for ``encode``, of the rendered text; the ContextLengthExceeded names ``messages``. options: of
        ``render_chat``.
        """
        return self.encode_rendered(self.render_chat(messages, **options), max_context=max_context)

    def encode_rendered(self, text: str, *, max_context: int | None = None) -> list[int]:
        """Token ids of what ``render_chat`` gave."""
        ids = self._encode(text, False, max_context, "messages")
        bos = self.bos_token_id
        starts = bos is not None and bos in self._facts.prefix_ids
        return [bos, *ids] if bos is not None and starts and ids[:1] != [bos] else ids

    def with_facts(self, **changes: Any) -> Tokenizer:
        """The same tokenizer with other ``TokenizerFacts``, such as another chat template."""
        return Tokenizer(Library.from_str(self._serialised), dataclasses.replace(self._facts, **changes))

    @property
    def tool_call_format(self) -> str:
        return self._facts.tool_call_format

    @property
    def reasoning_format(self) -> str:
        return self._facts.reasoning_format

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can carry it."""
        facts = self._facts
        return {
            "version": FORMAT_VERSION,
            "tokenizer": self._serialised,
            "bos_token_id": facts.bos_token_id,
            "eos_token_ids": list(facts.eos_token_ids),
            "prefix_ids": list(facts.prefix_ids),
            "suffix_ids": list(facts.suffix_ids),
            "special_tokens": dict(facts.special_tokens),
            "chat_template": facts.chat_template,
            "tool_call_format": facts.tool_call_format,
            "reasoning_format": facts.reasoning_format,
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Tokenizer:
        """The inverse of ``to_dict``; raises ModelLoadError for anything else."""
        if document.get("version") != FORMAT_VERSION:
            raise ModelLoadError(
                f"tokenizer format {document.get('version')!r} is not version {FORMAT_VERSION}"
            )
        try:
            facts = _facts_from(document)
            library = Library.from_str(document["tokenizer"])
        except Exception as error:  # noqa: BLE001 - the library raises plain Exception for bad JSON
            raise ModelLoadError(f"the serialised tokenizer is malformed: {error}") from None
        return cls(library, facts)


def _facts_from(document: Mapping[str, Any]) -> TokenizerFacts:
    bos, template = document["bos_token_id"], document["chat_template"]
    return TokenizerFacts(
        bos_token_id=None if bos is None else int(bos),
        eos_token_ids=tuple(map(int, document["eos_token_ids"])),
        prefix_ids=tuple(map(int, document["prefix_ids"])),
        suffix_ids=tuple(map(int, document["suffix_ids"])),
        special_tokens={str(name): str(text) for name, text in document["special_tokens"].items()},
        chat_template=None if template is None else str(template),
        tool_call_format=str(document.get("tool_call_format") or "auto"),
        reasoning_format=str(document.get("reasoning_format") or "auto"),
    )
