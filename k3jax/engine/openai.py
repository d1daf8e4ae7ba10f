"""Lines of a batch file to requests, and answers to lines: OpenAI's Batch format, and plain prompts.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], ...}}
    {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "...", ...}}
    {"prompt": "...", "max_tokens": 32}

What a body leaves out, or has as null, is OpenAI's default: temperature 1, top_p 1, n 1; 16 new tokens for a completion, and for
a chat as many as fit. A plain line's defaults are those of SamplingParams. A field or a value that cannot be honoured raises.
Records hold no clock and no chance, so that a line's record is the same whenever it is made.
"""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from k3jax.answers import ChatCompletion, Completion, Logprobs
from k3jax.engine import Engine
from k3jax.io.messages import read_json, wrong
from k3jax.io.tokenizer import Tokenizer
from k3jax.sampling import SamplingParams

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

# Of a body, what SamplingParams has under the same names. Those that OpenAI has not are vLLM's.
_SAMPLING = (
    "max_tokens", "min_tokens", "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs",
)  # fmt: skip
_ALL = tuple(field.name for field in dataclasses.fields(SamplingParams))
_EITHER = ("priority", "cache_salt")
_BODY = (*_SAMPLING, *_EITHER, "model", "user", "metadata", "stream")
_FIELDS = {
    None: ("prompt", *_ALL, *_EITHER),  # a plain line
    COMPLETIONS: ("prompt", *_BODY, "echo", "best_of"),
    CHAT: (
        "messages", *_BODY, "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "response_format",
        "reasoning_effort", "parallel_tool_calls",
    ),
}  # fmt: skip
_LOWEST = -9999.0  # OpenAI's word for log 0, which JSON cannot say


@dataclasses.dataclass(frozen=True)
class Line:
    """A line that is not blank. id: made from its number and bytes; value: its JSON object, or else `error` says why not."""

    number: int  # from 1; blank lines count
    id: str
    value: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: str | None = None

    @classmethod
    def read(cls, number: int, raw: bytes) -> Line:
        """Never raises."""
        name = identity(number, raw)
        try:
            value = read_json(raw.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            return cls(number, name, error=f"the line is not UTF-8: {error.reason} at byte {error.start}")
        except ValueError as error:
            return cls(number, name, error=f"the line is not JSON: {error}")
        if not isinstance(value, dict):
            return cls(number, name, error="the line is no JSON object")
        return cls(number, name, value)

    @property
    def custom_id(self) -> str | None:
        name = self.value.get("custom_id")
        return name if isinstance(name, str) and name else None

    @property
    def plain(self) -> bool:
        return "prompt" in self.value


def identity(number: int, raw: bytes) -> str:
    """The id of a line's record: it tells which line is answered, and what stood in it."""
    return f"batch_req_{number}_{hashlib.blake2b(raw.strip(), digest_size=8).hexdigest()}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A line as a request. arguments: of Engine.add_chat or add_request, beside the sampling."""

    line: Line
    url: str | None  # None: a plain line
    model: str
    sampling: SamplingParams
    arguments: dict[str, Any]
    echo: bool = False

    @classmethod
    def of(cls, line: Line, *, context: int, model: str, seed: int) -> Call:
        """The line's request. Raises ValueError naming the field, the value and what is allowed.

        context: the model's, tokens. model: its name, where the body has none. seed: of the run; a line without a seed gets
        one made from this and its custom_id, or its number where it has none.
        """
        if line.error:
            raise ValueError(line.error)
        value = dict(line.value)
        custom_id = value.pop("custom_id", None)
        if custom_id is not None and line.custom_id is None:
            raise wrong("custom_id", custom_id, "a string that is not empty")
        if line.plain:
            url, body = None, value
        else:
            url, body = _envelope(value, custom_id)
        body = {key: entry for key, entry in body.items() if entry is not None}
        for key, entry in body.items():
            if key not in _FIELDS[url]:
                raise wrong(key, entry, f"one of the fields {', '.join(sorted(_FIELDS[url]))}")
        for key, only in (("stream", False), ("parallel_tool_calls", True)):
            if body.get(key, only) is not only:
                raise wrong(key, body[key], str(only))
        sampling = _sampling(url, body, context, _seed(seed, line))
        echo = body.get("echo", False)
        if not isinstance(echo, bool):
            raise wrong("echo", echo, "True or False")
        if echo and sampling.logprobs is not None:
            if sampling.prompt_logprobs is not None:
                raise wrong("prompt_logprobs", sampling.prompt_logprobs, "None beside echo with logprobs")
            sampling = dataclasses.replace(sampling, prompt_logprobs=sampling.logprobs)
        if body.get("best_of", sampling.n) != sampling.n:
            raise wrong("best_of", body["best_of"], f"n={sampling.n}: no sample is left out")
        if line.plain and sampling.n != 1:
            raise wrong("n", sampling.n, f"1 in a plain line; {COMPLETIONS} has n")
        name = body.get("model", model)
        if not isinstance(name, str):
            raise wrong("model", name, "a string")
        arguments = _arguments(url, body)
        return cls(line=line, url=url, model=name, sampling=sampling, arguments=arguments, echo=echo)

    def submit(self, engine: Engine) -> int:
        """The request's number in an engine. Raises ValueError for what this model cannot take."""
        add = engine.add_chat if self.url == CHAT else engine.add_request
        return add(**self.arguments, sampling=self.sampling)


def _envelope(value: dict[str, Any], custom_id: Any) -> tuple[str, dict[str, Any]]:
    """The url and the body of a line in OpenAI's format."""
    for key, entry in value.items():
        if key not in ("method", "url", "body"):
            raise wrong(key, entry, "one of custom_id, method, url, body, or a line with a prompt")
    if custom_id is None:
        raise ValueError("custom_id is missing: allowed is a string that is not empty")
    if value.get("method") != "POST":
        raise wrong("method", value.get("method"), "'POST'")
    url, body = value.get("url"), value.get("body")
    if url not in (CHAT, COMPLETIONS):
        raise wrong("url", url, f"{CHAT!r} or {COMPLETIONS!r}")
    if not isinstance(body, dict):
        raise wrong("body", body, "an object")
    return url, body


def _sampling(url: str | None, body: Mapping[str, Any], context: int, seed: int) -> SamplingParams:
    fields = {"seed": seed, **{key: body[key] for key in _ALL if key in body}}
    theirs = {}  # names where they differ from ours, for errors
    if url == CHAT:
        fields.setdefault("max_tokens", context)
        if "max_completion_tokens" in body:
            if "max_tokens" in body:
                raise wrong("max_tokens", body["max_tokens"], "None beside max_completion_tokens, its newer name")
            fields["max_tokens"], theirs["max_tokens"] = body["max_completion_tokens"], "max_completion_tokens"
        wanted = fields.pop("logprobs", False)
        if not isinstance(wanted, bool):
            raise wrong("logprobs", wanted, "True or False in a chat")
        if "top_logprobs" in body and not wanted:
            raise wrong("top_logprobs", body["top_logprobs"], "None without logprobs=True")
        if wanted:
            fields["logprobs"], theirs["logprobs"] = body.get("top_logprobs", 0), "top_logprobs"
    elif url == COMPLETIONS:
        fields.setdefault("max_tokens", 16)
    bias = fields.get("logit_bias")
    if isinstance(bias, dict):  # JSON's keys are strings
        if bad := [key for key in bias if not re.fullmatch("[0-9]{1,10}", key)]:
            raise wrong("logit_bias", bad[0], "token ids as keys")
        fields["logit_bias"] = {int(key): number for key, number in bias.items()}
    try:
        return SamplingParams(**fields)
    except ValueError as error:
        field, _, rest = str(error).partition("=")
        raise ValueError(f"{theirs.get(field, field)}={rest}") from None


def _arguments(url: str | None, body: Mapping[str, Any]) -> dict[str, Any]:
    priority, salt = body.get("priority", 0), body.get("cache_salt", "")
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise wrong("priority", priority, "an integer")
    if not isinstance(salt, str):
        raise wrong("cache_salt", salt, "a string")
    options = {"priority": priority, "salt": salt}
    if url != CHAT:
        prompt = body.get("prompt")
        ids = isinstance(prompt, list) and prompt and all(type(i) is int for i in prompt)
        if not (isinstance(prompt, str) and prompt) and not ids:
            raise wrong("prompt", prompt, "a text or a list of token ids, one prompt a line, not empty")
        return {"prompt": prompt, **options}
    if "messages" not in body:
        raise ValueError("messages is missing: allowed is a list of one message or more")
    effort = body.get("reasoning_effort")
    return {
        "messages": body["messages"],
        "tools": body.get("tools"),
        "thinking": effort != "none",
        "effort": None if effort == "none" else effort,
        "tool_choice": body.get("tool_choice"),
        "response_format": body.get("response_format"),
        **options,
    }


def _seed(seed: int, line: Line) -> int:
    key = f"line {line.number}" if line.custom_id is None else f"id {line.custom_id}"
    digest = hashlib.blake2b(f"{seed} {key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


# -- records -----------------------------------------------------------------------------------------------------


def failure(line: Line, code: str, message: str) -> dict[str, Any]:
    """The record of a line that has no answer. code: "invalid_request", or "generation_error" where it broke off."""
    error = {"code": code, "message": " ".join(message.split())}
    if line.plain:
        return {"id": line.id, "line": line.number, "custom_id": line.custom_id, "text": None, "error": error}
    return {"id": line.id, "custom_id": line.custom_id, "response": None, "error": error}


def answer(call: Call, results: Sequence[Completion | ChatCompletion], tokenizer: Tokenizer) -> dict[str, Any]:
    """The record of a call whose samples all ended."""
    completions = [r.completion if isinstance(r, ChatCompletion) else r for r in results]
    for completion in completions:
        if completion.finish_reason == "error":  # numbers of requests are of this run
            return failure(call.line, "generation_error", re.sub(r"^request \d+: ", "", completion.error or "error"))
    prompt, made = len(completions[0].prompt_token_ids), sum(len(c.token_ids) for c in completions)
    usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
    line, of_prompt = call.line, completions[0].prompt_logprobs
    if call.url is None:
        [choice] = (_choice(call, 0, c, tokenizer) for c in completions)
        named = {"id": line.id, "line": line.number, "custom_id": line.custom_id}
        shown = {key: choice[key] for key in choice if key != "index" and choice[key] is not None}
        return {**named, **shown, "usage": usage, "error": None}
    head = {
        "id": line.id.replace("batch_req", "chatcmpl" if call.url == CHAT else "cmpl"),
        "object": "chat.completion" if call.url == CHAT else "text_completion",
        "created": 0,
        "model": call.model,
    }
    choices = [_choice(call, i, result, tokenizer) for i, result in enumerate(results)]
    body = {**head, "choices": choices, "usage": usage}
    if call.url == CHAT and of_prompt is not None:
        body["prompt_logprobs"] = _prompt_logprobs(completions[0], tokenizer)
    response = {"status_code": 200, "request_id": line.id.replace("batch_req", "req"), "body": body}
    return {"id": line.id, "custom_id": line.custom_id, "response": response, "error": None}


def _choice(call: Call, index: int, result: Completion | ChatCompletion, tokenizer: Tokenizer) -> dict[str, Any]:
    if isinstance(result, ChatCompletion):
        found = result.completion.logprobs
        listed = found and {"content": _chat_logprobs(result.completion.token_ids, found, tokenizer)}
        message = _message(result)
        return {"index": index, "message": message, "logprobs": listed, "finish_reason": result.finish_reason}
    text, logprobs = result.text, result.logprobs and _text_logprobs([(result.token_ids, result.logprobs)], tokenizer)
    if call.echo:
        prompt = call.arguments["prompt"]
        text = (prompt if isinstance(prompt, str) else tokenizer.decode(prompt)) + (text or "")
        if result.logprobs and result.prompt_logprobs:
            parts = [(result.prompt_token_ids, result.prompt_logprobs), (result.token_ids, result.logprobs)]
            logprobs = _text_logprobs(parts, tokenizer)
    choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": result.finish_reason}
    if result.prompt_logprobs is not None and not call.echo:
        choice["prompt_logprobs"] = _prompt_logprobs(result, tokenizer)
    return choice


def _message(result: ChatCompletion) -> dict[str, Any]:
    calls = [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": _json_text(c.arguments)}}
        for c in result.tool_calls
    ]
    message: dict[str, Any] = {"role": "assistant", "content": result.content or (None if calls else "")}
    if result.thinking:
        message["reasoning_content"] = result.thinking
    return message | ({"tool_calls": calls} if calls else {})


def _json_text(value: dict[str, Any] | str) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _token(tokenizer: Tokenizer, token: int) -> str:
    """A token's text, or its bytes as OpenAI writes those that are no text of their own."""
    data = tokenizer.decode_bytes([token])
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _text_logprobs(parts: Iterable[tuple[list[int], Logprobs]], tokenizer: Tokenizer) -> dict[str, Any]:
    """A completion's: offsets are characters of the choice's text; a token's own is among its top ones."""
    out: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    utf8, offset = codecs.getincrementaldecoder("utf-8")("replace"), 0
    for ids, found in parts:
        for token, own, top in zip(ids, found.tokens, found.top, strict=True):
            best = {} if own is None else {**top, token: own}
            out["tokens"].append(_token(tokenizer, token))
            out["token_logprobs"].append(own if own is None else max(own, _LOWEST))
            out["top_logprobs"].append({_token(tokenizer, i): max(p, _LOWEST) for i, p in best.items()} or None)
            out["text_offset"].append(offset)
            offset += len(utf8.decode(tokenizer.decode_bytes([token], specials=False)))
    return out


def _chat_logprobs(ids: Sequence[int], found: Logprobs, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Of every token that the model made: thoughts, markers and calls have theirs too."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.decode_bytes([token])
        return {"token": _token(tokenizer, token), "logprob": max(logprob, _LOWEST), "bytes": list(data)}

    return [
        {**entry(token, own or 0.0), "top_logprobs": [entry(i, p) for i, p in top.items()]}
        for token, own, top in zip(ids, found.tokens, found.top, strict=True)
    ]


def _prompt_logprobs(completion: Completion, tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """As vLLM writes them: by token id; the first token has none."""
    found = completion.prompt_logprobs
    assert found is not None
    return [
        None
        if own is None
        else {
            str(i): {"logprob": max(p, _LOWEST), "decoded_token": _token(tokenizer, i)}
            for i, p in {**top, token: own}.items()
        }
        for token, own, top in zip(completion.prompt_token_ids, found.tokens, found.top, strict=True)
    ]
