"""Conversations on disk: byte for byte, on with elsewhere as if never stopped, and every mismatch refused by name."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from helpers import K3_FIELDS, QUICK, Row, checkpoint, module, pack, same_bits, small, stored

from k3jax import carry as carries
from k3jax.carry import PAGE, Conversation
from k3jax.config import ConfigError, K3Config
from k3jax.io import conversation, orbax
from k3jax.io.safetensors import CheckpointError
from k3jax.kernels import Kernels
from k3jax.model import Context, forward

ROOT = Path(__file__).parents[1]
# Eight heads and eight latent channels: what eight devices can share.
CONFIG = small(**K3_FIELDS, num_hidden_layers=3, kda_layers=(0, 2), kda_num_heads=8)
IDS = tuple(int(token) for token in np.random.default_rng(0).integers(0, CONFIG.vocab_size, PAGE + 27))
TOKENS = PAGE + 20  # of them in the carry, on two pages


@jax.jit(compiler_options=QUICK)
def run(model, batch, carry):
    out = forward(model, batch, carry, Context(Kernels(kda="scan", moe="dense")))
    return out.logits, out.carry


def step(model, carry, ids, past, slot, pages):
    """One request's tokens at a slot and pages of a pool; logits of the new tokens."""
    logits, carry = run(model, pack([Row(ids, past, slot, pages)], 96, 2), carry)
    return logits[: len(ids)], carry


def pool():
    """Three slots and four pages, all of them NaN."""
    empty = carries.empty(CONFIG, slots=3, pages=4, dtype="float32")
    return jax.tree.map(lambda a: jnp.full_like(a, jnp.nan) if jnp.issubdtype(a.dtype, jnp.floating) else a, empty)


@pytest.fixture(scope="module")
def model():
    return module(CONFIG, stored(CONFIG, checkpoint(CONFIG)))


@pytest.fixture(scope="module")
def held(model):
    """A pool where slot 1 and pages 3 and 0 hold the first TOKENS ids, and the conversation taken out of it."""
    _, carry = step(model, pool(), IDS[:TOKENS], 0, 1, [3, 0])
    return carry, Conversation(IDS, carries.take(carry, 1, jnp.array([3, 0])))


@pytest.fixture(scope="module")
def saved(held, tmp_path_factory):
    directory = tmp_path_factory.mktemp("conversations") / "saved"
    conversation.save(directory, held[1], CONFIG)
    return directory


def same(found, want):
    leaves = jax.tree.leaves(found.carry), jax.tree.leaves(want.carry)
    structures = jax.tree.structure(found.carry), jax.tree.structure(want.carry)
    ids = found.token_ids == want.token_ids and all(type(token) is int for token in found.token_ids)
    return ids and structures[0] == structures[1] and all(map(same_bits, *leaves))


def refused(directory, *words, config=CONFIG, dtype="float32"):
    with pytest.raises(CheckpointError) as caught:
        conversation.load(directory, config, dtype)
    for word in (str(directory), *words):
        assert word in str(caught.value), str(caught.value)
    return str(caught.value)


def test_comes_back_byte_for_byte(held, saved):
    found = conversation.load(str(saved), CONFIG, "float32")
    assert isinstance(found, Conversation) and same(found, held[1])
    assert all(leaf.sharding == jnp.zeros(()).sharding for leaf in jax.tree.leaves(found.carry))


def test_goes_on_elsewhere_as_if_never_stopped(model, held, saved):
    """In another slot and other pages of a pool full of NaN, bit for bit."""
    rest = IDS[TOKENS:]
    want, kept = step(model, held[0], rest, TOKENS, 1, [3, 0])
    found = conversation.load(saved, CONFIG, "float32").carry
    moved = carries.put(pool(), 2, jnp.array([1, 2]), found)
    logits, moved = step(model, moved, rest, TOKENS, 2, [1, 2])
    assert same_bits(logits, want) and np.isfinite(np.asarray(logits)).all()
    ends = (
        carries.take(carry, slot, jnp.array(pages)) for carry, slot, pages in ((kept, 1, [3, 0]), (moved, 2, [1, 2]))
    )
    assert all(map(same_bits, *map(jax.tree.leaves, ends)))


@pytest.mark.parametrize("tokens, pages", [(1, 1), (PAGE, 1), (PAGE + 1, 2), (2 * PAGE, 2)])
def test_only_pages_in_use_are_written(held, tmp_path, tokens, pages):
    more = held[1].carry._replace(
        mla=tuple(jnp.concatenate([a, a + 1, a + 2]) for a in held[1].carry.mla), lengths=jnp.array([tokens], jnp.int32)
    )
    ids = (IDS * 2)[:tokens]
    conversation.save(tmp_path / "a", Conversation(ids, more), CONFIG)
    found = conversation.load(tmp_path / "a", CONFIG, "float32")
    assert same(found, Conversation(ids, more._replace(mla=tuple(a[:pages] for a in more.mla))))
    assert {a.shape[0] for name, a in ocp.metadata(tmp_path / "a").metadata.items() if "latents" in name} == {pages}


@pytest.mark.parametrize("layers", [(), (0, 1, 2, 3)], ids=["all-mla", "all-kda"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_models_of_one_mixer(tmp_path, layers, dtype):
    config = small(kda_layers=layers)
    carry = carries.empty(config, slots=1, pages=1, dtype=dtype)
    carry = jax.tree.map(lambda a: (jnp.arange(a.size).reshape(a.shape) % 251 + 1).astype(a.dtype), carry)
    want = Conversation((7, np.int32(8)), carry._replace(lengths=jnp.array([2], jnp.int32)))
    conversation.save(tmp_path / "a", want, config)
    assert same(conversation.load(tmp_path / "a", config, dtype), want)


# Devices.

SHARE = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from helpers import K3_FIELDS, small
from k3jax.carry import Conversation
from k3jax.io import conversation

config = small(**K3_FIELDS, num_hidden_layers=3, kda_layers=(0, 2), kda_num_heads=8)
found = conversation.load(sys.argv[1], config, "float32")
assert len(jax.devices()) == 8 and all(len(leaf.sharding.device_set) == 1 for leaf in jax.tree.leaves(found.carry))
mesh = Mesh(np.array(jax.devices()), "x")

def share(a):
    axis = a.shape.index(8) if 8 in a.shape else None
    spec = [None] * a.ndim if axis is None else [None] * axis + ["x"]
    return jax.device_put(a, NamedSharding(mesh, PartitionSpec(*spec)))

carry = jax.tree.map(share, found.carry)
assert all(len(leaf.addressable_shards[0].data.reshape(-1)) * 8 == leaf.size for leaf in jax.tree.leaves(carry)[:-1])
conversation.save(sys.argv[2], Conversation(found.token_ids, carry), config)
"""


def test_any_number_of_devices(saved, held, tmp_path):
    """From one device to eight that share the heads and the channels, and back to one."""
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SHARE, str(saved), str(tmp_path / "shared")]
    paths = f"{ROOT}:{ROOT / 'tests'}"
    done = subprocess.run(command, env=environment | {"PYTHONPATH": paths}, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    assert same(conversation.load(tmp_path / "shared", CONFIG, "float32"), held[1])


# Refusals.


def test_the_manifest_says_what_the_arrays_mean(saved):
    manifest = ocp.metadata(saved).custom_metadata
    assert manifest["k3jax_conversation"] == 1 and manifest["k3jax_version"]
    assert manifest["tokens"] == TOKENS and tuple(manifest["token_ids"]) == IDS
    assert manifest["dtype"] == {"latents": "float32", "conv": "float32", "S": "float32"}
    assert manifest["layout"]["page"] == PAGE
    fields = {name for name in vars(CONFIG) if name != "dtype"}
    assert set(manifest["config"]) == fields and manifest["config"]["kda_layers"] == list(CONFIG.kda_layers)


OTHER = dict(
    vocab_size=32, hidden_size=13, num_hidden_layers=5, rms_norm_eps=1e-6, max_position_embeddings=99,
    attn_res_block_size=None, kda_layers=(0, 1), kda_num_heads=4, kda_head_dim=5, short_conv_kernel_size=3,
    gate_lower_bound=None, use_full_rank_gate=False, kda_decay_rank=3, kda_gate_rank=3, num_attention_heads=3,
    q_lora_rank=None, kv_lora_rank=7, qk_nope_head_dim=6, qk_rope_head_dim=3, v_head_dim=8, mla_use_output_gate=False,
    latent_norm_eps=1e-5, hidden_act="silu", activation_situ_beta=3.0, activation_situ_linear_beta=24.0,
    intermediate_size=10, first_k_dense_replace=2, moe_layer_freq=2, num_experts=10, num_experts_per_token=2,
    num_shared_experts=2, moe_intermediate_size=11, routed_expert_hidden_size=None, latent_moe_use_norm=False,
    moe_renormalize=False, routed_scaling_factor=2.0, num_expert_group=2, topk_group=2, bos_token_id=1, eos_token_id=2,
    pad_token_id=3, media_placeholder_token_id=4,
)  # fmt: skip


def test_every_field_of_the_configuration_must_agree(saved):
    """But the dtype of the trunk on disk."""
    assert set(OTHER) | {"dtype"} == {field.name for field in dataclasses.fields(K3Config)}
    for name, value in OTHER.items():
        more = {"num_expert_group": 2} if name == "topk_group" else {}
        before, after = ((list(v) if isinstance(v, tuple) else v) for v in (getattr(CONFIG, name), value))
        text = refused(saved, f"{name}: saved {before!r}, this model has {after!r}",
                       config=dataclasses.replace(CONFIG, **more, **{name: value}))  # fmt: skip
        assert text.count("this model has") == 1 + len(more)
    assert conversation.load(saved, dataclasses.replace(CONFIG, dtype="bfloat16"), "float32").token_ids == IDS


def test_all_that_differs_is_named_at_once(saved):
    config = dataclasses.replace(CONFIG, kda_num_heads=4, kv_lora_rank=9)
    refused(saved, "kda_num_heads: saved 8, this model has 4; kv_lora_rank: saved 6, this model has 9", config=config)


def test_no_dtype_is_converted(held, saved, tmp_path):
    """Not even where it would be exact."""
    refused(saved, "dtype: saved float32 latents, this model holds bfloat16", "saved float32 conv", dtype="bfloat16")
    narrow = carries.empty(CONFIG, slots=1, pages=2, dtype="bfloat16")
    conversation.save(tmp_path / "narrow", Conversation(IDS, narrow._replace(lengths=held[1].carry.lengths)), CONFIG)
    saved_as = ocp.metadata(tmp_path / "narrow").custom_metadata["dtype"]
    assert saved_as == {"latents": "bfloat16", "conv": "bfloat16", "S": "float32"}
    refused(tmp_path / "narrow", "dtype: saved bfloat16 latents, this model holds float32")
    with pytest.raises(ConfigError, match="dtype='float16': allowed is 'bfloat16' or 'float32'"):
        conversation.load(saved, CONFIG, "float16")


def resaved(path, saved, arrays=None, **changes):
    """A copy with other metadata, or other arrays; `...` leaves an entry of the metadata out."""
    if arrays is None:
        arrays = ocp.load(saved)
    manifest = ocp.metadata(saved).custom_metadata | changes
    ocp.save(path, arrays, custom_metadata={name: value for name, value in manifest.items() if value is not ...})
    return path


def test_another_version_of_the_package_may_have_written_it(saved, held, tmp_path):
    assert same(conversation.load(resaved(tmp_path / "a", saved, k3jax_version="0.0.7"), CONFIG, "float32"), held[1])


def test_refuses_other_manifests(saved, tmp_path):
    manifest = ocp.metadata(saved).custom_metadata
    layout, fields, none = manifest["layout"], manifest["config"], "not a conversation of k3jax"
    cases = [
        ({"k3jax_conversation": 2}, "format 2: allowed is 1"),
        ({"layout": layout | {"page": 16}}, "layout of page: saved 16, allowed is 64"),
        ({"layout": layout | {"S": "1, H, K, V"}}, "layout of S: saved '1, H, K, V', allowed is '1, H heads"),
        ({"layout": layout | {"ring": 3}}, "layout of ring: saved 3, allowed is 'nothing'"),
        ({"dtype": manifest["dtype"] | {"S": "bfloat16"}}, "dtype: saved bfloat16 S, this model holds float32"),
        ({"config": fields | {"hidden_size": 13}}, "damaged: its configuration is not the one of its hash"),
        ({"config_sha256": "0" * 64}, "damaged: its configuration is not the one of its hash"),
        ({"tokens": TOKENS - 1}, "damaged: its 83 tokens and 91 ids"),
        ({"token_ids": [(IDS[0] + 1) % 31, *IDS[1:]]}, "damaged: its 84 tokens and 91 ids"),
        ({"tokens": 0}, "damaged: its 0 tokens and 91 ids"),
        ({"tokens": len(IDS) + 1}, "damaged: its 92 tokens and 91 ids"),
        ({"token_ids": [*IDS[1:], CONFIG.vocab_size]}, "damaged: its 84 tokens and 91 ids"),
        ({"token_ids": [*IDS[1:], 1.0]}, "damaged: its 84 tokens and 91 ids"),
        *(({name: ...}, none) for name in manifest if name != "k3jax_version"),
        *(({name: None}, none) for name in ("config", "layout", "dtype", "tokens", "token_ids")),
    ]  # fmt: skip
    arrays = {"a": np.zeros(2)}  # none of these is read
    for i, (changes, words) in enumerate(cases):
        refused(resaved(tmp_path / f"{i}", saved, arrays, **changes), words)


def test_a_new_field_of_the_configuration_is_named(saved, tmp_path):
    fields = ocp.metadata(saved).custom_metadata["config"] | {"frobnicate": 1}
    digest = conversation._sha256(fields)
    path = resaved(tmp_path / "a", saved, config=fields, config_sha256=digest)
    refused(path, "frobnicate: saved 1, this model has 'nothing'")


def test_refuses_other_arrays(saved, tmp_path):
    arrays = ocp.load(saved)
    refused(resaved(tmp_path / "more", saved, arrays | {"a": np.zeros(2)}), "a float64[2]", "not in both")
    less = {name: array for name, array in arrays.items() if name != "layers.0.S"}
    refused(resaved(tmp_path / "less", saved, less), "layers.0.S float32[1, 8, 4, 4]", "not in both")
    narrow = arrays | {"layers.0.S": arrays["layers.0.S"].astype("bfloat16")}
    refused(resaved(tmp_path / "narrow", saved, narrow), "layers.0.S bfloat16[1, 8, 4, 4]", "not in both")


def test_a_changed_bit_of_an_array_is_noticed(saved, tmp_path):
    arrays = {name: np.array(array) for name, array in ocp.load(saved).items()}
    arrays["layers.1.latents"].view(np.uint8)[0, 9, 3] ^= 1
    refused(resaved(tmp_path / "a", saved, arrays), "damaged: layers.1.latents is not what was saved")


def test_refuses_foreign_directories(saved, tmp_path, model):
    orbax.save(tmp_path / "model", model, CONFIG)
    for directory in (tmp_path, tmp_path / "absent", tmp_path / "model"):
        refused(directory, "not a conversation of k3jax")
    with pytest.raises(CheckpointError, match="not a checkpoint of k3jax"):
        orbax.load(saved)


def test_refuses_to_save_what_is_no_conversation(held, tmp_path):
    pool, (ids, carry) = held
    cases = [
        (Conversation(ids, pool), CONFIG, "3, 3, 8, 12"),
        (Conversation(ids[: TOKENS - 1], carry), CONFIG, "carry.lengths=84: allowed is 1 to 83"),
        (Conversation(ids, carry._replace(lengths=jnp.zeros(1, jnp.int32))), CONFIG, "carry.lengths=0: allowed is 1 to"),
        (Conversation((*ids, 31), carry), CONFIG, r"token_ids=\[31\]: allowed is 0 to 30"),
        (Conversation((-1, *ids), carry), CONFIG, r"token_ids=\[-1\]: allowed is 0 to 30"),
        (Conversation(ids, carry._replace(mla=tuple(a[:1] for a in carry.mla))), CONFIG, "1 pages.*2 or more for 84"),
        (Conversation(ids, carry), dataclasses.replace(CONFIG, kda_num_heads=4), r"8, 4, 4|8, 12"),
        (Conversation(ids, carry._replace(mla=())), CONFIG, "0 MLA layers"),
    ]  # fmt: skip
    for case, config, words in cases:
        with pytest.raises(ValueError, match=words):
            conversation.save(tmp_path / "a", case, config)
    with pytest.raises(FileExistsError, match=str(tmp_path)):
        conversation.save(tmp_path, held[1], CONFIG)
    assert not list(tmp_path.iterdir())


DAMAGE = """
import shutil, sys
from pathlib import Path
import jax, numpy as np
from helpers import K3_FIELDS, small
from k3jax.io import conversation

def contents(directory):
    ids, carry = conversation.load(directory, config, "float32")
    return ids, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(carry)]

config = small(**K3_FIELDS, num_hidden_layers=3, kda_layers=(0, 2), kda_num_heads=8)
saved, copy = Path(sys.argv[1]), Path(sys.argv[2])
want = contents(saved)
for file in sorted(path.relative_to(saved) for path in saved.rglob("*") if path.is_file()):
    data = (saved / file).read_bytes()
    middle = len(data) // 2
    for damaged in (None, data[:middle], data[:middle] + bytes(~byte & 255 for byte in data[middle:])):
        shutil.copytree(saved, copy)
        (copy / file).unlink()
        if damaged is not None:
            (copy / file).write_bytes(damaged)
        try:
            print(file, "same" if contents(copy) == want else "different")
        except Exception as error:
            print(file, type(error).__name__, str(copy) in str(error))
        shutil.rmtree(copy)
"""


def test_damaged_directories_are_refused_or_come_back_whole(saved, tmp_path):
    """Each file missing, cut in half, inverted from its middle on; in another process, since Orbax leaves tasks behind."""
    command = [sys.executable, "-c", DAMAGE, str(saved), str(tmp_path / "copy")]
    environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    outcomes = [line.partition(" ")[::2] for line in done.stdout.splitlines()]
    assert len(outcomes) == 3 * sum(path.is_file() for path in saved.rglob("*"))
    assert {outcome for _, outcome in outcomes} == {"CheckpointError True", "same"}
    read = {"_CHECKPOINT_METADATA", "state/_METADATA", "state/manifest.ocdbt"}
    assert all(outcome == "CheckpointError True" for file, outcome in outcomes if file in read or "state/d/" in file)
