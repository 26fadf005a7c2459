"""Messages to prompt text: chat templates as transformers renders them, and text that stays text.

Every string of a request is made safe before it reaches the template: lone surrogates become U+FFFD, and a
marker from a private-use plane is put inside each occurrence of a special token's text. The rendered text is
split at the markers and its pieces are tokenised apart, so that no user text ever becomes a control token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from art_sky.errors import InvalidBody, InvalidConfig, InvalidInput, Unsupported
from art_sky.server.vocabulary import Vocabulary

_SURROGATE = re.compile("[\ud800-\udfff]")
_MARKERS = range(0xF0000, 0xF0100)
_RESERVED = {"messages", "tools", "add_generation_prompt"}


@dataclass(frozen=True)
class Rendered:
    """Prompt text with `marker` inside what must not become special tokens."""

    text: str
    marker: str


class ChatTemplate:
    """One compiled template. Raises InvalidConfig for a template that cannot be compiled or is missing."""

    def __init__(self, vocabulary: Vocabulary, template: str | None) -> None:
        source = template if template is not None else vocabulary.chat_template
        if source is None:
            raise InvalidConfig("the base model has no chat template; give one by the option `chat_template`")
        env = _environment()
        try:
            names = jinja2.meta.find_undeclared_variables(env.parse(source))
            self._template = env.from_string(source)
        except jinja2.TemplateError as e:
            raise InvalidConfig(f"chat_template cannot be compiled: {e}; mend the template") from e
        self._variables = vocabulary.template_variables()
        self._special = _occurrences(vocabulary.specials)
        self.takes_tools = "tools" in names
        self.writes_hermes_calls = "<tool_call>" in source
        self._knows_developer = "developer" in source
        self._string_arguments = self._passes_strings()
        self.end_ids = self._ends(vocabulary)

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, options: dict[str, Any] | None = None
    ) -> Rendered:
        """Raises InvalidBody for messages of a wrong shape, InvalidInput where the template refuses them."""
        if clash := _RESERVED & set(options or {}):
            raise InvalidBody(f"chat_template_kwargs may not set {sorted(clash)}; give them as fields")
        plain = [self._message(m, i) for i, m in enumerate(messages)]
        for i, tool in enumerate(tools or []):
            function = tool.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise InvalidBody(f"tools[{i}] has no function with a name; give type, function.name and parameters")
        marker = _unused_marker([plain, tools, options])
        safe = [self._safe(v, marker) for v in (plain, tools or None, options or {})]
        return Rendered(self._run(safe[0], safe[1], safe[2]), marker)

    def turn(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> tuple[Rendered, Rendered]:
        """The prompt for the last message, an assistant's, and what is behind it when that message is there.

        Raises InvalidInput where the conversation does not begin with its own prompt, InvalidBody as `render` does.
        """
        plain = [self._message(m, i) for i, m in enumerate(messages)]
        marker = _unused_marker([plain, tools])
        safe, offered = [self._safe(m, marker) for m in plain], self._safe(tools or None, marker)
        prompt = self._run(safe[:-1], offered, {})
        whole = self._run(safe, offered, {}, generate=False)
        if not whole.startswith(prompt):
            raise InvalidInput(
                "the chat template renders a conversation unlike the prompt of its last turn, so what the model is to "
                "write there is not known exactly; give another template by the option `chat_template`"
            )
        return Rendered(prompt, marker), Rendered(whole[len(prompt) :], marker)

    def neutral(self, text: str, marker: str) -> str:
        """`text` as it would stand in a rendered prompt."""
        return self._special.sub(lambda m: m.group(0) + marker, _SURROGATE.sub("\ufffd", text))

    def _run(self, messages: Any, tools: Any, options: dict[str, Any], generate: bool = True) -> str:
        values = {**self._variables, **options}
        try:
            return self._template.render(messages=messages, tools=tools, add_generation_prompt=generate, **values)
        except Exception as e:  # templates are data: whatever one raises, it refused these messages
            said = str(e).splitlines()[0][:300] if str(e) else type(e).__name__
            raise InvalidInput(
                f"the chat template does not take these messages: {said}; change their order or shape"
            ) from e

    def _message(self, message: dict[str, Any], i: int) -> dict[str, Any]:
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise InvalidBody(f"messages[{i}].role is missing; use system, user, assistant or tool")
        plain = {**message, "content": _content(message.get("content"), i)}
        if role == "developer" and not self._knows_developer:
            plain["role"] = "system"
        calls = message.get("tool_calls")
        if calls:
            if not isinstance(calls, list):
                _bad_call(i)
            plain["tool_calls"] = [self._call(c, i) for c in calls]
        else:
            plain.pop("tool_calls", None)
        return plain

    def _call(self, call: Any, i: int) -> dict[str, Any]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            _bad_call(i)
        arguments = function.get("arguments")
        if isinstance(arguments, str) and not self._string_arguments:
            try:
                parsed = json.loads(arguments)
            except (ValueError, RecursionError):
                parsed = None  # what the model wrote was no JSON; the template gets it as it is
            arguments = parsed if isinstance(parsed, dict) else arguments
        return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}

    def _safe(self, value: Any, marker: str) -> Any:
        if isinstance(value, str):
            return self.neutral(value, marker)
        if isinstance(value, dict):
            return {self._safe(k, marker): self._safe(v, marker) for k, v in value.items()}
        if isinstance(value, list):
            return [self._safe(v, marker) for v in value]
        return value

    def _passes_strings(self) -> bool:
        """Whether arguments given as a JSON string are written as they are, which keeps the model's own text."""
        text = '{"probe": "value"}'
        call = {"type": "function", "function": {"name": "f", "arguments": text}}
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            return text in self._run(messages, None, {})
        except InvalidInput:
            return False

    def _ends(self, vocabulary: Vocabulary) -> list[int]:
        """The ids that end a turn: the model's own, and the one that this template writes after a reply."""
        ends = list(vocabulary.end_ids)
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "PROBE"}]
        try:
            after = self._run(messages, None, {}, generate=False).rpartition("PROBE")[2]
        except InvalidInput:
            return ends
        written = [id for text, id in vocabulary.specials.items() if after.startswith(text)]
        return ends + [id for id in written if id not in ends]


def encode(vocabulary: Vocabulary, text: str, marker: str) -> list[int]:
    """Token ids of rendered text; its marked pieces are tokenised apart."""
    return [id for piece in text.split(marker) if piece for id in vocabulary.encode(piece)]


def _content(content: Any, i: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidBody(f"messages[{i}].content is a {type(content).__name__}; give text or a list of text parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal"):
            shown = kind if isinstance(kind, str) else type(part).__name__
            raise Unsupported(f"messages[{i}] has a part {shown[:40]!r}; this model reads only text parts", part=shown)
        text = part.get(kind)
        if not isinstance(text, str):
            raise InvalidBody(f"messages[{i}] has a {kind} part without {kind}; give it as a string")
        texts.append(text)
    return "\n".join(texts)


def _bad_call(i: int) -> NoReturn:
    raise InvalidBody(f"messages[{i}].tool_calls is not a list of calls with function.name; send them as received")


def _unused_marker(values: Any) -> str:
    """A character that occurs in none of the strings; which one depends on nothing else."""
    used = {c for text in _strings(values) for c in text if ord(c) in _MARKERS} if values else set()
    for code in _MARKERS:
        if chr(code) not in used:
            return chr(code)
    raise InvalidInput("the messages use all 256 private-use characters U+F0000-F00FF; leave one out")


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for k, v in value.items():
            yield from _strings(k)
            yield from _strings(v)
    elif isinstance(value, list):
        for v in value:
            yield from _strings(v)


def _occurrences(specials: Iterable[str]) -> re.Pattern[str]:
    """Matches the first character of every occurrence, overlapping ones too."""
    texts = sorted((s for s in specials if len(s) > 1), key=len, reverse=True)
    if not texts:
        return re.compile(r"(?!)")
    return re.compile("|".join(f"{re.escape(t[0])}(?={re.escape(t[1:])})" for t in texts))


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment in which transformers runs templates: same filters, functions and tags."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a model wrote, for training masks; ours come from the sampler."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)
