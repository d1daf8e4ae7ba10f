"""The engine as its users see it: requests in, outputs out, aborts, samples, conversations, suspending, figures."""

import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from helpers import log_softmax

import k3jax
from k3jax.engine import Buckets, Engine, suspended
from k3jax.sampling import SamplingParams

PAGE = 16
BUCKETS = Buckets(rows=(4,), tokens=(64,), pages=(40,))  # three programs for all tests
PROMPTS = [[5, 17, 200], [9], list(range(60, 100)), [31, 4, 4, 250, 11, 80] * 11]
GREEDY = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(pair):
    with Engine(pair, rows=4, tokens=64, page=PAGE, pages=40, snapshots=3, buckets=BUCKETS) as engine:
        yield engine


@pytest.fixture(autouse=True)
def clean(request):
    """Before each test nothing is under way and no prefix is held; after it nothing is, and the books balance."""
    if "engine" not in request.fixturenames:
        yield
        return
    engine = request.getfixturevalue("engine")
    engine.cache.clear()
    yield
    assert not engine.has_work and not engine.scheduler.running and not engine.scheduler.waiting
    engine.cache.clear()
    engine.pool.check()
    assert (engine.pool.free_slots, engine.pool.free_pages) == (engine.pool.slots, engine.pool.pages)


def finish(engine):
    """All outputs by request and sample: tokens, text, result."""
    found = {}
    for output in engine.run():
        tokens, text, _ = found.get(output[:2], ([], "", None))
        found[output[:2]] = (tokens + output.token_ids, text + output.text, output.result)
    return found


def alone(lm, prompt, params=GREEDY):
    return lm.generate(prompt if isinstance(prompt, str) else [prompt], params)


@pytest.mark.slow  # schedules in the quick suite do more
def test_requests_that_come_at_any_time_are_as_alone(engine, pair):
    numbers = {engine.add_request(PROMPTS[0], GREEDY): 0}
    engine.step()
    numbers |= {engine.add_request(PROMPTS[i], GREEDY): i for i in (1, 2)}
    outputs = engine.step()
    numbers[engine.add_request(PROMPTS[3], GREEDY)] = 3
    outputs += list(engine.run())
    results = {output.request: output.result for output in outputs if output.result}
    for number, i in numbers.items():
        assert results[number].token_ids == alone(pair, PROMPTS[i])[0].token_ids
    assert sorted(results) == sorted(numbers)


def test_outputs_make_the_completion(engine, pair):
    """Texts and tokens in pieces, the completion last; and it is that of generate, log-probabilities included."""
    params = SamplingParams(max_tokens=12, seed=3, logprobs=2, prompt_logprobs=1, stop_token_ids=(11,))
    number = engine.add_request("And God said", params)
    [(tokens, text, result)] = finish(engine).values()
    [want] = pair.generate("And God said", params)
    assert (tokens, text) == (result.token_ids, result.text) == (want.token_ids, want.text)
    assert dataclasses.replace(result, logprobs=None, prompt_logprobs=None) == dataclasses.replace(
        want, logprobs=None, prompt_logprobs=None
    )
    for got, wanted in ((result.logprobs, want.logprobs), (result.prompt_logprobs, want.prompt_logprobs)):
        np.testing.assert_allclose([p or 0 for p in got.tokens], [p or 0 for p in wanted.tokens], atol=1e-4)
    assert engine.stats().waiting == 0 and number not in engine._names


def test_samples_share_a_prompt_by_copies_of_its_memory(engine, pair):
    """n = 6 on four rows: the prompt is computed once but for its last token, and each sample is what its seed gives."""
    params, prompt = SamplingParams(n=6, seed=5, max_tokens=7, ignore_eos=True), PROMPTS[2]
    before = engine.stats()
    number = engine.add_request(prompt, params)
    found, after = finish(engine), engine.stats()
    assert sorted(found) == [(number, sample) for sample in range(6)]
    for (_, sample), (tokens, _, _) in found.items():
        assert tokens == alone(pair, prompt, params.samples()[sample])[0].token_ids
    assert after.prefix_hits - before.prefix_hits == 5
    assert after.reused_tokens - before.reused_tokens == 5 * (len(prompt) - 1)


def test_a_prefix_is_computed_once_and_salts_keep_apart(engine, pair):
    """Reported hits: the last whole page before the prompt's last token; at most length - 1 of a repeated prompt."""
    prompt = PROMPTS[3]  # 66 tokens: boundary at 64
    used = engine.stats().reused_tokens
    for salt, reused in (("", 0), ("", 64), ("other", 0), ("other", 64)):
        engine.add_request(prompt, GREEDY, salt=salt)
        [(tokens, _, _)] = finish(engine).values()
        assert tokens == alone(pair, prompt)[0].token_ids
        assert engine.stats().reused_tokens - used == reused
        used = engine.stats().reused_tokens
    engine.add_request([*prompt[:64], 7, 8, 9], GREEDY)  # turns off within the page
    [(tokens, _, _)] = finish(engine).values()
    assert tokens == alone(pair, [*prompt[:64], 7, 8, 9])[0].token_ids
    assert engine.stats().reused_tokens - used == 64
    used = engine.stats().reused_tokens
    engine.add_request(prompt[:64], GREEDY)  # all of it is held, but the last token has to be computed
    [(tokens, _, _)] = finish(engine).values()
    assert tokens == alone(pair, prompt[:64])[0].token_ids
    assert engine.stats().reused_tokens - used <= 63


def test_priorities_go_first(engine):
    """On four rows: of six equal requests the two of low priority, which came first, begin last."""
    numbers = [engine.add_request(PROMPTS[0], GREEDY, priority=p) for p in (1, 1, 0, 0, 0, 0)]
    engine.step()
    assert {job.number for job in engine.scheduler.running} == {*numbers[2:]}
    finish(engine)


def test_an_abort_ends_all_samples_of_one_request(engine, pair):
    keep = engine.add_request(PROMPTS[1], GREEDY)
    gone = engine.add_request(PROMPTS[2], SamplingParams(n=5, seed=1, max_tokens=30, ignore_eos=True))
    engine.step()
    engine.abort(gone)
    engine.abort(gone)
    engine.abort(12345)
    found = finish(engine)
    assert found[keep, 0][2].token_ids == alone(pair, PROMPTS[1])[0].token_ids
    assert all(result is None for (number, _), (_, _, result) in found.items() if number == gone)


def test_a_conversation_goes_on_in_an_engine_of_other_pages(engine, pair):
    """A state of generate() has pages of 64 tokens, this engine's 16: in, and out again."""
    whole = SamplingParams(max_tokens=40, temperature=0.8, seed=5, ignore_eos=True)
    [want] = pair.generate([PROMPTS[3]], whole)
    [first] = pair.generate([PROMPTS[3]], dataclasses.replace(whole, max_tokens=5), keep_state=True)
    rest = dataclasses.replace(whole, max_tokens=20)
    engine.add_request([], rest, state=first.state, keep_state=True)
    [(tokens, _, second)] = finish(engine).values()
    [third] = pair.generate("", dataclasses.replace(whole, max_tokens=15), state=second.state)
    assert first.token_ids + tokens + third.token_ids == want.token_ids
    with pytest.raises(ValueError, match=r"keep_state with stop=\('a',\): allowed in an engine with look=1"):
        engine.add_request("a", SamplingParams(stop="a"), keep_state=True)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_suspended_request_goes_on(engine, pair, tmp_path, steps):
    """Before it began, within its prompt and within its output; through memory and through a directory; two samples, with
    penalties (they count what was made), log-probabilities and a stop text that half has come."""
    params = SamplingParams(
        n=2, seed=2, max_tokens=40, frequency_penalty=1.5, logprobs=2, stop=("zzz",), ignore_eos=True
    )
    prompt = list(range(300, 420))  # two steps
    want = alone(pair, prompt, params)
    first = engine.add_request(prompt, params)
    seen = [output for _ in range(steps) for output in engine.step()]
    taken = engine.suspend(first)
    assert not engine.has_work
    suspended.save(tmp_path / "request", taken, pair)
    for again in (taken, suspended.load(tmp_path / "request", pair)):
        engine.cache.clear()
        number = engine.resume(again)
        found = finish(engine)
        for sample, wanted in enumerate(want):
            tokens, text, result = found[number, sample]
            before = [output for output in seen if output.sample == sample]
            assert [i for output in before for i in output.token_ids] + tokens == wanted.token_ids == result.token_ids
            assert "".join(output.text for output in before) + text == wanted.text == result.text
            np.testing.assert_allclose(result.logprobs.tokens, wanted.logprobs.tokens, atol=1e-4)
    with pytest.raises(ValueError, match="number=77777: allowed are"):
        engine.suspend(77777)
    with pytest.raises(FileExistsError):
        suspended.save(tmp_path / "request", taken, pair)


def test_saved_requests_are_checked(engine, pair, tmp_path):
    number = engine.add_request(PROMPTS[2], GREEDY)
    engine.step()
    suspended.save(tmp_path / "request", engine.suspend(number), pair)
    file = tmp_path / "request" / "request.json"
    good = json.loads(file.read_text())
    for change, message in (
        ({"k3jax_request": 7}, "k3jax_request=7: allowed is 1"),
        ({"samples": [good["samples"][0] | {"made": [[3, None, []]]}]}, "its tokens are not those of request.json"),
        ({"samples": [good["samples"][0] | {"token_ids": [5000]}]}, "token_ids has id 5000"),
        ({"samples": [good["samples"][0] | {"sampling": {"top_p": 3}}]}, "not a saved request"),
        ({"samples": 5}, "not a saved request"),
    ):
        file.write_text(json.dumps(good | change))
        with pytest.raises(k3jax.CheckpointError, match=message):
            suspended.load(tmp_path / "request", pair)
    with pytest.raises(k3jax.CheckpointError, match="not a saved request"):
        suspended.load(tmp_path / "nothing", pair)


@pytest.mark.slow
def test_a_saved_request_goes_on_in_another_process(pair, pair_directory, tmp_path):
    params = SamplingParams(max_tokens=30, seed=7, presence_penalty=1.0, ignore_eos=True)
    with Engine(pair, rows=1, tokens=64, pages=4, snapshots=1, look=8) as engine:
        number = engine.add_request("And God said", params)
        before = [token for _ in range(2) for output in engine.step() for token in output.token_ids]
        suspended.save(tmp_path / "request", engine.suspend(number), pair)
    program = f"""
import json, k3jax
from k3jax.engine import Engine, suspended
lm = k3jax.load({str(pair_directory)!r}, dtype="float32")
engine = Engine(lm, rows=2, tokens=64, pages=8, snapshots=1)
engine.resume(suspended.load({str(tmp_path / "request")!r}, lm))
outputs = list(engine.run())
print(json.dumps([[i for o in outputs for i in o.token_ids], outputs[-1].result.token_ids, outputs[-1].result.text]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rest, everything, text = json.loads(done.stdout)
    [want] = pair.generate("And God said", params)
    assert 0 < len(before) < 30 and before + rest == everything == want.token_ids and text == want.text


def test_a_chat_is_that_of_chat(engine, pair):
    messages = [{"role": "user", "content": "Who made the light?"}]
    params = SamplingParams(max_tokens=20, temperature=0, logprobs=0)
    number = engine.add_chat(messages, sampling=params)
    want = pair.chat(messages, sampling=params)
    taken = engine.suspend(number)
    engine.resume(taken)
    [(tokens, _, result)] = finish(engine).values()
    assert tokens == want.completion.token_ids
    assert (result.thinking, result.content, result.finish_reason) == (want.thinking, want.content, want.finish_reason)


def test_a_chat_ends_where_the_memory_is_full(engine):
    """The context is 4096 tokens, the engine's pages hold 640."""
    number = engine.add_chat([{"role": "user", "content": "Who?"}], sampling=SamplingParams(max_tokens=4000, seed=1))
    [live] = [live for live in engine._live.values() if live.name[0] == number]
    assert len(live.request.token_ids) + live.request.params.max_tokens == 640 + 1
    engine.abort(number)


def test_a_loop_that_is_left_goes_on(engine, pair):
    number = engine.add_request(PROMPTS[0], GREEDY)
    seen = [next(engine.run()) for _ in range(3)]
    seen += engine.run()
    assert [i for output in seen for i in output.token_ids] == alone(pair, PROMPTS[0])[0].token_ids
    assert seen[-1].request == number and seen[-1].result.token_ids == alone(pair, PROMPTS[0])[0].token_ids


@pytest.mark.parametrize("length", [10, 18, 66])
def test_a_piece_of_one_token_is_no_decode(engine, pair, length):
    """Samples of a prompt that is two tokens longer than some pages: the prompt is cut one token after its last page."""
    params, prompt = SamplingParams(n=2, seed=3, max_tokens=4, ignore_eos=True), list(range(300, 300 + length))
    number = engine.add_request(prompt, params)
    found = finish(engine)
    for sample, wanted in enumerate(alone(pair, prompt, params)):
        assert found[number, sample][0] == wanted.token_ids


def test_a_grammar_holds_where_a_prompt_is_held(engine):
    """The second request begins with a decode step; it looks after each token from the first."""
    params = SamplingParams(max_tokens=9, seed=1, regex="[ab]{3}[0-9]{3}")
    for _ in range(2):
        engine.add_request(list(range(300, 317)), params)  # a page and one token
        [(_, text, result)] = finish(engine).values()
        assert result.finish_reason == "stop" and text == result.text and len(text) == 6


def test_a_closed_engine_says_so(pair):
    engine = Engine(pair, rows=1, tokens=16, pages=4, snapshots=0)
    engine.add_request([1], GREEDY)
    engine.close()
    for call in (engine.step, lambda: engine.add_request([1], GREEDY)):
        with pytest.raises(RuntimeError, match="this engine is closed"):
            call()
    assert not engine.has_work


def test_bad_input_leaves_nothing_behind(engine):
    for call, message in (
        (lambda: engine.add_request([]), "prompt 0 is empty"),
        (lambda: engine.add_request([2048], GREEDY), "prompt 0 has id 2048"),
        (lambda: engine.add_request([1], GREEDY, priority=1.5), "priority=1.5: allowed is an integer"),
        (lambda: engine.add_request([1], GREEDY, salt=5), "salt=5: allowed is a text"),
        (lambda: engine.add_request([1], {"n": 2}), "sampling is a dict"),
        (
            lambda: engine.add_request([1] * 600, SamplingParams(max_tokens=42)),
            "needs 41 pages of 16 tokens: allowed are 40",
        ),
        (lambda: engine.add_request([1], SamplingParams(regex="(")), "regex="),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert not engine.has_work
    engine.add_request([1] * 600, SamplingParams(max_tokens=41, ignore_eos=True))  # exactly what there is
    [(tokens, _, _)] = finish(engine).values()
    assert len(tokens) == 41


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(rows=0), "rows=0: allowed is an integer from 1"),
        (dict(tokens=1.5), "tokens=1.5"),
        (dict(page=True), "page=True"),
        (dict(look=33), "look=33: allowed are 1 to 32, or None"),
        (dict(memory=1000), "memory=1000"),
        (dict(pages=0), "pages=0"),
        (dict(rows=2, buckets=BUCKETS), r"buckets.rows=\(4,\): allowed are sizes up to rows=2"),
        (dict(snapshots=-1), "snapshots=-1"),
    ],
)
def test_options_are_checked(pair, options, message):
    with pytest.raises(ValueError, match=message):
        Engine(pair, **{"pages": 4, "snapshots": 0, **options})


def test_a_closed_engine_has_given_its_memory_back(pair):
    before = len(jax.live_arrays())
    engine = Engine(pair, rows=1, tokens=16, pages=4, snapshots=0)
    assert len(jax.live_arrays()) > before
    engine.close()
    engine.close()
    assert len(jax.live_arrays()) <= before


def test_structured_output_beside_free_requests(engine, pair):
    """A regex, a schema and two free ones in one batch: those match, these are as alone."""
    plain = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS[:2]]
    digits = engine.add_request("In the", SamplingParams(max_tokens=20, seed=1, regex="[0-9]{3}-[a-z]{2}"))
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    object_ = engine.add_request("In the", SamplingParams(max_tokens=300, seed=1, json_schema=schema))
    found = finish(engine)
    for number, prompt in zip(plain, PROMPTS[:2], strict=True):
        assert found[number, 0][0] == alone(pair, prompt)[0].token_ids
    import re

    assert re.fullmatch("[0-9]{3}-[a-z]{2}", found[digits, 0][1]) and found[digits, 0][2].finish_reason == "stop"
    assert json.loads(found[object_, 0][1])["a"] in (1, 2)
    raw = log_softmax(pair.logits([5, 17, 200]))  # of the model itself, whatever a grammar allows
    [c] = pair.generate([[5, 17, 200]], SamplingParams(max_tokens=1, temperature=0, regex="x", logprobs=0))
    assert abs(c.logprobs.tokens[0] - raw[-1, c.token_ids[0]]) < 1e-4


def test_a_kept_state_cannot_come_to_lie_behind_a_stop_text(engine, pair):
    """Neither by resuming a request of an engine that looks after each token, nor by a request that is added as it is."""
    [request] = pair.requests(["And"], [SamplingParams(stop="zzz", seed=1)])
    with Engine(pair, rows=1, tokens=16, pages=4, snapshots=0, look=1) as careful:
        careful.add(request, keep=True)
        taken = careful.suspend(0)
    for call in (lambda: engine.resume(taken), lambda: engine.add(request, keep=True)):
        with pytest.raises(ValueError, match=r"keep_state with stop=\('zzz',\): allowed in an engine with look=1"):
            call()
    assert not engine.has_work


def test_what_is_compiled_beforehand_is_no_time_of_steps(pair):
    """The rate leaves compiling out, also what warm() compiled: both are in `seconds`."""
    with Engine(pair, rows=1, tokens=16, pages=3, snapshots=0, buckets=Buckets((1,), (16,), (3,))) as engine:
        engine.warm(engine.programs()[:1])
        warm = engine.stats()
        assert warm.compiles >= 1 and warm.seconds >= warm.compile_seconds > 0
        engine.add_request([5], GREEDY)
        finish(engine)
        assert engine.stats().tokens_per_second > 0
