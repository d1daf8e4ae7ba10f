"""The user's object on k3-tiny: what it returns, what it refuses, and that requests do not disturb each other."""

import json
import re
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax import generate as generation
from k3jax.io import hf

TINY = Path(__file__).parents[1] / "checkpoints" / "k3-tiny"
GOLDEN = Path(__file__).parent / "golden"
GREEDY = k3jax.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny():
    with k3jax.load(TINY) as lm:
        yield lm


@pytest.fixture(scope="module")
def lm(short):
    with k3jax.load(short, dtype="float32") as lm:
        yield lm


@pytest.fixture(scope="module")
def prompts():
    return [[5, 17, 200], [9], [31, 4, 4, 250, 11, 80]]


def text_round_trips_and_continues(model):
    text = "And God said, Let there be light"
    assert model.decode(model.encode(text)) == text
    [completion] = model.generate(text, GREEDY)
    assert completion.prompt_token_ids == model.encode(text)
    assert completion.text == model.decode(completion.token_ids)
    assert len(completion.token_ids) == 8 and completion.finish_reason == "length"


def test_text_round_trips_and_continues(lm):
    text_round_trips_and_continues(lm)


@pytest.mark.slow
def test_the_shipped_model_writes_its_text(tiny):
    """k3-tiny as shipped, in bfloat16: greedy text of the book that it was trained on."""
    text_round_trips_and_continues(tiny)
    [completion] = tiny.generate("In the beginning", k3jax.SamplingParams(max_tokens=24, temperature=0))
    words = set(re.findall(r"[a-z]+", (TINY / "heldout.txt").read_text().lower()))
    written = re.findall(r"[a-z]+", completion.text.lower())
    assert len(written) > 8 and sum(word in words for word in written) >= 0.9 * len(written)


def test_generation_is_the_argmax_of_one_pass_logits(lm, prompts):
    """Prefill, then decode steps, against one pass over everything; ragged prompts in one call."""
    for prompt, completion in zip(prompts, lm.generate(prompts, GREEDY), strict=True):
        logits = lm.logits(prompt + completion.token_ids)
        assert logits.dtype == np.float32 and logits.shape == (len(prompt) + 8, lm.config.vocab_size)
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == completion.token_ids


def test_neighbours_order_and_repetition_change_nothing(lm, prompts):
    sampling = [
        k3jax.SamplingParams(max_tokens=8, temperature=0.9, top_p=0.9, seed=seed, ignore_eos=True) for seed in (3, 4, 5)
    ]
    together = [c.token_ids for c in lm.generate(prompts, sampling)]
    backwards = [c.token_ids for c in lm.generate(prompts[::-1], sampling[::-1])]
    assert backwards[::-1] == together
    assert [c.token_ids for c in lm.generate(prompts, sampling)] == together
    assert lm.generate(prompts[:1], sampling[0])[0].token_ids == together[0]
    assert len(set(map(tuple, together))) == 3


def test_stop_ids_and_max_tokens(lm, prompts):
    free = [c.token_ids for c in lm.generate(prompts, GREEDY)]
    stops = [
        k3jax.SamplingParams(max_tokens=8, temperature=0, stop_token_ids=(ids[3],), ignore_eos=True) for ids in free
    ]
    for ids, stopped in zip(free, lm.generate(prompts, stops), strict=True):
        assert stopped.token_ids == ids[: ids.index(ids[3]) + 1] and stopped.finish_reason == "stop"
    lengths = [k3jax.SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (1, 8, 3)]
    for n, ids, cut in zip((1, 8, 3), free, lm.generate(prompts, lengths), strict=True):
        assert cut.token_ids == ids[:n] and cut.finish_reason == "length"


def test_the_models_own_end_tokens_are_one_set(tiny):
    specials = tiny.tokenizer.special_ids
    assert set(tiny.end_ids) == {tiny.config.eos_token_id, specials["[EOS]"], specials["<|end_of_msg|>"]}


def test_forced_routing(lm, prompts):
    seen = lm.trace(prompts[0], "router_ids_*")
    np.testing.assert_allclose(lm.logits(prompts[0], routing=seen), lm.logits(prompts[0]), atol=1e-4)
    other = {name: (ids + 1) % lm.config.num_experts for name, ids in seen.items()}
    assert np.abs(lm.logits(prompts[0], routing=other) - lm.logits(prompts[0])).max() > 0.1
    assert (lm.trace(prompts[0], "router_ids_*", routing=other)["router_ids_3"] == np.sort(other["router_ids_3"])).all()


def test_a_request_that_is_not_finite_ends_alone(lm, prompts):
    """One row of the embedding is NaN: the request with that token fails, named with its layer; the others go on."""
    wanted = [c.token_ids for c in lm.generate(prompts, GREEDY)]
    bad = 300
    assert all(bad not in p + w for p, w in zip(prompts, wanted, strict=True))
    weight = lm.model.model.embed_tokens.weight
    kept = weight.get_value()
    weight.set_value(kept.at[bad].set(np.nan))
    try:
        with pytest.warns(RuntimeWarning, match="request 1: values are not finite after layer 0"):
            failed = lm.generate([prompts[0], [*prompts[1], bad], prompts[2]], GREEDY)
    finally:
        weight.set_value(kept)
    assert failed[1].finish_reason == "error" and failed[1].token_ids == []
    assert [failed[0].token_ids, failed[2].token_ids] == [wanted[0], wanted[2]]


@pytest.mark.parametrize(("where", "call"), [("commit", 1), ("step", 1), ("decode", 2)])
def test_an_interrupt_leaves_the_model_usable(lm, prompts, monkeypatch, where, call):
    """SIGINT while a program is traced (commit), before the prefill, and between two looks of the host, as Ctrl-C sends it."""
    wanted = [c.token_ids for c in lm.generate(prompts, GREEDY)]
    calls, called = [], getattr(generation, where)

    def interrupted(*args):
        calls.append(1)
        if len(calls) == call:
            signal.raise_signal(signal.SIGINT)
        return called(*args)

    if where == "commit":
        generation.step.clear_cache()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    arrays = len(jax.live_arrays())
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(generation, where, interrupted)
            lm.generate(prompts, k3jax.SamplingParams(max_tokens=50, temperature=0, ignore_eos=True))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert len(calls) == call and len(jax.live_arrays()) <= arrays
    assert [c.token_ids for c in lm.generate(prompts, GREEDY)] == wanted


def test_the_host_looks_every_32_tokens(lm, prompts, monkeypatch):
    """Between two looks there is one program, which calls nothing back."""
    made, decode = [], generation.decode

    def watched(*args):
        text = decode.lower(*args).as_text()
        assert "while" in text and "callback" not in text
        state, found = decode(*args)
        made.append((np.asarray(found.new.token)[:, : len(prompts)] >= 0).sum(0).tolist())
        return state, found

    monkeypatch.setattr(generation, "decode", watched)
    lm.generate(prompts, k3jax.SamplingParams(max_tokens=50, temperature=0, ignore_eos=True))
    assert made == [[32] * len(prompts), [17] * len(prompts)]


def test_the_carry_is_given_away_and_comes_back_in_place(lm, prompts, monkeypatch):
    """Every array that a step took is gone after it: the new carry lies where the old one was."""
    taken = []

    def watched(step):
        def run(model, state, *rest):
            made = step(model, state, *rest)
            taken.extend(jax.tree.leaves(state.carry))
            return made

        return run

    for name in ("step", "decode"):
        monkeypatch.setattr(generation, name, watched(getattr(generation, name)))
    lm.generate(prompts, GREEDY)
    assert len(taken) == 2 * (2 * len(lm.config.kda_layers) + len(lm.config.mla_layers) + 1)
    assert all(array.is_deleted() for array in taken)


def test_memory_does_not_grow(lm, prompts):
    lm.generate(prompts, GREEDY)
    before = len(jax.live_arrays())
    for _ in range(3):
        lm.generate(prompts, GREEDY)
    assert len(jax.live_arrays()) <= before


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda lm: lm.generate([[]]), "prompt 0 is empty"),
        (lambda lm: lm.generate([]), "prompts="),
        (lambda lm: lm.generate([1, 2]), "list of such lists"),
        (lambda lm: lm.generate([[1], [2048]]), "prompt 1 has id 2048: allowed are 0 to 2047"),
        (lambda lm: lm.generate([[-1]]), "id -1"),
        (lambda lm: lm.generate([[1.5]]), "integer token ids"),
        (lambda lm: lm.generate([{"type": "image_url"}]), "vision is not supported"),
        (lambda lm: lm.generate([[1]], k3jax.SamplingParams(max_tokens=4096)), "allowed are 4096 tokens"),
        (lambda lm: lm.generate([[1]], [GREEDY, GREEDY]), "list of 1"),
        (lambda lm: lm.logits([]), "token_ids is empty"),
        (lambda lm: lm.trace([1], "no_such_site"), "no_such_site"),
        (lambda lm: lm.logits([1], routing={"router_ids_0": [[0, 1, 2, 3]]}), "router_ids_0"),
        (
            lambda lm: lm.logits([1], routing={"router_ids_2": [[0, 1, 2, 16]]}),
            "experts 0 to 16: allowed are integers below 16",
        ),
        (lambda lm: lm.logits([1], routing={"router_ids_2": [[0, 1, 2, 2]]}), "names an expert twice"),
        (lambda lm: lm.logits([1], routing={"router_ids_2": [[0.0, 1, 2, 3]]}), "is float64 of shape"),
        (lambda lm: lm.logits([1, 2], routing={"router_ids_2": [[0, 1, 2, 3], [0]]}), "is ragged"),
        (lambda lm: lm.logits([1], routing=[1]), "routing is a list"),
        (lambda lm: lm.logits(np.ones((1, 2), int)), "int64 of shape"),
        (lambda lm: lm.logits([True]), "holds True"),
        (lambda lm: lm.logits(b"ab"), "token_ids is a bytes"),
        (lambda lm: lm.trace([1], [1]), "sites="),
        (lambda lm: lm.logits([1], routing={"router_ids_2": [[0, 1, 2, 3]], "router_id_2": 1}), "router_id_2"),
        (lambda lm: k3jax.SamplingParams(stop_token_ids=b"12"), "stop_token_ids=b'12'"),
        (lambda lm: lm.logits(5), "token_ids is a int"),
        (lambda lm: lm.trace([1], 5), "sites=5"),
        (lambda lm: lm.trace([1], "kda_state_3"), "layers of kda_state are 0, 1, 2, 4"),
        (
            lambda lm: lm.generate([[1]], k3jax.SamplingParams(stop_token_ids=[2048])),
            "stop_token_ids has 2048: allowed are 0 to 2047",
        ),
        (lambda lm: k3jax.SamplingParams(stop_token_ids=5), "stop_token_ids=5"),
        (lambda lm: lm.encode(3), "text=3"),
        (lambda lm: lm.decode(3), "ids is a int"),
        (lambda lm: lm.bits_per_byte(3), "text=3"),
        (lambda lm: lm.bits_per_byte("a\ud800b"), "text 0 has a lone surrogate"),
        (lambda lm: lm.score("a", window="a"), "window='a'"),
        (lambda lm: lm.score("a", window=1.5), "window=1.5"),
        (lambda lm: lm.score("a", window=8, stride=2.5), "stride=2.5"),
        (lambda lm: lm.score("a", window=8, stride=None), "stride=None"),
        (lambda lm: lm.generate(b"x"), "prompts=b'x'"),
        (lambda lm: lm.generate("a", {"max_tokens": 3}), "sampling is a dict: allowed are one SamplingParams"),
    ],
)
def test_bad_input_is_named(lm, call, message):
    with pytest.raises(ValueError, match=message):
        call(lm)


def test_image_parts_are_refused():
    """Of a model that has a place for images."""
    with (
        k3jax.load(GOLDEN / "k3_mxfp4_wide") as lm,
        pytest.raises(ValueError, match="prompt 0 has id 316, an image part: vision is not supported"),
    ):
        lm.generate([[1, 316]])


def test_bad_text_is_named(lm):
    for call, message in (
        (lambda: lm.generate(""), "prompt 0 is empty"),
        (lambda: lm.bits_per_byte(""), "text 0 is empty"),
        (lambda: lm.bits_per_byte("a", window=8, stride=9), "stride=9"),
        (lambda: lm.bits_per_byte("a", window=5000), "window=5000"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("eos", ["5", ["a"], [[1]], 1.5, [True], -1, 2048, {"a": 1}])
def test_end_ids_are_checked(short, tmp_path, eos):
    for file in short.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(k3jax.ConfigError, match="eos_token_id has .*: allowed are token ids, 0 to 2047"):
        k3jax.load(tmp_path)


def test_wide_and_narrow_integers_are_alike(lm, prompts):
    """A limit beyond 32 bits is no limit, and NumPy's integers count as any others."""
    free = k3jax.SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
    wide = k3jax.SamplingParams(max_tokens=np.int8(8), seed=1, top_k=2**40, ignore_eos=True)
    assert [c.token_ids for c in lm.generate(prompts, wide)] == [c.token_ids for c in lm.generate(prompts, free)]


def test_ids_may_be_arrays(lm, prompts):
    want = lm.logits(prompts[0])
    for ids in (np.array(prompts[0]), jnp.array(prompts[0]), tuple(prompts[0])):
        np.testing.assert_array_equal(lm.logits(ids), want)


def test_what_is_small_is_checked_before_the_weights(short, tmp_path, monkeypatch):
    """A broken tokenizer file and an unknown option are found before a tensor is read."""
    monkeypatch.setattr(hf, "load", lambda *_, **__: pytest.fail("weights were read"))
    for file in short.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "tiktoken.model").unlink()
    (tmp_path / "tiktoken.model").write_text("garbage")
    with pytest.raises(ValueError, match="tiktoken.model: not a line of 'base64 rank'"):
        k3jax.load(tmp_path)
    with pytest.raises(ValueError, match="kernels='cuda'"):
        k3jax.load(short, kernels="cuda")


def test_bad_loads_are_named(tmp_path):
    for options, message in (
        ({"dtype": "int3"}, "dtype='int3'"),
        ({"kernels": "fast"}, "kernels='fast'"),
        ({"mesh": 1}, "mesh=1"),
        ({"experts": "packed"}, "packed"),
    ):
        with pytest.raises(ValueError, match=message):
            k3jax.load(TINY, **options)
    with pytest.raises(ValueError, match="no such directory"):
        k3jax.load(tmp_path / "none")
    with pytest.raises(k3jax.ConfigError, match="config.json"):
        k3jax.load(tmp_path)


def test_without_a_tokenizer(lm, prompts):
    """Token ids work, text is None, strings raise."""
    with k3jax.load(GOLDEN / "kimi_linear_b") as bare:
        for call in (lambda: bare.generate("text"), lambda: bare.encode("text"), lambda: bare.decode([1])):
            with pytest.raises(ValueError, match="no tokenizer files"):
                call()
    bare = k3jax.LM(lm.model, lm.config, None, lm.kernels)
    assert all(completion.text is None for completion in bare.generate(prompts, GREEDY))


def test_closing_frees_the_parameters():
    lm = k3jax.load(TINY)
    weight = lm.model.lm_head.weight.get_value()
    lm.close()
    assert weight.is_deleted()
    lm.close()
    with pytest.raises(RuntimeError, match="closed"):
        lm.logits([1])


def test_record():
    record = json.loads((TINY / "record.json").read_text())
    assert record["bits_per_byte"] < 1.70 < record["xz_bits_per_byte"]
    assert sum(file.stat().st_size for file in TINY.iterdir()) <= 20_000_000
    assert all(file.stat().st_size <= 12 << 20 for file in TINY.iterdir())


@pytest.mark.slow
def test_bits_per_byte_in_both_dtypes():
    """The first tenth of the held-out text (the whole, on a GPU: benchmarks/gpu_check.py): far below xz, alike within 0.5%."""
    text = (TINY / "heldout.txt").read_text()[:22_000]
    record = json.loads((TINY / "record.json").read_text())
    with k3jax.load(TINY, dtype="float32") as exact, k3jax.load(TINY, dtype="bfloat16") as rounded:
        bits = exact.bits_per_byte(text)
        assert abs(bits - record["bits_per_byte"]) < 0.1
        assert abs(rounded.bits_per_byte(text) / bits - 1) < 5e-3


def test_windows_judge_every_token_once(lm):
    """Bits of a text in one window are those of its logits; by shorter windows they differ only by the shorter past."""
    text = (TINY / "heldout.txt").read_text()[:380]
    ids = lm.encode(text)
    assert 64 < len(ids) <= 128
    logits = lm.logits([lm.config.bos_token_id, *ids[:-1]]).astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    bits = -log_p[np.arange(len(ids)), ids].sum() / np.log(2)
    assert abs(lm.bits_per_byte(text, window=128, stride=128) - bits / len(text)) < 1e-3
    assert abs(lm.bits_per_byte(text, window=128, stride=64) - bits / len(text)) < 1e-3
