"""What is asked: prompts and output lengths of each request, the same for every run with the same seed.

A session is a conversation: it yields an ``Ask``, is sent the text of the answer, and so on; most have one turn. Knows
OpenAI's request bodies; not when they are sent (``arrivals``) nor what they are measured by.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from microserving.bench.lengths import Lengths
from microserving.bench.texts import Prose

Endpoint = Literal["completions", "chat"]
Message = dict[str, str]
_QUESTION = "Go on in the same manner."
"""Ends the chat messages that are nothing but text to read."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. phase: of a mix. think_s: how long after the answer before it is sent."""

    path: str
    body: Mapping[str, Any]
    phase: str = ""
    think_s: float = 0.0


Session = Generator[Ask, str, None]


@dataclass(frozen=True, slots=True)
class Sampling:
    """What every request says beside its prompt. extra: more fields of the body, over these."""

    model: str | None = None
    temperature: float = 0.6
    top_p: float = 0.9
    ignore_eos: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, output_tokens: int, seed: int) -> dict[str, Any]:
        fixed: dict[str, Any] = {} if self.model is None else {"model": self.model}
        fixed |= {
            "max_tokens": output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": seed,
        }
        if self.ignore_eos:
            fixed["ignore_eos"] = True
        return {**fixed, "stream": True, "stream_options": {"include_usage": True}, **self.extra}


@dataclass(frozen=True, slots=True)
class Style:
    """How texts become requests."""

    prose: Prose
    sampling: Sampling
    endpoint: Endpoint = "completions"
    seed: int = 0

    def draw(self, *names: object) -> random.Random:
        """A source of chance for each ``names``."""
        return random.Random("/".join(map(str, (self.seed, *names))))

    def ask(self, prompt: str, output_tokens: int, number: int, phase: str = "") -> Ask:
        """One prompt, on either endpoint."""
        if self.endpoint == "chat":
            return self.chat(
                [{"role": "user", "content": f"{prompt}\n\n{_QUESTION}"}], output_tokens, number, phase
            )
        body = {**self.sampling.body(output_tokens, number), "prompt": prompt}
        return Ask("/completions", body, phase)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        output_tokens: int,
        number: int,
        phase: str = "",
        think_s: float = 0.0,
    ) -> Ask:
        body = {**self.sampling.body(output_tokens, number), "messages": list(messages)}
        return Ask("/chat/completions", body, phase, think_s)


class Workload(ABC):
    """name: as on the command line."""

    name: str

    @abstractmethod
    def session(self, number: int) -> Session:
        """Conversation ``number``, from 0: always the same one but for what is answered."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Its settings, for the report."""

    def __len__(self) -> int:
        """How many conversations there are; 0: as many as are wanted."""
        return 0


class Synthetic(Workload):
    """Independent prompts of English text."""

    name = "synthetic"

    def __init__(self, style: Style, prompt: Lengths, output: Lengths) -> None:
        self._style = style
        self._prompt = prompt
        self._output = output

    def session(self, number: int) -> Session:
        draw = self._style.draw(self.name, number)
        text = self._style.prose.passage(draw, self._prompt.sample(draw))
        yield self._style.ask(text, self._output.sample(draw), number)

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "input": self._prompt.text, "output": self._output.text}


class SharedPrefix(Workload):
    """Prompts that begin with one of ``prefixes`` texts of ``prefix_tokens``, and go on each in its own way."""

    name = "shared-prefix"

    def __init__(
        self, style: Style, prompt: Lengths, output: Lengths, *, prefix_tokens: int, prefixes: int
    ) -> None:
        self._style = style
        self._prompt = prompt
        self._output = output
        self._tokens = prefix_tokens
        self._prefixes = [
            style.prose.passage(style.draw("prefix", i), prefix_tokens) for i in range(prefixes)
        ]

    def session(self, number: int) -> Session:
        draw = self._style.draw(self.name, number)
        rest = self._style.prose.passage(draw, self._prompt.sample(draw))
        text = f"{draw.choice(self._prefixes)}\n\n{rest}"
        yield self._style.ask(text, self._output.sample(draw), number)

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "input": self._prompt.text,
            "output": self._output.text,
            "prefix_tokens": self._tokens,
            "prefixes": len(self._prefixes),
        }


class Chat(Workload):
    """Conversations: each turn sends all that was said. prompt: tokens of a user's message. system_tokens: of the text
    that all conversations begin with."""

    name = "chat"

    def __init__(
        self,
        style: Style,
        prompt: Lengths,
        output: Lengths,
        *,
        turns: int,
        think_s: float,
        system_tokens: int,
    ) -> None:
        self._style = style
        self._prompt = prompt
        self._output = output
        self._turns = turns
        self._think_s = think_s
        self._system_tokens = system_tokens
        self._system = style.prose.passage(style.draw("system"), system_tokens) if system_tokens else ""

    def session(self, number: int) -> Session:
        style, draw = self._style, self._style.draw(self.name, number)
        messages: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        turns = [self._turn(draw, turn) for turn in range(self._turns)]  # while nothing is measured
        for turn, (text, think_s, output_tokens) in enumerate(turns):
            messages.append({"role": "user", "content": text})
            seed = number * self._turns + turn
            answer = yield style.chat(messages, output_tokens, seed, f"turn {turn + 1}", think_s)
            messages.append({"role": "assistant", "content": answer})

    def _turn(self, draw: random.Random, turn: int) -> tuple[str, float, int]:
        """What the user says, how long after the answer before, and the length of the answer."""
        text = self._style.prose.passage(draw, self._prompt.sample(draw))
        think_s = draw.expovariate(1 / self._think_s) if turn and self._think_s else 0.0
        return text, think_s, self._output.sample(draw)

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "input": self._prompt.text,
            "output": self._output.text,
            "turns": self._turns,
            "think_s": self._think_s,
            "system_tokens": self._system_tokens,
        }


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of traffic: ``requests`` requests of these lengths."""

    prompt: Lengths
    output: Lengths
    requests: int

    @classmethod
    def parse(cls, text: str) -> Phase:
        """``600/20x30``: lengths of prompt and output, number of requests. Raises ValueError."""
        lengths, _, requests = text.rpartition("x")
        prompt, separator, output = lengths.partition("/")
        if not separator or not requests.isdecimal() or int(requests) < 1:
            raise ValueError(f"{text!r} is no phase; write PROMPT/OUTPUTxREQUESTS, as in 600/20x30")
        return cls(Lengths.parse(prompt), Lengths.parse(output), int(requests))

    @property
    def name(self) -> str:
        return f"{self.prompt.text}/{self.output.text}"


class Mix(Workload):
    """Traffic that changes: one phase after the other, and again from the first."""

    name = "mix"

    def __init__(self, style: Style, phases: Sequence[Phase]) -> None:
        self._style = style
        self._phases = phases
        self._order = [phase for phase in phases for _ in range(phase.requests)]

    def session(self, number: int) -> Session:
        phase, draw = self._order[number % len(self._order)], self._style.draw(self.name, number)
        text = self._style.prose.passage(draw, phase.prompt.sample(draw))
        yield self._style.ask(text, phase.output.sample(draw), number, phase.name)

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "phases": [{"phase": p.name, "requests": p.requests} for p in self._phases],
        }


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One recorded request: at ``timestamp`` seconds, either with its own words or with a prompt of ``prompt_tokens``."""

    timestamp: float
    output_tokens: int
    prompt_tokens: int = 0
    prompt: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None


class Trace(Workload):
    """Recorded requests; lengths become English text."""

    name = "trace"

    def __init__(self, style: Style, entries: Sequence[TraceEntry], source: str) -> None:
        self._style = style
        self._entries = entries
        self._source = source

    def __len__(self) -> int:
        return len(self._entries)

    def session(self, number: int) -> Session:
        entry, style = self._entries[number], self._style
        if entry.messages is not None:
            yield style.chat(entry.messages, entry.output_tokens, number)
            return
        text = entry.prompt
        if text is None:
            text = style.prose.passage(style.draw(self.name, number), entry.prompt_tokens)
        yield style.ask(text, entry.output_tokens, number)

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "source": self._source, "requests": len(self)}


def sampling_of(workload_style: Style) -> dict[str, Any]:
    """For the report."""
    return {**asdict(workload_style.sampling), "endpoint": workload_style.endpoint}
