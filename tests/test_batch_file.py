"""Batch files: every field of a line has its say, every line has one record, and nothing that ends a run changes them."""

import errno
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import jax.numpy as jnp
import pytest

import k3jax
from k3jax import SamplingParams, cli
from k3jax.engine import Output, Stats, batch_file, openai, replicas
from k3jax.engine.openai import CHAT, COMPLETIONS, Call, Line
from k3jax.inputs import fit


class Host:
    """An engine that needs no model: a request's tokens are the digits of its seed, at most nine. DELAY: seconds a step."""

    DELAY = 0.0

    def __init__(self, lm, *, rows, tokens):
        self.lm, self.rows, self.running, self.next = lm, rows, {}, 0

    def add_request(self, prompt, sampling, *, priority=0, salt=""):
        ids = self.lm.encode(prompt) if isinstance(prompt, str) else prompt
        fit("prompt 0", ids, sampling, self.lm.config, True)
        self.running[self.next] = ids, sampling, []
        self.next += 1
        return self.next - 1

    def token(self, ids, sampling, made):
        return ord(str(sampling.seed)[len(made)])

    def step(self):
        time.sleep(self.DELAY)
        out = []
        for number, (ids, sampling, made) in [*self.running.items()][: self.rows]:
            made.append(self.token(ids, sampling, made))
            ended = len(made) == min(sampling.max_tokens, 9)
            for sample in range(sampling.n):
                if "poison" in self.lm.decode(ids):
                    result = k3jax.Completion(ids, made, "", "error", f"request {number}: not finite")
                else:
                    result = k3jax.Completion(ids, [*made], "".join(map(chr, made)), "length")
                out.append(Output(number, sample, "", made[-1:], result if ended else None))
            if ended:
                del self.running[number]
        return out

    def stats(self):
        return Stats(requests=self.next)


@pytest.fixture
def host(monkeypatch):
    monkeypatch.setattr(replicas, "Engine", Host)
    return monkeypatch


def completion(name, prompt="And God said", **body):
    return {"custom_id": name, "method": "POST", "url": COMPLETIONS, "body": {"prompt": prompt, **body}}


def chat(name, **body):
    messages = [{"role": "user", "content": "Who is God?"}]
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": {"messages": messages, **body}}


def write(path, lines):
    """Lines as bytes, or what is to be JSON."""
    path.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
    return path


def records(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def call(line, **options):
    return Call.of(Line.read(7, json.dumps(line).encode()), **{"context": 4096, "model": "m", "seed": 5, **options})


def refusal(line):
    with pytest.raises(ValueError) as error:
        call(line)
    return str(error.value)


# -- lines to calls


SAMPLING = dict(
    max_tokens=9, min_tokens=2, n=3, temperature=0.5, top_p=0.7, top_k=11, min_p=0.1, presence_penalty=0.25,
    frequency_penalty=-0.5, repetition_penalty=1.25, seed=13, stop=["a", "b"], stop_token_ids=[17], ignore_eos=True,
    prompt_logprobs=4, logit_bias={"19": -1.5},
)  # fmt: skip
# What is set in a body -> what of the sampling it is.
COMMON = {name: {name: value} for name, value in SAMPLING.items()} | {
    "stop": {"stop": ("a", "b")}, "stop_token_ids": {"stop_token_ids": (17,)}, "logit_bias": {"logit_bias": {19: -1.5}},
}  # fmt: skip
NOTHING = {"model": "x", "user": "u", "metadata": {"k": "v"}, "stream": False}
WANTED = {
    COMPLETIONS: [({name: SAMPLING[name]}, want) for name, want in COMMON.items()]
    + [
        ({"logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": 3, "echo": True}, {"logprobs": 3, "prompt_logprobs": 3}),
        ({"echo": True}, {}),
        ({"best_of": 2, "n": 2}, {"n": 2}),
        ({"stop": "a"}, {"stop": ("a",)}),
        ({"temperature": None, "suffix": None}, {}),
    ],
    CHAT: [({name: SAMPLING[name]}, want) for name, want in COMMON.items()]
    + [
        ({"max_completion_tokens": 9}, {"max_tokens": 9}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": False}, {}),
        ({"parallel_tool_calls": True}, {}),
    ],
    None: [({name: SAMPLING[name]}, want) for name, want in COMMON.items() if name != "n"]
    + [({"logprobs": 3, "logprobs_mode": "processed"}, {"logprobs": 3, "logprobs_mode": "processed"})]
    + [({"n": 1}, {})],
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FORMAT = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
ARGUMENTS = [
    ({"tools": [TOOL]}, {"tools": [TOOL]}),
    ({"tools": [TOOL], "tool_choice": "none"}, {"tools": [TOOL], "tool_choice": "none"}),
    ({"response_format": FORMAT}, {"response_format": FORMAT}),
    ({"reasoning_effort": "low"}, {"effort": "low"}),
    ({"reasoning_effort": "none"}, {"thinking": False}),
]
EITHER = [({"priority": -3}, {"priority": -3}), ({"cache_salt": "s"}, {"salt": "s"})]


def line_of(url, body):
    return {CHAT: chat, COMPLETIONS: completion}[url]("a", **body) if url else {"prompt": "And God said", **body}


@pytest.mark.parametrize("url", WANTED, ids=str)
def test_every_field_reaches_the_engine(url):
    """Alone, it changes what it is meant to change and nothing else; and no field is known but by this table."""
    plain = call(line_of(url, {}))
    assert plain.sampling == SamplingParams(
        seed=plain.sampling.seed, max_tokens={CHAT: 4096, COMPLETIONS: 16, None: 64}[url]
    )
    for body, want in WANTED[url]:
        found = vars(call(line_of(url, body)).sampling)
        assert found == {**vars(plain.sampling), **want}, body
    options = {"priority": 0, "salt": ""}
    if url == CHAT:
        options |= dict.fromkeys(("tools", "effort", "tool_choice", "response_format")) | {"thinking": True}
    for body, want in [*EITHER, *(ARGUMENTS if url == CHAT else [])]:
        found = call(line_of(url, body))
        assert {k: v for k, v in found.arguments.items() if k not in ("prompt", "messages")} == {**options, **want}
        assert found.sampling == plain.sampling
    told = {name for body, _ in WANTED[url] + EITHER + ARGUMENTS * (url == CHAT) for name in body}
    told |= {"prompt", "messages", "json_schema", "regex", *(NOTHING if url else ())}
    assert told.issuperset(openai._FIELDS[url])
    if url:
        named = call(line_of(url, NOTHING))
        assert (named.model, plain.model) == ("x", "m") and named.sampling == plain.sampling


@pytest.mark.parametrize("url", WANTED, ids=str)
def test_what_cannot_be_honoured_is_refused_by_name(url):
    bodies = [
        ("temperature", -1), ("temperature", "1"), ("top_p", 0), ("max_tokens", 0), ("max_tokens", 1.5), ("seed", -1),
        ("stop", [1]), ("logit_bias", {"a": 1}), ("logit_bias", [1]), ("priority", "high"), ("cache_salt", 5), ("n", 0),
        ("nonsense", 1), ("Temperature", 1), ("prompt_logprobs", -1),
    ]  # fmt: skip
    if url:
        bodies += [
            ("stream", True),
            ("stream", 0),
            ("stream_options", {}),
            ("model", 5),
            ("json_schema", "{}"),
            ("regex", "a"),
        ]
    if url == CHAT:
        bodies += [
            ("best_of", 1), ("echo", True), ("logprobs", 3), ("top_logprobs", 2), ("max_completion_tokens", 0),
            ("parallel_tool_calls", False), ("functions", []), ("prompt", "a"),
        ]  # fmt: skip
    else:
        bodies += [("best_of", 2), ("echo", "yes"), ("suffix", "x"), ("top_logprobs", 2), ("logprobs", True)]
        bodies += [("prompt", []), ("prompt", ""), ("prompt", ["a", "b"]), ("prompt", [[1]]), ("prompt", [True])]
    if url is None:
        bodies += [("n", 2), ("user", "u"), ("model", "x"), ("stream", False)]
    for field, value in bodies:
        said = refusal(line_of(url, {field: value}))
        assert said.startswith(f"{field}") and "allowed" in said and "\n" not in said, said
    if url == CHAT:
        both = refusal(chat("a", max_tokens=1, max_completion_tokens=2))
        assert both.startswith("max_tokens=1: allowed is None beside max_completion_tokens")
        assert refusal(chat("a", logprobs=True, top_logprobs=-1)).startswith("top_logprobs=-1: allowed")
    if url == COMPLETIONS:
        assert "beside echo" in refusal(completion("a", echo=True, logprobs=1, prompt_logprobs=2))


def test_what_a_line_must_have():
    good = completion("a")
    for change, words in (
        ({"custom_id": 5}, "custom_id=5: allowed is a string"),
        ({"custom_id": ""}, "custom_id=''"),
        ({"method": "GET"}, "method='GET': allowed is 'POST'"),
        ({"url": "/v1/embeddings"}, "url='/v1/embeddings': allowed is '/v1/chat/completions' or"),
        ({"url": ["/v1/completions"]}, "url="),
        ({"body": [1]}, "body=[1]: allowed is an object"),
        ({"extra": 1}, "extra=1: allowed is one of custom_id, method, url, body"),
    ):
        assert words in refusal({**good, **change})
    for missing in good:
        assert missing in refusal({key: value for key, value in good.items() if key != missing})
    assert "messages is missing" in refusal({**chat("a"), "body": {}})
    assert refusal([1]) == "the line is no JSON object"
    for raw, words in (
        (b"{", "not JSON"),
        (b"\xff{}", "not UTF-8: invalid start byte at byte 0"),
        (b'{"prompt": NaN}', "not JSON: a number out of range"),
        (b"[" * 100_000, "not JSON: nested too deeply"),
    ):
        assert words in (Line.read(1, raw).error or "")
    assert Line.read(1, b'\xef\xbb\xbf {"prompt": "a"}\r\n').value == {"prompt": "a"}


def test_seeds_repeat_and_differ():
    def seed(line, **options):
        return call(line, **options).sampling.seed

    assert seed(completion("a")) == seed(completion("a", prompt="else")) != seed(completion("b"))
    assert seed(completion("a")) != seed(completion("a"), seed=6)
    assert seed({"prompt": "a"}) == seed({"prompt": "b"}) != seed(completion("7"))
    assert seed(completion("a", seed=3), seed=6) == 3
    seeds = {seed(completion(str(i))) for i in range(1000)}
    assert len(seeds) == 1000 and all(0 <= s < 2**63 for s in seeds) and max(seeds) > 2**62


# -- records


def test_records_are_what_the_model_says(pair, tmp_path):
    """Each is what lm.generate gives for that line."""
    given = [
        completion("ids", [5, 17, 400], max_tokens=3, temperature=0),
        completion("many", n=2, seed=4, max_tokens=4),
        {"prompt": "In the beginning", "max_tokens": 4},
        {"prompt": "In the beginning", "custom_id": "own", "max_tokens": 4, "stop": "e"},
        chat("talk", max_tokens=4, reasoning_effort="none"),
        chat("think", max_completion_tokens=4, tools=[TOOL], response_format=FORMAT, model="named"),
    ]
    source, target = write(tmp_path / "in", given), tmp_path / "out"
    summary = batch_file.run(pair, source, target, rows=8, tokens=512)
    found = {record["custom_id"]: record for record in records(target)}
    assert len(found) == len(given) and summary.ok
    lines = [Line.read(number, json.dumps(line).encode()) for number, line in enumerate(given, start=1)]
    calls = [Call.of(line, context=4096, model=pair.directory.name, seed=0) for line in lines]
    prompts = []
    for wanted in calls:
        chats = {k: v for k, v in wanted.arguments.items() if k not in ("prompt", "priority", "salt")}
        prompt = wanted.arguments["prompt"] if "prompt" in wanted.arguments else pair.chat_format.encode(**chats)
        prompts.append(pair.encode(prompt) if isinstance(prompt, str) else prompt)
    results, usages = iter(pair.generate(prompts, [wanted.sampling for wanted in calls])), []
    for wanted, line, prompt in zip(calls, given, prompts, strict=True):
        record = found[line.get("custom_id")]
        assert record["id"] == wanted.line.id and record["error"] is None
        body = record["response"]["body"] if wanted.url else record
        choices, made = body["choices"] if wanted.url else [record], 0
        for choice in choices:
            result = next(results)
            text = choice["message"] if wanted.url == CHAT else {"content": choice["text"]}
            assert text.get("reasoning_content", "") + text["content"] == result.text
            assert choice["finish_reason"] == result.finish_reason
            made += len(result.token_ids)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": made, "total_tokens": len(prompt) + made}
        assert body["usage"] == usage
        usages.append((len(prompt), made))
        if wanted.url:
            assert record["response"]["status_code"] == 200
            assert body["model"] == line["body"].get("model", pair.directory.name)
            assert body["object"] == ("chat.completion" if wanted.url == CHAT else "text_completion")
            assert [choice["index"] for choice in choices] == [*range(wanted.sampling.n)]
    assert next(results, None) is None
    thought = found["think"]["response"]["body"]["choices"][0]["message"]
    talk = found["talk"]["response"]["body"]["choices"][0]["message"]
    assert thought["reasoning_content"] and not thought["content"] and "reasoning_content" not in talk
    assert found[None]["line"] == 3 and "logprobs" not in found[None]
    done = summary.progress
    assert (done.prompt_tokens, done.completion_tokens) == tuple(map(sum, zip(*usages, strict=True)))
    written = json.loads((tmp_path / "out.summary.json").read_text())
    assert written["generated"] == done.completion_tokens == written["engines"][0]["tokens"]
    assert (written["lines"], written["succeeded"], written["failed"]) == (6, 6, 0) and written["versions"]["jax"]


def test_log_probabilities_in_records(pair):
    """Of a text with a character that two tokens make, and with a stop token at its end; log 0 is -9999."""
    special = pair.tokenizer.special_ids
    prompt, ids = pair.encode("Let ä"), [*pair.encode("ö"), special["<|sep|>"], *pair.encode(" be"), special["[EOS]"]]
    bytes_ = pair.tokenizer.decode_bytes
    assert len(bytes_(ids[:1])) == 1  # half a character

    def some(tokens):
        top = [{5: -0.5, token: -1.0 - i / 4} if i % 2 else {5: -0.5, 6: -2.0} for i, token in enumerate(tokens)]
        return k3jax.Logprobs("raw", [-1.0 - i / 4 for i in range(len(tokens))], top)

    of_prompt, of_ids = some(prompt), some(ids)
    of_prompt.tokens[0], of_prompt.top[0] = None, {}
    of_ids.tokens[1] = of_ids.top[1][ids[1]] = float("-inf")
    done = k3jax.Completion(prompt, ids, "ö be", "stop", None, ids[-1], of_ids, of_prompt)

    record = openai.answer(call(completion("a", "Let ä", echo=True, logprobs=2)), [done], pair.tokenizer)
    json.dumps(record, allow_nan=False)
    [choice] = record["response"]["body"]["choices"]
    found, text = choice["logprobs"], choice["text"]
    assert text == "Let äö be" and "prompt_logprobs" not in choice
    assert found["token_logprobs"] == [None, *of_prompt.tokens[1:], of_ids.tokens[0], -9999, *of_ids.tokens[2:]]
    assert found["text_offset"][-2:] == [text.rfind(found["tokens"][-2]), len(text)]
    rows = [*zip(*(found[key] for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")), strict=True)]
    for i, (token, own, top, at) in enumerate(rows):
        data = bytes_([[*prompt, *ids][i]])
        assert token == (
            "bytes:" + "".join(f"\\x{b:02x}" for b in data) if b"\xc3" in data or data[0] > 127 else data.decode()
        )
        assert token.startswith(("bytes:", "<|")) or text.startswith(token.removeprefix("[EOS]"), at)
        assert top is None if i == 0 else top[token] == own and len(top) in (2, 3)
    plain = openai.answer(call({"prompt": "Let ä", "logprobs": 2}), [done], pair.tokenizer)
    assert plain["logprobs"]["text_offset"][0] == 0 and plain["text"] == "ö be"
    assert plain["logprobs"]["tokens"] == found["tokens"][len(prompt) :]
    assert plain["prompt_logprobs"][0] is None and len(plain["prompt_logprobs"]) == len(prompt)
    for i, entry in enumerate(plain["prompt_logprobs"][1:], start=1):
        assert entry == {
            str(t): {"logprob": p, "decoded_token": found["tokens"][i] if t == prompt[i] else bytes_([t]).decode()}
            for t, p in {**of_prompt.top[i], prompt[i]: of_prompt.tokens[i]}.items()
        }
    record = openai.answer(
        call(chat("a", logprobs=True, top_logprobs=2, prompt_logprobs=2)),
        [k3jax.ChatCompletion("", "ö be", (), "stop", done)],
        pair.tokenizer,
    )
    body = json.loads(json.dumps(record, allow_nan=False))["response"]["body"]
    assert body["prompt_logprobs"] == plain["prompt_logprobs"]
    content = body["choices"][0]["logprobs"]["content"]
    assert [bytes(entry["bytes"]) for entry in content] == [bytes_([i]) for i in ids]
    assert [entry["logprob"] for entry in content] == plain["logprobs"]["token_logprobs"]
    assert [{e["token"]: e["logprob"] for e in entry["top_logprobs"]} for entry in content][1:2] == [
        plain["logprobs"]["top_logprobs"][1]
    ]


def test_calls_of_tools_in_records(pair):
    """Arguments as text; content is null where there are calls alone."""
    calls = (k3jax.ToolCall("f", {"ä": 1}, "call_1"), k3jax.ToolCall("g", "[", "call_2"))
    result = k3jax.ChatCompletion("hm", "", calls, "tool_calls", k3jax.Completion([1], [5], "hm", "stop"))
    record = openai.answer(call(chat("a", tools=[TOOL])), [result], pair.tokenizer)
    [choice] = record["response"]["body"]["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["logprobs"] is None
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"ä": 1}'}},
            {"id": "call_2", "type": "function", "function": {"name": "g", "arguments": "["}},
        ],
    }


def test_bad_lines_become_error_records_and_the_rest_go_on(pair, host, tmp_path):
    given = [
        completion("a"), b"", b"nonsense", b"\xff\xfe", b"   ", b"[1]", completion("b", temperature=9e99), {"prompt": 5},
        completion("long", "word " * 5000), completion("a"), completion("poison", "poison"), {"prompt": "poison"},
        {"custom_id": "\ud800", "prompt": "a"}, completion("c"),
    ]  # fmt: skip
    source, target = write(tmp_path / "in", given), tmp_path / "out"
    summary = batch_file.run(pair, source, target, rows=2)
    found = {int(record["id"].split("_")[2]): record for record in records(target)}
    assert sorted(found) == [1, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    failed = {number: record["error"] for number, record in found.items() if record["error"]}
    assert sorted(failed) == [3, 4, 6, 7, 8, 9, 10, 11, 12] and (
        summary.progress.succeeded,
        summary.progress.failed,
    ) == (3, 9)
    for number, words in {
        3: "not JSON", 4: "not UTF-8", 6: "no JSON object", 7: "temperature=9e+99: allowed is", 8: "prompt=5: allowed is",
        9: "max_tokens=16: allowed are 4096", 10: "custom_id='a': allowed is one that no line before has",
    }.items():  # fmt: skip
        assert failed[number]["code"] == "invalid_request" and words in failed[number]["message"]
    assert failed[11] == failed[12] == {"code": "generation_error", "message": "not finite"}
    assert found[3] == {**found[3], "custom_id": None, "response": None} and found[7]["custom_id"] == "b"
    assert found[12]["line"] == 12 and found[13]["custom_id"] == "\ud800"
    assert not summary.ok


def test_few_are_in_flight_and_few_lines_are_read(pair, host, tmp_path):
    class Watched(Host):
        def step(self):
            nonlocal most
            most = max(most, len(self.running))
            read = max((int(name.removeprefix("r")) for name in lines._seen), default=-1) + 1
            assert read - batch.progress.done <= 2 * self.rows + 1
            return super().step()

    class Lines(batch_file._Lines):
        def __init__(self, path, records, call):
            nonlocal lines, batch
            super().__init__(path, records, call)
            lines, batch = self, records

    lines, batch, most = None, None, 0
    host.setattr(replicas, "Engine", Watched)
    host.setattr(batch_file, "_Lines", Lines)
    source = write(tmp_path / "in", [completion(f"r{i}") for i in range(50)])
    assert batch_file.run(pair, source, tmp_path / "out", rows=3).ok
    assert most == 6


# -- resuming


def small_batch(path, count=12):
    given = [completion(f"r{i}", max_tokens=1 + i % 5, model="m") for i in range(count - 3)]
    return write(path, [*given[:4], b"garbage", completion("r1"), {"prompt": "plain", "max_tokens": 2}, *given[4:]])


def whole(path):
    lines = path.read_bytes().split(b"\n")
    assert lines[-1] == b""
    return sorted(lines[:-1])


def test_cut_at_any_byte_it_goes_on_to_the_same(pair, host, tmp_path):
    """Nothing is lost, nothing is there twice, nothing is different."""
    source, target = small_batch(tmp_path / "in"), tmp_path / "out"
    first = batch_file.run(pair, source, target, rows=2)
    data, want = target.read_bytes(), whole(target)
    assert len(want) == 12 and len({json.loads(line)["id"] for line in want}) == 12
    for cut in [*random.Random(0).sample(range(len(data)), 25), 0, 1, len(data) - 1, len(data)]:
        target.write_bytes(data[:cut])
        again = batch_file.run(pair, source, target, rows=3)
        assert whole(target) == want, cut
        left = dict(generated=0, seconds=0.0, earlier=0)
        assert all(getattr(again.progress, k) == v for k, v in vars(first.progress).items() if k not in left)
        assert target.read_bytes().startswith(data[: data.rfind(b"\n", 0, cut) + 1])
    assert again.progress.earlier == 10 and again.engines[0]["requests"] == 0


def test_a_second_line_of_a_name_stays_the_second(pair, host, tmp_path):
    source, target = write(tmp_path / "in", [completion("a"), completion("a")]), tmp_path / "out"
    batch_file.run(pair, source, target)
    want = whole(target)
    for line in want:
        target.write_bytes(line + b"\n")
        batch_file.run(pair, source, target)
        assert whole(target) == want


def test_an_input_that_grew_goes_on(pair, host, tmp_path):
    source, target = write(tmp_path / "in", [completion("a")]), tmp_path / "out"
    source.write_bytes(source.read_bytes().rstrip())
    batch_file.run(pair, source, target)
    write(source, [completion("a"), completion("b")])
    summary = batch_file.run(pair, source, target)
    assert summary.ok and (summary.progress.lines, summary.progress.earlier) == (2, 1)
    assert [record["custom_id"] for record in records(target)] == ["a", "b"]


def test_an_output_of_something_else_is_refused_untouched(pair, host, tmp_path):
    source, target = small_batch(tmp_path / "in"), tmp_path / "out"
    batch_file.run(pair, source, target)
    data, state = target.read_bytes(), (tmp_path / "out.state").read_text()
    other, changed = small_batch(tmp_path / "other", 11), tmp_path / "changed"
    changed.write_bytes(source.read_bytes().replace(b"And God", b"And Man", 1))
    for content, kept, options, words in (
        (data, state, {"input": other}, "records answer no line of"),
        (data, state, {"input": changed}, "1 of its 12 records answer no line of"),
        (data, state, {"seed": 1}, "its records are of seed 0, not 1"),
        (data, state.replace(json.loads(state)["weights"], "00000000"), {}, "its records are of weights 00000000, not"),
        (data, None, {}, "no out.state says of which model"),
        (data, "{", {}, "no out.state says of which model"),
        (b"a letter", None, {}, "no out.state says of which model"),
        (data + b"{}\n", state, {}, "line 13 is no record of a batch"),
        (data + b"\0\0\n", state, {}, "line 13 is no record of a batch"),
        (data + data[: data.index(b"\n") + 1] + b"{", state, {}, "line 13 is there twice"),
    ):
        target.write_bytes(content)
        (tmp_path / "out.state").unlink(missing_ok=True)
        if kept is not None:
            (tmp_path / "out.state").write_text(kept)
        with pytest.raises(ValueError, match=words):
            batch_file.run(pair, **{"input": source, "output": target, **options})
        assert target.read_bytes() == content, words


def test_files_that_cannot_be_used(pair, host, tmp_path):
    source = small_batch(tmp_path / "in")
    small_batch(tmp_path / "x.state")
    os.mkfifo(tmp_path / "pipe")
    for given, target, words in (
        (tmp_path / "none", tmp_path / "out", "input=.*allowed is a file on disk"),
        (tmp_path, tmp_path / "out", "input=.*allowed is a file on disk"),
        (tmp_path / "pipe", tmp_path / "out", "input=.*which can be read twice"),
        (source, tmp_path, "output=.*allowed is a file on disk"),
        (source, tmp_path / "pipe", "output=.*allowed is a file on disk"),
        (source, tmp_path / "no" / "out", "output=.*no such directory"),
        (source, source, "output=.*that are different files"),
        (tmp_path / "x.state", tmp_path / "x", "output=.*that are different files"),
    ):
        with pytest.raises(ValueError, match=words):
            batch_file.run(pair, given, target)
    for summary in (tmp_path, tmp_path / "no" / "s", source, tmp_path / "out"):
        with pytest.raises(ValueError, match="summary"):
            batch_file.run(pair, source, tmp_path / "out", summary=summary)
    assert not (tmp_path / "out").exists()
    with (tmp_path / "out").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process is writing it"):
            batch_file.run(pair, source, tmp_path / "out")
    with pytest.raises(ValueError, match="seed=-1: allowed"):
        batch_file.run(pair, source, tmp_path / "out", seed=-1)


def test_a_full_disk_ends_the_run_on_a_whole_line(pair, host, tmp_path):
    source, target, write_all = small_batch(tmp_path / "in"), tmp_path / "out", os.write
    room = 1000

    def full(file, data):
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        room, part = max(0, room - len(data)), data[:room]
        return write_all(file, part)

    host.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        batch_file.run(pair, source, target, rows=2)
    assert 0 < len(whole(target)) < 12
    host.setattr(os, "write", write_all)
    batch_file.run(pair, source, target, rows=2)
    batch_file.run(pair, source, tmp_path / "clean", rows=2)
    assert whole(target) == whole(tmp_path / "clean")


def test_what_an_engine_raises_ends_the_run(pair, host, tmp_path):
    def step(self):
        raise RuntimeError("the device is gone")

    host.setattr(Host, "step", step)
    threads = threading.active_count()
    with pytest.raises(RuntimeError, match="the device is gone"):
        batch_file.run([pair, pair], small_batch(tmp_path / "in"), tmp_path / "out", rows=2)
    assert threading.active_count() == threads


# -- the command


def command(model, source, target, *options):
    return ["batch", "--model", str(model), "-i", str(source), "-o", str(target), "--rows", "2", *options]


def test_exit_codes_and_what_is_said(pair_directory, host, tmp_path, capsys):
    good, bad = write(tmp_path / "good", [completion("a")]), write(tmp_path / "bad", [completion("a"), b"x"])
    assert cli.main(command(pair_directory, good, tmp_path / "1")) == 0
    assert "1 of 1 lines, 0 errors" in capsys.readouterr().err
    assert cli.main(command(pair_directory, bad, tmp_path / "2", "--summary", str(tmp_path / "s.json"))) == 1
    assert (
        "2 of 2 lines, 1 error," in capsys.readouterr().err
        and json.loads((tmp_path / "s.json").read_text())["failed"] == 1
    )
    assert (
        cli.main(command(pair_directory, bad, tmp_path / "2")) == 1
    )  # nothing left to do, and still not all are answered
    capsys.readouterr()
    for arguments, words in (
        (command(pair_directory, tmp_path / "none", tmp_path / "3"), "input="),
        (command(tmp_path, tmp_path / "none", tmp_path / "3"), "input="),  # before the model is looked for
        (command(pair_directory, good, tmp_path / "2"), "answer no line of"),
        (command(pair_directory, good, tmp_path / "3", "--replicas", "99"), "replicas=99: allowed are 'auto' and 1 to"),
        (command(pair_directory, good, tmp_path / "3", "--replicas", "0"), "replicas=0"),
    ):
        assert cli.main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and words in err

    def interrupted(progress):
        raise KeyboardInterrupt

    host.setattr(batch_file, "shown", lambda: __import__("contextlib").nullcontext(interrupted))
    threads = threading.active_count()
    assert cli.main(command(pair_directory, good, tmp_path / "4")) == 130
    assert threading.active_count() == threads and "the same command goes on from it" in capsys.readouterr().err


def test_progress(pair, host, tmp_path, capsys):
    host.setattr(Host, "DELAY", 0.05)
    source = small_batch(tmp_path / "in")
    with batch_file.shown(every=0.0) as report:
        batch_file.run(pair, source, tmp_path / "out", rows=4, report=report)
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("12 of 12 lines, 2 errors, ") and said[-1].endswith("tokens/s, ETA 0:00:00")
    assert "ETA ?" in said[0] and len(said) >= 2
    done = [int(line.split()[0]) for line in said]
    assert done == sorted(done)


HOST = """
import sys
sys.path.insert(0, sys.argv[1])
import test_batch_file
from k3jax import cli
from k3jax.engine import replicas
replicas.Engine = test_batch_file.{}
test_batch_file.Host.DELAY = 0.02
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.parametrize("engine", ["host", pytest.param("real", marks=pytest.mark.slow)])
def test_killed_at_random_moments_it_loses_and_repeats_nothing(engine, pair, pair_directory, monkeypatch, tmp_path):
    """SIGKILL twice and SIGINT once while records are being written; then to the end."""
    source, target, rng = small_batch(tmp_path / "in", 60), tmp_path / "out", random.Random()
    arguments = [sys.executable, "-m", "k3jax", *command(pair_directory, source, target)]
    if engine == "host":
        monkeypatch.setattr(replicas, "Engine", Host)
        arguments[1:3] = ["-c", HOST.format("Host"), os.path.dirname(__file__)]
    broken_off = 0
    for end in (signal.SIGKILL, signal.SIGKILL, signal.SIGINT, None):
        size = target.stat().st_size if target.exists() else 0
        process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
        if end is not None:
            while process.poll() is None and (not target.exists() or target.stat().st_size <= size):
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.15))
            process.send_signal(end)
        _, said = process.communicate()
        if process.returncode == 1 and "60 of 60 lines" in said:  # it was done before the signal came
            continue
        broken_off += end is not None
        assert process.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130, None: 1}[end], said
        if end == signal.SIGINT:
            assert "the same command goes on from it" in said and whole(target)
            interrupted = json.loads((tmp_path / "out.summary.json").read_text())
            assert interrupted["succeeded"] + interrupted["failed"] == len(whole(target)) < 60
    assert broken_off
    batch_file.run(pair, source, tmp_path / "clean", rows=2)
    assert whole(target) == whole(tmp_path / "clean")


class Placed(Host):
    """Tokens are the model's most likely ones, computed where its parameters are."""

    def __init__(self, lm, *, rows, tokens):
        super().__init__(lm, rows=rows, tokens=tokens)
        [self.home] = lm.model.lm_head.weight[...].devices()
        assert self.home == jnp.zeros(1).device

    def token(self, ids, sampling, made):
        return int(self.lm.logits([*ids, *made])[-1].argmax())

    def stats(self):
        return Stats(requests=self.next, slots=self.home.id)


@pytest.mark.parametrize("engine", ["host", pytest.param("real", marks=pytest.mark.slow)])
def test_two_replicas_share_the_lines(engine, pair, pair_directory, monkeypatch, tmp_path):
    """Each on a device of its own; together they write what one writes."""
    given = [completion(f"r{i}", max_tokens=3, model="m") for i in range(12)]
    source, target = write(tmp_path / "in", given), tmp_path / "out"
    arguments = [sys.executable, "-m", "k3jax", *command(pair_directory, source, target, "--replicas", "2")]
    if engine == "host":
        monkeypatch.setattr(replicas, "Engine", Placed)
        arguments[1:3] = ["-c", HOST.format("Placed"), os.path.dirname(__file__)]
    flags = f"--xla_force_host_platform_device_count=2 {os.environ.get('XLA_FLAGS', '')}"
    done = subprocess.run(arguments, env={**os.environ, "XLA_FLAGS": flags}, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    engines = json.loads((tmp_path / "out.summary.json").read_text())["engines"]
    assert len(engines) == 2 and sum(e["requests"] for e in engines) == 12 and all(e["requests"] for e in engines)
    assert engine == "real" or {e["slots"] for e in engines} == {0, 1}
    batch_file.run(pair, source, tmp_path / "clean", rows=2)
    assert whole(target) == whole(tmp_path / "clean")
