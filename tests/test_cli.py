"""The command line: text alone on stdout, one line on stderr for an error, and nothing lost by an interrupt."""

import io
import subprocess
import sys

import pytest

import k3jax
from k3jax import cli


@pytest.fixture
def call(pair_directory, capsys, monkeypatch):
    """Runs a command on the small model; returns its exit code, stdout and stderr."""

    def run(command, *options, stdin="", model=True, terminal=False):
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        monkeypatch.setattr("sys.stdin.isatty", lambda: terminal)
        code = cli.main([command, *(["--model", str(pair_directory)] if model else []), *options])
        return code, *capsys.readouterr()

    return run


def test_generate_streams_the_completion(call, pair):
    options = [
        "--prompt",
        "And God said",
        "--max-tokens",
        "9",
        "--seed",
        "3",
        "--top-p",
        "0.9",
        "--stop",
        "zz",
        "--logit-bias",
        "5",
        "1.5",
    ]
    params = k3jax.SamplingParams(max_tokens=9, seed=3, top_p=0.9, stop="zz", logit_bias={5: 1.5})
    [want] = pair.generate("And God said", params)
    assert call("generate", *options, "--kernels", "xla") == (0, f"And God said{want.text}\n", "")
    code, out, _ = call("generate", "--prompt", "And", "--n", "2", "--seed", "1", "--max-tokens", "3")
    both = pair.generate("And", k3jax.SamplingParams(n=2, seed=1, max_tokens=3))
    assert (code, out) == (0, "".join(f"And{c.text}\n" for c in both))


@pytest.mark.slow
def test_generate_shows_log_probabilities_beside_the_text(call, pair):
    options = ["--prompt", "And God said", "--max-tokens", "3", "--temperature", "0", "--logprobs", "2"]
    params = k3jax.SamplingParams(max_tokens=3, temperature=0, logprobs=2)
    [want] = pair.generate("And God said", params)
    code, out, err = call("generate", *options)
    assert (code, out) == (0, f"And God said{want.text}\n")
    lines = err.splitlines()
    assert [line.split()[:2] for line in lines] == [
        [str(token), f"{p:.3f}"] for token, p in zip(want.token_ids, want.logprobs.tokens, strict=True)
    ]
    assert all(
        f"{pair.decode([i])!r} {p:.3f}" in line
        for line, top in zip(lines, want.logprobs.top, strict=True)
        for i, p in top.items()
    )


def test_ranks_of_a_command(call, pair, monkeypatch):
    """--tp and --ep are a mesh; what cannot be is one line."""
    seen, load = [], k3jax.load
    monkeypatch.setattr(k3jax, "load", lambda *args, mesh, **options: (seen.append(mesh), load(*args, **options))[1])
    options = ("--prompt", "And", "--max-tokens", "3", "--seed", "1")
    for ranks in ((), ("--tp", "4"), ("--tp", "8", "--ep", "2")):
        assert call("generate", *options, *ranks)[0] == 0
    assert [mesh and dict(mesh.shape) for mesh in seen] == [
        None,
        {"data": 1, "ep": 4, "tp": 1},
        {"data": 1, "ep": 2, "tp": 4},
    ]
    assert call("generate", *options, "--tp", "9") == (2, "", "k3jax: tp=9: allowed are 1 to 8: 8 devices for data=1\n")
    assert call("score", "--file", "x", "--ep", "2")[0] == 2


def test_score(call, pair, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("In the beginning God created the heaven and the earth.\n")
    bits = pair.bits_per_byte(file.read_text(), window=32, stride=16)
    assert call("score", "--file", str(file), "--window", "32", "--stride", "16") == (0, f"{bits:.4f}\n", "")


def test_chat_keeps_the_conversation_and_forgets_on_reset(call, monkeypatch):
    """What the model was given each time; the answers are stdout's, the rest stderr's."""
    given, answers = [], iter(["one", "two", "three"])

    def stream_chat(self, messages, tools=None, thinking=True, sampling=None, *, effort=None, **rest):
        given.append(([dict(m) for m in messages], thinking, effort))
        text = next(answers)
        yield k3jax.ChatDelta(thinking="hm")
        yield k3jax.ChatDelta(content=text[:2])
        yield k3jax.ChatDelta(content=text[2:])
        yield k3jax.ChatCompletion("hm", text, (), "stop", k3jax.Completion([1], [1, 2, 3], text, "stop"))

    monkeypatch.setattr(k3jax.LM, "stream_chat", stream_chat)
    code, out, err = call(
        "chat", "--system", "Be brief.", "--effort", "low", stdin="Hello\n\nAgain\n/reset\n/what\nAnew\n/exit\nNever\n"
    )
    system, hello = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}
    answer = {"role": "assistant", "content": "one", "thinking": "hm"}
    assert [messages for messages, *_ in given] == [
        [system, hello],
        [system, hello, answer, {"role": "user", "content": "Again"}],
        [system, {"role": "user", "content": "Anew"}],
    ]
    assert {(thinking, effort) for _, thinking, effort in given} == {(True, "low")}
    assert (code, out) == (0, "one\ntwo\nthree\n")
    assert "hm" in err and "tokens/s" in err and "forgotten" in err and "/what: allowed are /reset and /exit" in err


@pytest.mark.slow
def test_chat_for_real(call, pair):
    """Two turns of the small model: what it says is what lm.chat says."""
    code, out, _ = call("chat", "--no-thinking", "--max-tokens", "6", "--seed", "2", stdin="Who is God?\n")
    params = k3jax.SamplingParams(max_tokens=6, seed=2)
    answer = pair.chat([{"role": "user", "content": "Who is God?"}], thinking=False, sampling=params)
    assert (code, out) == (0, answer.content + "\n") and answer.thinking == "" and answer.finish_reason == "length"
    with_thoughts = pair.chat([{"role": "user", "content": "Who is God?"}], sampling=params)
    assert with_thoughts.thinking and not with_thoughts.content


@pytest.mark.slow
def test_chat_options_of_a_small_context(call, pair):
    """Whatever else is asked for, an answer is no longer than the context: 4096 tokens here, as many as the default asks for."""
    code, out, _ = call("chat", "--no-thinking", "--temperature", "0", "--stop", "e", stdin="Who?\n")
    [end] = [
        pair.chat(
            [{"role": "user", "content": "Who?"}],
            thinking=False,
            sampling=k3jax.SamplingParams(temperature=0, stop="e"),
        )
    ]
    assert (
        code == 0
        and out == f"{end.content}\n"
        and "e" not in out
        and end.finish_reason == "stop"
        and end.completion.stop == "e"
    )
    message = end.message()
    assert message == {"role": "assistant", "content": end.content, "thinking": ""}
    again = pair.chat(
        [{"role": "user", "content": "Who?"}, message, {"role": "user", "content": "Who?"}],
        sampling=k3jax.SamplingParams(max_tokens=2),
    )
    assert len(again.completion.token_ids) == 2
    with pytest.raises(ValueError, match=r"messages of \d+ tokens: allowed are 4095 \(the context\)"):
        pair.chat([{"role": "user", "content": "word " * 4000}])


def test_an_interrupt_ends_the_answer_and_not_the_talk(call, monkeypatch):
    given = []

    def stream_chat(self, messages, *rest, **options):
        given.append([dict(m) for m in messages])
        yield k3jax.ChatDelta(content="half")
        raise KeyboardInterrupt

    monkeypatch.setattr(k3jax.LM, "stream_chat", stream_chat)
    code, out, err = call("chat", stdin="a\nb\n")
    assert (code, out) == (0, "half\nhalf\n") and err.count("interrupted") == 2
    assert given[1][1] == {"role": "assistant", "content": "half", "thinking": ""}


def test_a_mistake_ends_a_script_and_not_a_talk(call):
    code, out, err = call("chat", "--effort", "medium", stdin="a\nb\n")
    assert (code, out) == (2, "") and err.endswith("\nk3jax: effort='medium': allowed is low, high, max\n")
    code, out, err = call("chat", "--effort", "medium", stdin="a\nb\n", terminal=True)
    assert (code, out) == (0, "> > > ") and err.count("effort='medium'") == 2


def test_trace_tells_the_timeline_and_the_ledger(call):
    code, out, err = call("trace", "--prompt-ids", "0,1,2,3", "--ledger")
    assert code == 0 and err == ""
    for words in (
        "A, B, C, D",
        "p(next | A...D)",
        "p(next | A...E)",
        "This model",
        "Kimi K3 on one rank",
        "one rank of eight",
    ):
        assert words in out
    for shape in ("[96, 128, 128]", "[36864, 3]", "[4, 576]", "[12, 128, 128]", "[4608, 3]"):
        assert shape in out
    assert max(map(len, out.splitlines())) <= 160
    assert call("trace", "--prompt", "And God", "--steps", "1")[1].count("decode #") == 0


def test_version_and_module(capsys):
    assert cli.main(["--version"]) == 0 and capsys.readouterr().out == f"{k3jax.__version__}\n"
    done = subprocess.run([sys.executable, "-m", "k3jax", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{k3jax.__version__}\n")


def test_doctor_says_what_runs_where(call, pair_directory):
    code, out, _ = call("doctor", "--model", str(pair_directory), model=False)
    assert code == 0
    for words in ("jaxlib", "cpu", "KDA prefill", "every expert on every token (16 experts, 32 or fewer)", "kept in"):
        assert words in out
    assert "more than 32" in call("doctor", model=False)[1]


def test_commands_speak_only_of_what_they_do(call):
    """Whatever goes wrong before or during a command is one line that names the flag."""
    for arguments, words in (
        (("generate", "--prompt", "a", "--temperature", "-1"), "temperature=-1.0"),
        (("generate", "--prompt", "a", "--min-tokens", "100"), "min_tokens=100: allowed is 0 to max_tokens=64"),
        (("generate", "--prompt", "a", "--top-p", "0"), "k3jax: top_p=0.0: allowed is a number in (0, 1]"),
        (("generate", "--prompt", "a", "--max-tokens", "x"), "k3jax: Error parsing --max-tokens: invalid literal"),
        (("generate", "--prompt", "a", "--max-token", "3"), "perhaps you meant: --max-tokens"),
        (("chat", "--n", "2"), "n=2: allowed is 1 in a chat"),
        (("chat", "--logprobs", "1"), "logprobs=1: allowed is None in a chat"),
        (("generate",), "--prompt"),
        (("generate", "--prompt", "a", "--dtype", "float16"), "float16"),
        (("trace",), "prompt_ids=None, prompt=None: allowed is one of the two"),
        (("trace", "--prompt-ids", "0;1"), "prompt_ids='0;1': allowed are integers"),
        (("trace", "--prompt-ids", "0,5000"), "5000"),
        (("trace", "--prompt-ids", "0", "--steps", "0"), "steps=0"),
        (("convert", "--out", "x", "--format", "gguf"), "gguf"),
        (("score", "--file", "/no/such/file"), "file='/no/such/file': no such file"),
    ):
        code, out, err = call(*arguments)
        assert (code, out) == (2, "") and err.count("\n") == 1 and words.lower() in err.lower(), (arguments, err)
        assert "tyro" not in err and "help" not in err and "--" * 3 not in err
    code, _, err = call("generate", "--model", "/no/such/model", "--prompt", "a", model=False)
    assert code == 2 and "no such directory" in err


def test_text_must_be_text(call, tmp_path):
    (tmp_path / "x").write_bytes(b"\xff")
    code, _, err = call("score", "--file", str(tmp_path / "x"))
    assert code == 2 and "allowed is UTF-8" in err


def test_a_request_that_fails_is_one_line(call):
    ids = [str(i) for i in range(2048)]
    code, out, err = call("generate", "--prompt", "a", "--min-tokens", "2", "--stop-token-ids", *ids)
    assert (code, out) == (2, "a") and err.count("\n") == 1 and "request 0: every token is forbidden" in err


def test_convert_reads_what_it_wrote(call, pair_directory, tmp_path):
    """Either layout to the other and back, tensor by tensor."""
    for source, out, format in ((pair_directory, "a", "orbax"), (tmp_path / "a", "b", "hf")):
        code, text, err = call(
            "convert", "--model", str(source), "--out", str(tmp_path / out), "--format", format, model=False
        )
        assert (code, text) == (0, "") and f"MiB, format {format}" in err
    assert (tmp_path / "b" / "model.safetensors").read_bytes() == (pair_directory / "model.safetensors").read_bytes()
    code, _, err = call("convert", "--model", str(tmp_path / "none"), "--out", str(tmp_path / "c"), model=False)
    assert code == 2 and "no such directory" in err


def test_an_error_of_the_model_is_an_error(call, monkeypatch):
    monkeypatch.setattr(
        k3jax.LM,
        "stream",
        lambda *_, **__: iter([k3jax.Delta("", [], k3jax.Completion([1], [], "", "error", "not finite"))]),
    )
    assert call("generate", "--prompt", "a") == (2, "a", "k3jax: not finite\n")
