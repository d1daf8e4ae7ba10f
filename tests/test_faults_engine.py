"""Faults that other engines had with many requests at once: state slots, prefix cache, packing, programs.

Each under its number and with its source. Every slot and page is full of NaN before each test.
"""

import numpy as np
import pytest
from faults import (
    CHUNK,
    PAGE,
    compiled,
    emptied,
    fill,
    finish,
    greedy,
    job_of,
    prompt,
    serve,
    small_engine,
    step_until,
    toy,
)  # fmt: skip

from k3jax.carry import Carry
from k3jax.engine import runner
from k3jax.engine.batching import Buckets
from k3jax.engine.engine import Engine


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


# -- kind 1: the life of a slot ----------------------------------------------------------------------------------------
def test_b01_a_slot_holds_another_tenants_bytes(model, engine):
    """vllm#56524: state blocks were given to the next request as they were. Same bits as in pools of zeros."""
    prompts, found = [prompt(length) for length in (1, 2, 3, 4, 15, 16, 17, 33)], []
    for value in (0.0, np.nan, 1e30, np.uint32(0x3E3E3E3E).view(np.float32)):
        engine.cache.clear()
        fill(engine, value)
        found.append(serve(engine, prompts, greedy(5)))
        assert found[-1] == found[0], value
    for completion in found[0]:
        model.assert_alone(completion)


def test_b02_a_first_chunk_of_one_token_is_no_decode(model, engine):
    """vllm#51483: the row was taken for a decode because it was one token long, and read its slot."""
    fill(engine, 7.0)
    engine.scheduler.snapshot = False  # else the first one's chunk would end at a page
    first, second = (engine.add_request(prompt(length), greedy(3)) for length in (15, 20))
    engine.step()
    assert job_of(engine, second).computed == 1
    third = engine.add_request([9], greedy(3))
    ends = finish(engine)
    for number in (first, second, third):
        model.assert_alone(ends[number], number)


@pytest.mark.parametrize("made", [0, 9])
def test_b03_a_preempted_request_begins_from_nothing(model, engine, made):
    """vllm-metal#488: attention was computed anew, the recurrent state went on from the middle. made: tokens till then."""
    [request] = model.lm.requests([prompt(21)], [greedy(20)])
    number = engine.add(request, keep=True)
    job = job_of(engine, number)
    engine.scheduler.budget = 11 if made == 0 else CHUNK
    engine.look = 1
    step_until(engine, lambda: job.computed and len(job.tokens) == job.prompt + made)
    assert job.computed < job.prompt if made == 0 else job.is_decode
    engine.scheduler.preempt(job)
    engine.cache.clear()
    fill(engine, np.nan)
    completion = finish(engine)[number]
    model.assert_alone(completion)
    ids = completion.prompt_token_ids + completion.token_ids
    model.assert_memory(completion.state.carry, ids[:-1])


def test_b05_a_slot_that_nobody_wrote_is_not_read(model, engine, monkeypatch):
    """tpu-inference#3412: a prefix hit took a fresh slot and read it. Here the engine refuses, and then goes on."""
    model.assert_alone(*serve(engine, [prompt(20)], greedy(2)))
    number, hits = engine.add_request([*prompt(20), 5, 6], greedy(2)), engine.stats().prefix_hits
    with monkeypatch.context() as patch:  # as if nothing were restored
        patch.setattr(engine.runner, "copy", lambda *_: None)
        patch.setattr(engine.pool, "wrote", lambda slot: None)
        with pytest.raises(AssertionError, match="a state that nobody wrote"):
            engine.step()
    assert engine.stats().prefix_hits == hits + 1
    engine.step()
    engine.pool._written[job_of(engine, number).slot] = False
    with pytest.raises(AssertionError, match="a state that nobody wrote"):
        engine.step()
    model.assert_alone(finish(engine)[number])


@pytest.mark.parametrize("layer", [0, 1])
def test_b06_not_a_number_stays_where_it_is(model, engine, layer):
    """vllm#51039: one NaN spread through slots and pages that were used again, and everybody got token 0."""
    prompts = [prompt(9, seed) for seed in range(4)]
    numbers = [engine.add_request(ids, greedy(12)) for ids in prompts]
    jobs = [job_of(engine, number) for number in numbers]
    step_until(engine, lambda: all(len(job.tokens) > job.prompt for job in jobs))
    slot, page = jobs[2].slot, jobs[2].pages[0]
    kda, mla, lengths = engine.runner.state.carry
    if layer == 0:
        kda = tuple(state._replace(S=state.S.at[slot, 0, 0, 0].set(np.nan)) for state in kda)
    else:
        mla = tuple(pages.at[page, 0].set(np.nan) for pages in mla)
    engine.runner.state = engine.runner.state._replace(carry=Carry(kda, mla, lengths))
    ends = finish(engine)
    bad = ends[numbers[2]]
    assert bad.finish_reason == "error" and 0 not in bad.token_ids
    assert bad.error == f"request {numbers[2]}: values are not finite after layer {layer}"
    for number in set(numbers) - {numbers[2]}:
        model.assert_alone(ends[number], number)
    engine.cache.clear()
    for free, item in ((engine.pool._free_slots, slot), (engine.pool._free_pages, page)):  # both are taken next
        free.remove(item)
        free.append(item)
    user = engine.add_request(prompt(13), greedy(4))
    engine.step()
    assert job_of(engine, user).slot == slot and page in job_of(engine, user).pages
    model.assert_alone(finish(engine)[user], "the next user")


# -- kind 4: the prefix cache ------------------------------------------------------------------------------------------
def test_b21_what_a_hit_restores_is_the_state_at_its_end(model, engine):
    """sglang#31474, #30862: snapshots were never written by the linear layers. State, history and latents, at each."""
    ids, suffix = prompt(35), prompt(7, 1)
    for tokens, reused in ((ids, 0), (ids, 32), (ids + suffix, 32)):
        before = engine.stats().reused_tokens
        [request] = model.lm.requests([tokens], [greedy(3)])
        number = engine.add(request, keep=True)
        completion = finish(engine)[number]
        assert engine.stats().reused_tokens - before == reused
        model.assert_alone(completion, len(tokens))
        model.assert_memory(completion.state.carry, tokens + completion.token_ids[:-1])
    assert sorted(prefix.length for prefix in engine.cache._held.values()) == [16, 32, 40]
    for prefix in engine.cache._held.values():
        model.assert_memory(engine.runner.state.carry, (ids + suffix)[: prefix.length], prefix.slot, prefix.pages)


def test_b23_a_second_turn_that_differs_inside_a_chunk(model, engine):
    """llama.cpp#26185: the state of M tokens was used with a prefix of N. Here: the last snapshot that is right, and the rest."""
    first = prompt(40)
    for common in (7, 16, 27, 39):
        engine.cache.clear()
        model.assert_alone(*serve(engine, [first], greedy(2)))
        assert [prefix.length for prefix in engine.cache._held.values()] == [16, 32, 40]
        before = engine.stats().reused_tokens
        model.assert_alone(*serve(engine, [first[:common] + prompt(9, common + 1)], greedy(4)), common)
        reused = max(length for length in (0, 16, 32, 40) if length <= common)
        assert engine.stats().reused_tokens - before == reused


@pytest.mark.parametrize("budget", [5, 8, 13, 16])
def test_b25_a_prompt_over_three_blocks(model, engine, budget):
    """syv-ai/qwen38-27b-rtx3090#43: the state was not carried into the next block where a chunk crossed its border."""
    engine.scheduler.budget = budget
    [request] = model.lm.requests([prompt(3 * PAGE + 5)], [greedy(4)])
    number = engine.add(request, keep=True)
    completion = finish(engine)[number]
    model.assert_alone(completion, budget)
    model.assert_memory(completion.state.carry, (completion.prompt_token_ids + completion.token_ids)[:-1])


@pytest.mark.parametrize("limit", [0, 1, 2])
@pytest.mark.parametrize("cold", [False, True])
def test_b26_another_prompt_in_between(model, engine, limit, cold):
    """vllm#50630: a hit beside a miss is clean in a quiet cache; it takes A, B, A, or A and B cold at once."""
    engine.cache.limit, engine.scheduler.rows = limit, 2
    a, b = prompt(30), prompt(29, 1)
    rounds = [[a, b], [a], [b, a]] if cold else [[a], [b], [a], [b], [a]]
    found = [completion for prompts in rounds for completion in serve(engine, prompts, greedy(5))]
    for completion in found:
        model.assert_alone(completion)
    assert len({tuple(c.token_ids) for c in found if c.prompt_token_ids == a}) == 1
    assert len(engine.cache) <= limit


# -- kind 5: rows packed together ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("kinds", ["D", "P", "DP", "PD", "DPD", "PDP"])
def test_b28_decodes_and_prompts_in_any_order(model, engine, kinds, monkeypatch):
    """vllm#40766: slices for one order took the rows of the other. The contract is asserted where the step is packed."""
    seen, real = [], runner.pack

    def watched(rows, buckets):
        found = real(rows, buckets)
        seen.append("".join("D" if row.is_decode else "P" for row in rows))
        places = [found.places[i] for i, kind in enumerate(seen[-1]) if kind == "D"]
        assert found.bucket.tokens == 0 or sorted(places) == list(range(len(places)))
        return found

    monkeypatch.setattr(runner, "pack", watched)
    begun = [engine.add_request(prompt(4, i), greedy(12), priority=i) for i, kind in enumerate(kinds) if kind == "D"]
    jobs = [job_of(engine, number) for number in begun]
    step_until(engine, lambda: all(job.is_decode for job in jobs))
    new = [engine.add_request(prompt(7, 9 + i), greedy(4), priority=i) for i, k in enumerate(kinds) if k == "P"]
    # The scheduler's plan has decodes first; here its shares come in the order of the test.
    schedule = engine.scheduler.schedule

    def ordered(look):
        plan = schedule(look)
        return plan._replace(shares=sorted(plan.shares, key=lambda share: share.job.order))

    monkeypatch.setattr(engine.scheduler, "schedule", ordered)
    del seen[:]
    ends = finish(engine)
    assert seen[0] == kinds
    for number in begun + new:
        model.assert_alone(ends[number], number)


def test_b32_five_rows_after_eight(model, engine):
    """vllm#28436: a crash as soon as the rows were not as many as the step was compiled for."""
    for count in (8, 5, 1, 8):
        for completion in serve(engine, [prompt(3 + i, count) for i in range(count)], greedy(4)):
            model.assert_alone(completion, count)
        engine.cache.clear()


def test_b32_a_hundred_requests_through_four_slots(model, engine):
    engine.scheduler.rows = 4
    prompts = [prompt(1 + seed % 7, seed) for seed in range(100)]
    for completion in serve(engine, prompts, greedy(2)):
        model.assert_alone(completion)


def test_b40_the_second_chunk_is_no_new_prompt(model, engine):
    """mlxcel#1749: more than one token was the sign of a new prompt. One prompt in two chunks, and the chunks as two prompts."""
    engine.cache.limit, whole = 0, prompt(30)
    for prompts in ([whole], [whole[:16], whole[16:]], [whole[16:], whole]):
        for completion in serve(engine, prompts, greedy(4)):
            model.assert_alone(completion)


# -- kind 15: what a program must not remember ---------------------------------------------------------------------------
def test_b74_the_slot_is_no_constant(model, engine):
    """tt-metal#54850: a traced pass used slot 0 for every user. One program for all, and no other slot is written."""
    ids, memories, programs = prompt(11), [], None
    engine.cache.limit = 0
    for slot in (0, 3, 11):
        fill(engine, np.nan)
        others = [engine.pool.take_slot() for _ in range(engine.pool.slots)]
        engine.pool.give_slot(slot)
        model.assert_alone(*serve(engine, [ids], greedy(5)), slot)
        programs = programs or compiled()
        assert compiled() == programs
        for other in set(others) - {slot}:
            engine.pool.give_slot(other)
        [state] = engine.runner.state.carry.kda
        written = np.isfinite(state.S).all((1, 2, 3))
        assert np.flatnonzero(written).tolist() == [slot]
        memories.append([np.asarray(a[slot]).tobytes() for a in state])
    assert all(memory == memories[0] for memory in memories)


@pytest.mark.slow
def test_b77_no_more_programs_than_are_listed(model):
    """sglang-jax#117, #423: a grid of programs, and sizes that were no powers of two. 200 prompts of random lengths."""
    buckets = Buckets(rows=(3, 8), tokens=(12, 40), pages=(5, 12))
    rng, before = np.random.default_rng(0), compiled()
    with Engine(model.lm, rows=8, tokens=40, page=8, pages=12, snapshots=4, buckets=buckets, look=4) as engine:
        prompts = [prompt(int(length), seed) for seed, length in enumerate(rng.integers(1, 90, 200))]
        found = serve(engine, prompts, greedy(2))
        made, listed = compiled() - before, len(engine.programs())
        print(f"{made} step programs of {listed} listed, {engine.stats().compiles} in all")
    assert made <= listed == 12
    for completion in found:
        model.assert_alone(completion)
