"""The split of the engine's memory against arrays that are really made, and every error."""

import math
import re

import jax
import pytest
from helpers import K3_FIELDS, small
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax import carry as carries
from k3jax import generate
from k3jax.config import K3Config
from k3jax.engine import sizes as module
from k3jax.engine.sizes import Sizes, sizes
from k3jax.sampling import SamplingParams

MODELS = {
    "both": small(max_position_embeddings=1000),
    "k3": small(**K3_FIELDS, max_position_embeddings=31, short_conv_kernel_size=3),
    "mla alone": small(kda_layers=(), max_position_embeddings=501),
    "kda alone": small(kda_layers=(0, 1, 2, 3), max_position_embeddings=50),
}


def made(config, found, dtype):
    """Bytes of the arrays that an engine of these sizes makes."""
    carry = carries.empty(config, slots=found.slots, pages=found.pages, page=found.page, dtype=dtype)
    sampling = generate.rows(
        [SamplingParams()] * found.slots, [[0]] * found.slots, [0] * found.slots, (), found.slots, 31
    )
    return sum(array.nbytes for array in jax.tree.leaves((carry, sampling)))


def least(config, memory=1, **options):
    """The least memory, as the error of too little names it."""
    with pytest.raises(ValueError, match=r"^memory=.*: allowed are \d+ bytes or more, for") as error:
        sizes(config, memory, **options)
    return int(re.findall(r"allowed are (\d+) bytes", str(error.value))[0])


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 5),
    page=st.integers(1, 60),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    spare=st.integers(0, 30_000),
    snapshots=st.none() | st.integers(0, 4),
    pages=st.none() | st.integers(1, 5),
)
def test_the_pools_fit_and_no_page_more_would(model, rows, page, dtype, spare, snapshots, pages):
    config = MODELS[model]
    if not config.mla_layers:
        pages = pages and 0
    options = dict(rows=rows, page=page, dtype=dtype, snapshots=snapshots, pages=pages)
    minimum = least(config, **options)
    assert least(config, minimum - 1, **options) == minimum
    memory = minimum + spare
    found = sizes(config, memory, **options)
    assert made(config, found, dtype) == found.bytes <= memory == found.memory
    assert (found.rows, found.page) == (rows, page)

    one_page = 0 if pages is None and not config.mla_layers else 1
    bare = Sizes(**{**vars(found), "snapshots": snapshots or 0, "pages": one_page if pages is None else pages})
    assert bare.bytes == minimum  # what was asked for, and a page
    context = math.ceil(config.max_position_embeddings / page) if config.mla_layers else 0
    if snapshots is None:
        share = spare / (4 if pages is None else 1)
        assert found.snapshots * found.slot_bytes <= share and found.snapshots <= rows
        assert found.snapshots == rows or (found.snapshots + 1) * found.slot_bytes > share
    else:
        assert found.snapshots == snapshots
    if pages is None:
        assert found.pages <= found.slots * context
        assert found.pages == found.slots * context or found.bytes + found.page_bytes > memory
    else:
        assert found.pages == pages


class Device:
    """One that has `limit` bytes, of which `used` are taken."""

    def __init__(self, stats):
        self.stats = stats

    def memory_stats(self):
        return self.stats

    def __str__(self):
        return "card:0"


def test_a_share_of_what_is_free_on_the_device(monkeypatch):
    config, options = MODELS["both"], dict(rows=3, page=7, dtype="float32")
    monkeypatch.setattr(jax, "local_devices", lambda: [Device({"bytes_limit": 200_000, "bytes_in_use": 100_000})])
    found = sizes(config, None, **options)
    assert found.memory == 80_000 and found == Sizes(
        **{**vars(sizes(config, 80_000, **options)), "source": found.source}
    )
    assert "0.8" in found.source and "card:0" in found.source
    assert "0.8 of the" in found.explain()["memory"]


@pytest.mark.parametrize("stats", [None, {}, {"bytes_in_use": 5}])
def test_a_device_that_does_not_tell_its_memory(monkeypatch, stats):
    config, options = MODELS["both"], dict(rows=3, page=7, dtype="float32")
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(stats)])
    found = sizes(config, None, **options)
    full = Sizes(**{**vars(found), "snapshots": 0, "pages": 3 * math.ceil(1000 / 7)})
    assert found.bytes <= found.memory == full.bytes  # a full context for every row, and no more
    asked = sizes(config, None, **options, snapshots=9, pages=500)
    assert (asked.snapshots, asked.pages) == (9, 500) and asked.bytes == asked.memory
    monkeypatch.setattr(module, "UNKNOWN", full.bytes - 1)
    capped = sizes(config, None, **options)
    assert capped.bytes <= capped.memory == full.bytes - 1
    assert sizes(config, None, **options, snapshots=9, pages=500).bytes == asked.bytes  # nothing is left to decide
    least = sizes(config, None, **options, snapshots=0, pages=500).bytes
    with pytest.raises(ValueError, match=f"^memory={full.bytes - 1} .*card:0.*: allowed are {least} bytes"):
        sizes(config, None, **options, pages=500)


def test_a_quarter_of_what_the_rows_leave_is_for_snapshots():
    config, options = MODELS["both"], dict(rows=9, page=7, dtype="float32")
    minimum, slot = least(config, **options), sizes(config, 2**20, **options).slot_bytes
    for count in (1, 2, 8):
        assert sizes(config, minimum + 4 * count * slot, **options).snapshots == count
        assert sizes(config, minimum + 4 * count * slot - 1, **options).snapshots == count - 1
        assert (
            sizes(config, minimum + count * slot, **options, pages=1).snapshots == count
        )  # the pages are there already


def test_k3_itself_is_asked_about_without_making_an_array():
    config, before = K3Config.k3(), len(jax.live_arrays())
    found = sizes(config, 100 * 2**30, rows=64, page=64, dtype="bfloat16")
    assert len(jax.live_arrays()) <= before
    assert found.state_bytes == 69 * (96 * 128 * 128 * 4 + 3 * 36864 * 2) + 4 and found.page_bytes == 64 * 27_648


@pytest.mark.parametrize("model", MODELS)
def test_the_text_for_doctor_adds_up(model):
    config = MODELS[model]
    found = sizes(config, 3 * 2**20, rows=5, page=3, dtype="float32", pages=1000 if config.mla_layers else None)
    text = found.explain()
    assert list(text) == ["memory", "rows", "snapshots", "pages"] and "\n" not in "".join(text.values())
    total, *parts = (float(match[1]) if (match := re.match(r"([\d.]+) MiB", line)) else 0.0 for line in text.values())
    assert total == round(found.bytes / 2**20, 2)
    assert abs(sum(parts) - total) <= 4 * 0.005 + 1e-9  # each is rounded to a hundredth
    assert text["memory"].endswith("of 3.00 MiB, as asked for")
    assert " 5 slots" in text["rows"] and f" {found.snapshots} slots" in text["snapshots"]
    if config.mla_layers:
        assert "1,000 of 3 tokens" in text["pages"] and "3,000 tokens, " in text["pages"]
    else:
        assert found.pages == found.page_bytes == 0 and text["pages"] == "none: the model has no MLA layers"


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(memory=0), "memory=0: allowed is an integer of 1 or more, or None"),
        (dict(memory=1e9), "memory=1000000000.0: allowed is an integer of 1 or more, or None"),
        (dict(rows=0), "rows=0: allowed is an integer of 1 or more"),
        (dict(rows=None), "rows=None: allowed is an integer of 1 or more"),
        (dict(page=True), "page=True: allowed is an integer of 1 or more"),
        (dict(snapshots=-1), "snapshots=-1: allowed is an integer of 0 or more, or None"),
        (dict(pages=0), "pages=0: allowed is an integer of 1 or more, or None"),
        (dict(dtype="float16"), "dtype='float16': allowed are 'bfloat16' and 'float32'"),
    ],
)
def test_what_cannot_be(change, message):
    options = dict(memory=10**6, rows=2, page=4, dtype="float32") | change
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        sizes(MODELS["both"], options.pop("memory"), **options)


def test_pages_of_a_model_that_has_none():
    with pytest.raises(ValueError, match="^pages=1: allowed are 0 and None, since the model has no MLA layers$"):
        sizes(MODELS["kda alone"], 10**6, rows=2, page=4, dtype="float32", pages=1)
