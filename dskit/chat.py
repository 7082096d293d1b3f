"""Text and tokens: the tokenizer, the chat format, and the parser of what the model writes.

Idea
    deepseek-recipe owns the format: it turns a chat body into a conversation, the conversation into token ids
    (`render`), and output into reasoning, content and tool calls (`StreamParser`).  This module adds what it
    lacks: a tokenizer for configurations without a `tokenizer.json`, sampling values taken from the request
    and the checkpoint, and errors for what is not supported.  A control token's spelling inside user text
    stays text.

Shapes
    ids: list[int], the whole prompt with its first `<｜begin▁of▁sentence｜>`; chunks and messages: dicts of
    OpenAI's chat-completions shape.

Errors
    `ChatError` (a ValueError) has `.status` and `.param`: an image, an unknown effort, a body deepseek-recipe
    refuses. `FileNotFoundError` and `ValueError` for a tokenizer folder that misses a file or a special
    token.

Source
    deepseek-recipe 0.2 (`DeepseekV41Encoding`, `DeepseekV4Encoding`, `StreamProcessor`); files
    `tokenizer.json` and `generation_config.json` of a checkpoint.

Try
    render({"messages": [{"role": "user", "content": "Hi"}]}, Tokenizer(folder)).ids
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import tokenizers

PAD = "<｜▁pad▁｜>"
IMAGE = recipe.SpecialToken.Image.default_str()
KINDS = [
    "Bos", "Eos", "ThinkingStart", "ThinkingEnd", "System", "User", "Assistant", "LatestReminder", "Dsml",
    "Image", "Ref", "RefEnd", "Box", "BoxEnd", "Point", "PointEnd", "Polygon", "PolygonEnd",
]  # fmt: skip
SPECIALS = tuple(getattr(recipe.SpecialToken, kind).default_str() for kind in KINDS)
BOS, EOS, THINK, THINK_END, SYSTEM, USER, ASSISTANT, _, DSML = SPECIALS[:9]
FIRST_BYTE = 3  # the byte tokenizer: bos, eos, pad, then byte b at 3 + b, then the other specials
EFFORTS = {"off": "none", "none": "none", "minimal": "low", "low": "low", "medium": "high", "high": "high"}
EFFORTS |= {"xhigh": "high", "ultra": "max", "max": "max"}
# What may shape sampling: fields of a request, of generation_config.json and of SamplingParams alike.
SAMPLING = [
    "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "ignore_eos",
]  # fmt: skip


class ChatError(ValueError):
    """A request that cannot be rendered: HTTP `status`, `param` (the field at fault), `code` (a word)."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str = "invalid_value"
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


class Tokenizer:
    """The tokenizer of a checkpoint folder: `tokenizer.json`, and `generation_config.json` if there."""

    def __init__(self, folder: str | Path) -> None:
        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing: a checkpoint folder needs its tokenizer.json")
        generation = Path(folder) / "generation_config.json"
        self._setup(file.read_text(encoding="utf-8"))
        self.generation: dict[str, Any] = json.loads(generation.read_text()) if generation.is_file() else {}

    @classmethod
    def of_json(cls, text: str) -> Tokenizer:
        """A tokenizer from the contents of a `tokenizer.json`."""
        self = cls.__new__(cls)
        self._setup(text)
        self.generation = {}
        return self

    @classmethod
    def of_bytes(cls, config: Any) -> Tokenizer:
        """One token per byte, for a `ModelConfig` without a `tokenizer.json` (model.md 7.1)."""
        ids = {BOS: config.bos_token_id, EOS: config.eos_token_id, PAD: config.pad_token_id}
        image = getattr(config, "image_token_id", None)
        if image is not None and image < config.vocab_size:
            ids[IMAGE] = image
        rest = [spelling for spelling in SPECIALS if spelling not in ids]
        ids |= {spelling: FIRST_BYTE + 256 + i for i, spelling in enumerate(rest)}
        return cls.of_json(byte_tokenizer_json(ids, config.vocab_size))

    def _setup(self, text: str) -> None:
        self.json = text
        self._full = tokenizers.Tokenizer.from_str(text)
        plain = json.loads(text)
        plain["added_tokens"] = []
        plain["post_processor"] = None
        self._plain = tokenizers.Tokenizer.from_str(json.dumps(plain))
        self.specials = {s: self._full.token_to_id(s) for s in (*SPECIALS, PAD)}
        missing = [s for s, i in self.specials.items() if i is None and s != PAD]
        if missing:
            raise ValueError(
                f"tokenizer.json lacks the special tokens {missing}: it is not of this chat format"
            )

    @cached_property
    def recipe(self) -> recipe.Tokenizer:
        """The same tokenizer as deepseek-recipe's object."""
        return recipe.Tokenizer.from_str(self.json)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that has a spelling."""
        return max(self._full.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The `tokenizers` object itself, special tokens included."""
        return self._full

    @property
    def bos_id(self) -> int:
        """Id of the first token of every prompt."""
        return self.specials[BOS]

    @property
    def eos_id(self) -> int:
        """Id that ends an assistant turn."""
        return self.specials[EOS]

    @property
    def pad_id(self) -> int | None:
        """Id that fills rows in training."""
        return self.specials[PAD]

    def encode(self, text: str, specials: bool = False) -> list[int]:
        """Ids of plain text; with `specials`, spellings of control tokens become those tokens."""
        return (self._full if specials else self._plain).encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts."""
        return [e.ids for e in self._plain.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int], specials: bool = True) -> str:
        """Text of ids; without `specials`, control tokens are left out. Ids without a spelling are ''."""
        return self._full.decode(list(ids), skip_special_tokens=not specials)

    def spelling(self, token_id: int) -> str | None:
        """The raw vocabulary entry of one id, None where the id has none."""
        return self._full.id_to_token(token_id)


def byte_tokenizer_json(ids: dict[str, int], vocab_size: int) -> str:
    """A `tokenizer.json` with one token per byte and the special tokens `ids` (spelling -> id)."""
    letters = byte_letters()
    vocab = {letter: FIRST_BYTE + byte for byte, letter in enumerate(letters)} | ids
    clash = len(set(vocab.values())) < len(vocab) or max(vocab.values()) >= vocab_size
    if clash:
        raise ValueError(f"a byte tokenizer needs {len(vocab)} distinct ids below vocab_size {vocab_size}")
    return tokenizer_json(vocab, [], ids)


def byte_letters() -> list[str]:
    """The printable letter that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = iter(range(256, 512))
    return [chr(byte) if byte in keep else chr(next(moved)) for byte in range(256)]


def tokenizer_json(vocab: dict[str, int], merges: list[tuple[str, str]], specials: dict[str, int]) -> str:
    """A byte-level BPE `tokenizer.json` in which every digit is a token of its own."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": i, "content": s, **flags} for s, i in sorted(specials.items(), key=lambda item: item[1])]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    model |= {"vocab": vocab, "merges": [list(pair) for pair in merges]}
    digits = {"type": "Digits", "individual_digits": True}
    steps = {"type": "Sequence", "pretokenizers": [digits, level]}
    data = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None}
    data |= {"pre_tokenizer": steps, "post_processor": None, "decoder": level, "model": model}
    return json.dumps(data, ensure_ascii=False)


@dataclass(frozen=True)
class Prompt:
    """A rendered request: what the model reads, how it samples, and how its output is to be read."""

    ids: list[int]
    request: recipe.ConversationRequest
    sampling: dict[
        str, Any
    ]  # only values that someone set: the request, else the checkpoint, else the package
    thinking: bool

    @property
    def parsing(self) -> recipe.ParsingOptions:
        """deepseek-recipe's settings for reading the output."""
        return self.request.parsing_options

    @property
    def starts_in_tool_calls(self) -> bool:
        """Whether the prompt already opened the block of tool calls (`tool_choice: required`)."""
        return self.parsing.starts_in_tool_calls

    @property
    def constraint(self) -> recipe.OutputConstraint | None:
        """What a grammar would have to enforce: kind `json`, `regex`, `tool_call` or `tool_call_required`."""
        return self.request.inference_options.output_constraint

    @property
    def stream(self) -> bool:
        """Whether the request asked for a stream."""
        return self.request.stream

    def max_tokens(self, context: int) -> int:
        """The limit of new tokens in a context of `context` tokens; ChatError if the prompt does not fit."""
        try:
            limit = self.request.resolve_max_tokens(len(self.ids), context)
        except recipe.ConversionError as error:
            message, status = str(_refusal(error)), error.status_code
            raise ChatError(message, "messages", status, "context_length_exceeded") from None
        return min(limit, self.sampling.get("max_tokens", limit))


def render(body: dict[str, Any], tokenizer: Tokenizer, *, family: str = "v4.1") -> Prompt:
    """Render an OpenAI chat body for a model of `family` ("v4.1" or "v4")."""
    version = _VERSIONS.get(family)
    if version is None:
        raise ValueError(f"family is {family!r}, but chat formats exist for {sorted(_VERSIONS)}")
    wanted = _normalise(body)
    name = str(wanted.setdefault("model", "dskit"))
    try:
        options = recipe.ConversionOptions().with_model_alias(name, version)
        request = recipe.ChatCompletionRequest(wanted).convert(options)
    except recipe.ConversionError as error:
        raise _refusal(error) from None
    except ValueError as error:
        raise ChatError(str(error).removeprefix("invalid request body: ")) from None
    ids = _encoding(tokenizer, family).encode(request.conversation)
    sampling = _sampling(body, tokenizer, request.inference_options)
    return Prompt(ids, request, sampling, request.conversation.thinking_mode)


def answer_ids(answer: dict[str, Any], tokenizer: Tokenizer, thinking: bool) -> list[int]:
    """The ids that the model writes after a prompt to say `answer`, an assistant message, with the final eos.

    With `thinking` the prompt ended in `<think>`, so the answer begins with its `reasoning_content`.
    """
    calls = [
        recipe.ToolCall(call.get("id", ""), call["function"]["name"], call["function"]["arguments"])
        for call in answer.get("tool_calls") or ()
    ]
    message = recipe.AssistantMessage(
        answer.get("content") or "",
        (answer.get("reasoning_content") or "") if thinking else None,
        calls or None,
    )
    # A tool in the system block makes deepseek-recipe keep the thinking of earlier turns; `prefix` would
    # leave the final eos out.
    talk = recipe.Conversation([message], thinking_mode=thinking, tools=_ANY_TOOL)
    page = recipe.DeepseekV41Encoding().render_conversation(talk)
    spans = page.special_ranges
    names = [page.prompt[a:b] for a, b in spans]
    first, last = names.index(ASSISTANT) + 1, len(names) - 1 - names[::-1].index(EOS)
    ids: list[int] = []
    for i in range(first + 1, last + 1):
        ids += tokenizer.encode(page.prompt[spans[i - 1][1] : spans[i][0]])
        ids.append(tokenizer.specials[names[i]])
    return ids


class StreamParser:
    """Turns output into chunks of OpenAI's shape, and at the end into one message.

    Push text or token ids as they come, then `finish`. An end-of-sentence id is dropped.
    """

    def __init__(
        self,
        prompt: Prompt,
        tokenizer: Tokenizer | None = None,
        *,
        request_id: str | None = None,
        model: str = "dskit",
    ) -> None:
        self.id = request_id or f"chatcmpl-{uuid.uuid4().hex}"
        generator = recipe.ChatCompletionRequest.chunk_generator(prompt.request, self.id, model)
        self._eos = tokenizer.eos_id if tokenizer else None
        self._inner = recipe.StreamProcessor(
            generator, prompt.parsing, tokenizer.recipe if tokenizer else None
        )
        self._prompt_tokens = len(prompt.ids)
        self._whole = recipe.ChatCompletionResponse(self.id, model, int(time.time()), self._prompt_tokens, 0)

    def start(self, cached_tokens: int = 0) -> list[dict[str, Any]]:
        """The chunk that opens the message; `cached_tokens` of the prompt came from a cache."""
        usage = recipe.PromptUsage(prompt_tokens=self._prompt_tokens, prompt_cache_hit_tokens=cached_tokens)
        return self._take(self._inner.push(recipe.InferenceChunk.ready(prompt_usage=usage)))

    def push(self, output: str | Iterable[int], tokens: int = 1) -> list[dict[str, Any]]:
        """Chunks that follow from more output; text counts as `tokens` tokens in the usage."""
        if isinstance(output, str):
            return self._take(self._inner.push(recipe.InferenceChunk.text(output, tokens)))
        ids = [i for i in output if i != self._eos]
        return self._take(self._inner.push(recipe.InferenceChunk.tokens(ids))) if ids else []

    def finish(self, reason: str = "stop") -> list[dict[str, Any]]:
        """The last chunks; `reason` is the engine's, "stop" or "length"."""
        kind = (
            recipe.InferenceFinishReason.Length if reason == "length" else recipe.InferenceFinishReason.Stop
        )
        chunks = self._take(self._inner.push(recipe.InferenceChunk.finish(kind)))
        return chunks + self._take(self._inner.finish())

    def response(self) -> dict[str, Any]:
        """Everything so far as one `chat.completion` object."""
        return json.loads(self._whole.to_json())

    def _take(self, chunks: list[recipe.ChatCompletionChunk]) -> list[dict[str, Any]]:
        shown = [json.loads(chunk.to_json()) for chunk in chunks]
        for chunk in chunks:
            self._whole.accumulate(chunk)
        return shown


def parse(prompt: Prompt, output: str, reason: str = "stop") -> dict[str, Any]:
    """The assistant message (`content`, `reasoning_content`, `tool_calls`) in a finished output text."""
    parser = StreamParser(prompt)
    parser.start()
    parser.push(output)
    parser.finish(reason)
    return parser.response()["choices"][0]["message"]


def parse_ids(
    prompt: Prompt, ids: Sequence[int], tokenizer: Tokenizer, reason: str = "stop"
) -> dict[str, Any]:
    """`parse` of token ids."""
    parser = StreamParser(prompt, tokenizer)
    parser.start()
    parser.push(ids)
    parser.finish(reason)
    return parser.response()["choices"][0]["message"]


_VERSIONS = {"v4.1": recipe.ModelVersion.DeepseekV41Flash, "v4": recipe.ModelVersion.DeepseekV4Pro}
_ANY_TOOL = [recipe.ToolDefinition("any")]


def _encoding(tokenizer: Tokenizer, family: str) -> Any:
    kept = tokenizer.__dict__.setdefault("encodings", {})
    if family not in kept:
        kind = recipe.DeepseekV41Encoding if family == "v4.1" else recipe.DeepseekV4Encoding
        kept[family] = kind().with_tokenizer(tokenizer.recipe)
    return kept[family]


def _normalise(body: dict[str, Any]) -> dict[str, Any]:
    """A copy of the body in the package's own words: efforts, chat_template_kwargs, max_completion_tokens."""
    wanted = {key: value for key, value in body.items() if value is not None and key != "n"}
    for name, value in (wanted.pop("chat_template_kwargs", None) or {}).items():
        if name in ("thinking", "enable_thinking"):
            wanted["thinking"] = {"type": "enabled" if value else "disabled"}
        elif name == "reasoning_effort":
            wanted[name] = value
        else:
            raise ChatError(f"chat_template_kwargs.{name} is not known here", "chat_template_kwargs")
    if "reasoning_effort" in wanted:
        effort = EFFORTS.get(wanted["reasoning_effort"])
        if effort is None:
            raise ChatError(
                f"reasoning_effort must be off, low, high or max, not {wanted['reasoning_effort']!r}",
                "reasoning_effort",
            )
        wanted["reasoning_effort"] = effort
    if "max_completion_tokens" in wanted:
        wanted["max_tokens"] = wanted.pop("max_completion_tokens")
    _refuse_images(wanted.get("messages"))
    return wanted


def _refuse_images(messages: Any) -> None:
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and "image" in str(part.get("type")):
                raise ChatError(
                    "image input is not supported: dskit has no vision tower yet", f"messages.{i}.content"
                )


def _sampling(body: dict[str, Any], tokenizer: Tokenizer, options: recipe.InferenceOptions) -> dict[str, Any]:
    """The request's values, else generation_config.json's, else the package's."""
    asked = dict(body)
    asked.setdefault("max_tokens", asked.get("max_completion_tokens"))
    values = {"temperature": options.temperature, "top_p": options.top_p}
    if tokenizer.generation.get("do_sample") is False:
        values["temperature"] = 0.0
    renamed = {**tokenizer.generation, "max_tokens": tokenizer.generation.get("max_new_tokens")}
    for source in (renamed, asked):
        values |= {key: source[key] for key in SAMPLING if source.get(key) is not None}
    return {key: value for key, value in values.items() if value is not None}


def _refusal(error: recipe.ConversionError) -> ChatError:
    detail = json.loads(error.body)["error"]
    return ChatError(detail["message"], detail.get("param"), error.status_code)
