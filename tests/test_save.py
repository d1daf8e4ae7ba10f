"""lm.save and convert: whatever is written loads as what it was."""

import numpy as np
import pytest

import k3jax
from k3jax import cli
from k3jax.io import hf


@pytest.mark.slow
def test_either_format_loads_with_its_text(pair, tmp_path):
    want = pair.generate("And God said", k3jax.SamplingParams(max_tokens=5, temperature=0))
    for format in ("hf", "orbax"):
        pair.save(tmp_path / format, format)
        with k3jax.load(tmp_path / format) as lm:
            assert lm.generate("And God said", k3jax.SamplingParams(max_tokens=5, temperature=0)) == want
            assert lm.end_ids == pair.end_ids and type(lm.chat_format) is type(pair.chat_format)
            np.testing.assert_array_equal(lm.logits([1, 2, 3]), pair.logits([1, 2, 3]))


def test_options_are_checked(pair, tmp_path):
    for options, message in (
        (dict(format="gguf"), "format='gguf': allowed are"),
        (dict(format="orbax", experts="bf16"), "experts='bf16': allowed is None"),
        (dict(experts="int4"), "experts='int4'"),
    ):
        with pytest.raises(ValueError, match=message):
            pair.save(tmp_path / "x", **options)
        assert not (tmp_path / "x").exists()
    (tmp_path / "x").mkdir()
    for format in ("hf", "orbax"):
        with pytest.raises(FileExistsError, match="not written over"):
            pair.save(tmp_path / "x", format)


@pytest.mark.slow
def test_convert(short, tmp_path, capsys):
    """To MXFP4 and back: packed experts stay packed where nothing else is asked for."""
    for source, out, options in (
        (short, "packed", ["--experts", "mxfp4"]),
        (tmp_path / "packed", "again", []),
        (tmp_path / "again", "plain", ["--experts", "bf16"]),
        (tmp_path / "again", "orbax", ["--format", "orbax"]),
    ):
        assert cli.main(["convert", "--model", str(source), "--out", str(tmp_path / out), *options]) == 0
    assert capsys.readouterr().out == ""
    assert [hf.holds_mxfp4(tmp_path / name) for name in ("packed", "again", "plain")] == [True, True, False]
    assert (tmp_path / "packed" / "model.safetensors").read_bytes() == (
        tmp_path / "again" / "model.safetensors"
    ).read_bytes()
    logits = []
    for name in ("packed", "plain", "orbax"):
        with k3jax.load(tmp_path / name) as lm:
            logits.append(lm.logits([5, 6, 7]))
    np.testing.assert_array_equal(logits[0], logits[1])
    np.testing.assert_allclose(logits[0], logits[2], atol=0.05)  # packed experts are decoded in the step, in bfloat16
    assert cli.main(["convert", "--model", str(short), "--out", str(tmp_path / "plain")]) == 2
    assert "not written over" in capsys.readouterr().err


@pytest.mark.parametrize("format", ["hf", "orbax"])
def test_an_interrupted_save_leaves_nothing(pair, tmp_path, monkeypatch, format):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.copyfile", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pair.save(tmp_path / "model", format)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", [None, 5, b"x", "", "a\0b"])
def test_paths_are_named(pair, path):
    for call in (pair.save, pair.load_state, k3jax.load, lambda path: pair.save_state(path, None)):
        with pytest.raises(ValueError, match="path=.*: allowed is a path"):
            call(path)


def test_several_processes_do_not_save(pair, tmp_path, monkeypatch):
    """Each would write all of it, and none holds it."""
    monkeypatch.setattr("jax.process_count", lambda: 2)
    for format in ("hf", "orbax"):
        with pytest.raises(ValueError, match="processes=2: allowed is 1 where a model is saved"):
            pair.save(tmp_path / format, format)
        assert not (tmp_path / format).exists()
