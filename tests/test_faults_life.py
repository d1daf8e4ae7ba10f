"""Faults that other engines had in the life of requests: leaks, livelock, aborts, errors within a step, repeats.

Each under its number and with its source. Every slot and page is full of NaN before each test.
"""

import jax
import numpy as np
import pytest
from faults import (
    LOGITS,
    PAGE,
    PAGES,
    ROWS,
    assert_free,
    emptied,
    finish,
    greedy,
    job_of,
    prompt,
    serve,
    small_engine,
    step,
    step_until,
    toy,
)  # fmt: skip
from helpers import log_softmax

from k3jax import generate as generation
from k3jax.sampling import SamplingParams


@pytest.fixture(scope="module")
def model():
    return toy()


@pytest.fixture(scope="module")
def only():
    with small_engine() as engine:
        yield engine


@pytest.fixture
def engine(only):
    with emptied(only) as engine:
        yield engine


def fail_once(monkeypatch, name, after):
    """The next call of this program of k3jax.generate raises: before it ran, or after, when the memory it got is gone."""
    real = getattr(generation, name)

    def fails(*args, **options):
        monkeypatch.setattr(generation, name, real)
        if after:
            jax.block_until_ready(real(*args, **options))
        raise RuntimeError("injected")

    monkeypatch.setattr(generation, name, fails)


# -- kind 20: leaks, livelock, abort -------------------------------------------------------------------------------------
STAGES = ("waiting", "after a hit", "mid-prompt", "decoding", "preempted", "leader", "sibling", "ended", "failed step")


@pytest.mark.parametrize("times", [3, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", STAGES)
def test_b97_abort_gives_everything_back(model, engine, stage, times, monkeypatch):
    """sglang#12693, #16067, #26941: of many ways to cancel, some freed pages and not slots, until two requests had the same."""
    for i in range(times):
        ends = {}
        other = engine.add_request(prompt(5, i), greedy(3))
        gone, *rest = begun(model, engine, stage, i, ends, monkeypatch)
        engine.abort(gone)
        engine.abort(gone)  # nothing happens
        engine.pool.check()
        ended = gone in ends
        assert ended == (stage == "ended")
        finish(engine, ends)
        assert (gone in ends) == ended
        for number in (other, *rest):
            model.assert_alone(ends[number], stage)
        assert_free(engine)


def begun(model, engine, stage, i, ends, monkeypatch):
    """Requests at this moment of the life of the first, which is to be aborted."""
    if stage in ("leader", "sibling"):
        [request], group = model.lm.requests([prompt(37, i)], [greedy(3)]), object()
        first, second, third = (engine.add(request._replace(group=group)) for _ in range(3))
        step(engine, ends)
        assert job_of(engine, second) in engine.scheduler.waiting and 0 < job_of(engine, first).computed < 36
        return (first, second, third) if stage == "leader" else (second, first, third)
    if stage == "after a hit":
        finish_first = engine.add_request(prompt(20, i), greedy(1))
        step_until(engine, lambda: finish_first in ends, ends)
    if stage == "waiting":
        step(engine, ends)
        engine.scheduler.rows = 1
    number = engine.add_request(prompt(20, i) + prompt(25, i), greedy(6))
    job = job_of(engine, number)
    match stage:
        case "waiting":
            step(engine, ends)
            engine.scheduler.rows = ROWS
            assert job in engine.scheduler.waiting
        case "after a hit":
            step_until(engine, lambda: job.slot is not None, ends)
            assert job.reused == 16 and job.computed < job.prompt and engine.pool.users(job.pages[0]) > 1
        case "mid-prompt":
            step_until(engine, lambda: job.computed, ends)
            assert job.computed < job.prompt
        case "decoding":
            step_until(engine, lambda: len(job.tokens) > job.prompt, ends)
            assert job.is_decode
        case "preempted":
            step_until(engine, lambda: len(job.tokens) > job.prompt, ends)
            engine.scheduler.preempt(job)
        case "failed step":
            step_until(engine, lambda: job.computed, ends)
            fail_once(monkeypatch, "step", after=True)
            with pytest.raises(RuntimeError, match="injected"):
                step(engine, ends)
            assert job in engine.scheduler.waiting
        case "ended":
            step_until(engine, lambda: job.ended, ends)
    return (number,)


def test_b99_a_request_of_exactly_the_capacity_ends(model, engine):
    """vllm#52520: a request near the limit was computed up to 98.9%, and again, for ever. One token more is refused at once."""
    capacity = PAGES * PAGE
    for made in (1, 10):
        with pytest.raises(ValueError, match=f"needs {PAGES + 1} pages of {PAGE} tokens: allowed are {PAGES}"):
            engine.add_request(prompt(capacity - made + 2), greedy(made))
        assert not engine.has_work
        [completion] = serve(engine, [prompt(capacity - made + 1)], greedy(made))
        model.assert_alone(completion, made)


@pytest.mark.parametrize("length, made", [(61, 20), (20, 60)])
def test_b99_two_that_do_not_fit_together_both_end(model, engine, length, made):
    """One waits for the other, or is preempted by it; those behind them end too."""
    before = engine.stats().preemptions
    numbers = [engine.add_request(prompt(length + i), greedy(made)) for i in range(2)]
    numbers += [engine.add_request(prompt(5, i), greedy(3)) for i in range(4)]
    ends = finish(engine)
    assert (engine.stats().preemptions > before) == (made == 60)
    for number in numbers:
        model.assert_alone(ends[number], number)
    assert [*ends].index(numbers[0]) < [*ends].index(numbers[1])


# -- kind 16: preempted with log-probabilities of the prompt -------------------------------------------------------------
@pytest.mark.parametrize("computed", [16, 32, 40])
def test_b83_preempted_with_log_probabilities_of_the_prompt(model, engine, computed):
    """vllm#37796: what was known of the prompt was stale after a preemption, and the request never ended."""
    ids = prompt(40)
    number = engine.add_request(ids, greedy(6, prompt_logprobs=4))
    job = job_of(engine, number)
    step_until(engine, lambda: job.computed >= computed)
    engine.scheduler.preempt(job)
    completion = finish(engine)[number]
    model.assert_alone(completion)
    found, want = completion.prompt_logprobs, log_softmax(model.after(*ids)[0])
    assert len(found.tokens) == len(found.top) == 40 and found.tokens[0] is None
    for place in range(1, 40):
        assert abs(found.tokens[place] - want[place - 1, ids[place]]) <= LOGITS
        assert len(found.top[place]) == 4
        assert all(abs(value - want[place - 1, token]) <= LOGITS for token, value in found.top[place].items())


# -- kind 22: determinism ------------------------------------------------------------------------------------------------
def schedule(engine):
    """All outputs of a small schedule: chunks, decodes beside them, two samples, a hit, a preemption, an abort."""
    engine.cache.clear()
    outputs = []

    def until(true):
        while not true():
            outputs.extend(output._replace(request=output.request - first) for output in engine.step())

    first = engine.add_request(prompt(20), greedy(7))
    engine.add_request(prompt(5), SamplingParams(n=2, seed=1, max_tokens=5, ignore_eos=True, logprobs=4))
    job = job_of(engine, first)
    until(lambda: job.is_decode)
    engine.add_request([*prompt(20)[:17], 3], greedy(4))
    gone = engine.add_request(prompt(3), greedy(9))
    until(lambda: len(job.tokens) > job.prompt + 1)
    engine.scheduler.preempt(job)
    engine.abort(gone)
    until(lambda: not engine.has_work)
    return outputs


def test_b106_the_promise(model, engine):
    """tokenspeed#879: greedy drifted after four tokens. The same calls give the same bits; alone or not, the same tokens."""
    found = schedule(engine)
    assert schedule(engine) == found
    ends = [output.result for output in found if output.result]
    assert len(ends) == 4
    for completion in ends:
        if completion.prompt_token_ids != prompt(5):  # those are drawn
            model.assert_alone(completion)


@pytest.mark.slow
def test_b107_a_hundred_repeats(engine):
    """vllm#50649: a race gave other numbers now and then."""
    found = schedule(engine)
    assert all(schedule(engine) == found for _ in range(100))


# -- kind 24: an exception within a step ---------------------------------------------------------------------------------
@pytest.mark.parametrize("program", ["place", "copy", "step", "decode"])
@pytest.mark.parametrize("after", [False, True])
def test_b111_the_engine_goes_on_after_an_exception(model, engine, monkeypatch, program, after):
    """levanter#1290: memory that was given away to the failed step was used by the next. And nothing more is held than before."""

    def served(failing):
        numbers = [engine.add_request(prompt(20 + i), greedy(9)) for i in range(3)]
        if failing:
            fail_once(monkeypatch, program, after)
            with pytest.raises(RuntimeError, match="injected"):
                finish(engine)
            engine.pool.check()
            assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(engine.runner.state))
        ends = finish(engine)
        for number in numbers:
            model.assert_alone(ends[number], number)
        engine.cache.clear()
        return len(jax.live_arrays()), sum(array.nbytes for array in jax.live_arrays())

    held = served(failing=False)
    assert [served(failing=True) for _ in range(3)] == [held] * 3


def test_b111_what_was_given_away_cannot_be_used(engine):
    old = engine.runner.state
    serve(engine, [prompt(3)], greedy(2))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old.carry))
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(old.carry.lengths)
