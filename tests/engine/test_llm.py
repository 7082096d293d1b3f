"""The engine over a real model: company, chunks and preemption change nothing; LLM's calls agree."""

import gc
import random
import time
import weakref
from dataclasses import replace

import pytest
import torch

from dskit import checkpoint
from dskit.chat import ChatError
from dskit.engine.llm import LLM
from dskit.engine.seq import RequestError, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
IDS = [3 + (7 * i * i + i) % 256 for i in range(61)]


@pytest.fixture(scope="module")
def model():
    """The preset tiny in release numerics, with rows that do not depend on their batch."""
    return checkpoint.load("tiny", device="cpu", batch_invariant=True)


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model) as llm:
        yield llm


def idle(llm):
    """True once nothing is held; the engine's thread may need a moment to carry out a cancellation."""
    for _ in range(500):
        stats = llm.stats()
        if stats["running"] == stats["waiting"] == 0 and stats["blocks_free"] == stats["blocks_total"]:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("rows", [3, 16])
def test_chunked_prefill_gives_the_same_bits(model, llm, rows):
    want = llm.logits(IDS)
    assert want.shape == (61, 512) and want.dtype == torch.float32
    with LLM(model, max_num_batched_tokens=rows) as chunked:
        assert torch.equal(chunked.logits(IDS), want)
        assert chunked.stats()["steps"] >= 61 // rows


def test_decode_gives_the_same_bits_as_prefill(llm):
    """Log-probabilities of generated tokens equal those that scoring the whole text gives."""
    params = SamplingParams(seed=5, max_tokens=12, ignore_eos=True, logprobs=2)
    result = llm.generate(IDS[:20], params)
    scored = llm.logits(IDS[:20] + result.token_ids).double().log_softmax(-1)
    for t, one in enumerate(result.logprobs):
        assert one.logprob == scored[19 + t, one.token_id].item()
        assert [p for _, p in one.top] == scored[19 + t].topk(2).values.tolist()


def test_company_and_preemption_change_nothing(model, llm):
    """Three requests outgrow a pool of seven blocks; each equals itself alone."""
    prompts = [IDS[i : 2 * i + 28] for i in range(3)]
    params = [SamplingParams(seed=i, temperature=i / 2, max_tokens=10) for i in range(3)]
    alone = [llm.generate(p, q).token_ids for p, q in zip(prompts, params, strict=True)]
    with LLM(model, max_model_len=64, num_blocks=7, max_num_batched_tokens=32) as small:
        small.engine.scheduler.ratio = 0.0
        assert [r.token_ids for r in small.generate(prompts, params)] == alone
        assert small.stats()["preemptions"] > 0 and idle(small)


def test_greedy_follows_the_logits(llm):
    ids = list(IDS[:10])
    for token in llm.generate(ids, GREEDY).token_ids:
        assert token == llm.logits(ids)[-1].argmax().item()
        ids.append(token)


@pytest.mark.parametrize(
    "settings", [{"numerics": "exact"}, {"replay": "mask"}, {"replay": "compact"}], ids=str
)
def test_other_settings_answer(model, settings):
    source = "odd" if "numerics" in settings else model
    with LLM(source, device="cpu", **settings) as llm:
        results = llm.generate([IDS, IDS[:9]], GREEDY)
        assert [len(r.token_ids) for r in results] == [6, 6] and idle(llm)


def rows(result) -> torch.Tensor:
    """Log-probabilities [tokens, V] of a result that asked for all of them."""
    return torch.tensor([[p for _, p in sorted(one.top)] for one in result.logprobs], dtype=torch.float64)


def test_mask_and_compact_agree_and_differ_from_off(model):
    """Bit for bit between the two; what the approximation costs a model of random weights is printed."""
    params, got = replace(GREEDY, logprobs=512, seed=1), {}
    for replay in ("off", "mask", "compact"):
        with LLM(model, replay=replay, max_num_batched_tokens=24, speculate="off") as llm:
            got[replay] = [rows(r) for r in llm.generate([IDS, IDS[5:50], IDS[:7]], params)]
            if replay != "off":
                with pytest.raises(RequestError, match="replay='off'"):
                    llm.logits(IDS)
    for masked, compact in zip(got["mask"], got["compact"], strict=True):
        assert torch.equal(masked, compact)
    away = [(one[0] - off[0]).abs() for one, off in zip(got["compact"], got["off"], strict=True)]
    for length, distance in zip((61, 45, 7), away, strict=True):
        print(f"prompt of {length}: log-probabilities differ by {distance.mean():.4f}, "
              f"at most {distance.max():.4f}")
    assert away[0].max() > 1e-3 and away[2].max() == 0  # a prompt that is kept whole is exact


@pytest.mark.parametrize("batchings", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_bits_do_not_depend_on_the_batch(model, batchings):
    bits_in_company(model, batchings)


def bits_in_company(model, batchings):
    """One request's log-probabilities alone, and in random company, order and sizes of chunks."""
    params, r = replace(GREEDY, logprobs=512), random.Random(0)
    with LLM(model, speculate="off") as llm:
        want = rows(llm.generate(IDS[:30], params))
    for _ in range(batchings):
        budget = r.choice([16, 40, 1024])
        with LLM(model, speculate="off", max_num_batched_tokens=budget) as llm:
            company = [r.choices(IDS, k=r.randint(1, 60)) for _ in range(r.randint(1, 6))]
            at = r.randrange(len(company) + 1)
            found = llm.generate([*company[:at], IDS[:30], *company[at:]], params)[at]
        assert torch.equal(rows(found), want)


def test_text_prompts_and_streams(llm):
    params = SamplingParams(seed=1, max_tokens=8, ignore_eos=True)
    result = llm.generate("Hei på deg", params)
    assert result.usage.prompt_tokens == 1 + len("Hei på deg".encode())
    events = list(llm.stream("Hei på deg", params))
    assert [e.token_id for e in events] == result.token_ids
    assert "".join(e.text for e in events) == result.text == llm.tokenizer.decode(result.token_ids)
    assert [r.text for r in llm.generate(["Hei på deg"] * 2, params)] == [result.text] * 2
    assert llm.generate([]) == []


def test_leaving_a_stream_frees_everything(llm):
    for event in llm.stream("abc", SamplingParams(ignore_eos=True)):
        assert event.finish_reason is None
        break
    handle = llm.submit("abc", SamplingParams(ignore_eos=True))
    assert llm.abort(handle.request_id) and handle.result().finish_reason == "abort"
    llm.engine.stop()
    assert idle(llm) and not llm.abort("nobody")


def test_chat_and_its_stream_agree(llm):
    """The tiny model writes noise, all of it reasoning, since nothing closes the thinking part."""
    fields = {"max_tokens": 12, "seed": 4, "logit_bias": {1: -100}}
    result = llm.chat("Hi", **fields)
    deltas = list(llm.chat([{"role": "user", "content": "Hi"}], stream=True, **fields))
    assert "".join(d.get("reasoning_content") or "" for d in deltas) == result.reasoning != ""
    assert result.text == "".join(d.get("content") or "" for d in deltas) == ""
    assert result.finish_reason == "length" and deltas[-1] == {"finish_reason": "length"}
    assert result.tool_calls is None and result.usage.completion_tokens == 12
    plain = llm.chat(
        {"messages": [{"role": "user", "content": "Hi"}], "thinking": {"type": "disabled"}}, **fields
    )
    assert plain.reasoning is None and plain.text


class Script:
    """A runner that makes every sequence write the same tokens."""

    def __init__(self, ids):
        self.ids = ids

    def run(self, work, copies):
        rows = torch.zeros(len(work), 512)
        for row, w in zip(rows, work, strict=True):
            row[self.ids[w.stop - w.prompt_len]] = 9.0
        return rows


def test_a_tool_call_is_parsed(model):
    call = """

<｜DSML｜ calls>
<｜DSML｜ invoke name="look">
<｜DSML｜ parameter name="word" string="true">sea</｜DSML｜ parameter>
</｜DSML｜ invoke>
</｜DSML｜ calls>"""
    tool = {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    }
    config = model.config.replace(max_position_embeddings=8192)
    with LLM(checkpoint.random(config, device="cpu"), max_num_batched_tokens=8192, speculate="off") as llm:
        llm.engine.runner = Script([*llm.tokenizer.encode(call, specials=True), llm.tokenizer.eos_id])
        fields = {"tools": [tool], "thinking": {"type": "disabled"}, "temperature": 0}
        result = llm.chat("Where is it?", **fields)
        deltas = list(llm.chat("Where is it?", stream=True, **fields))
    assert result.finish_reason == "tool_calls" and result.text == ""
    assert result.tool_calls[0]["function"] == {"name": "look", "arguments": '{"word": "sea"}'}
    pieces = [call["function"] for d in deltas for call in d.get("tool_calls", [])]
    assert "".join(p.get("arguments") or "" for p in pieces) == '{"word": "sea"}'
    assert deltas[-1] == {"finish_reason": "tool_calls"}


def test_sampling_values_come_from_params_then_body(llm):
    prompt, params = llm.render("Hi", temperature=0.25, top_k=3, seed=1, params=SamplingParams(seed=9))
    assert (params.temperature, params.top_k, params.seed) == (0.25, 3, 9)
    assert params.max_tokens + len(prompt.ids) <= llm.max_model_len
    _, params = llm.render("Hi", temperature=0.5, logprobs=True, params=SamplingParams(temperature=0))
    assert params.temperature == 0 and params.logprobs == 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda llm: llm.generate(""), "the prompt is empty"),
        (lambda llm: llm.generate([[]]), "the prompt is empty"),
        (lambda llm: llm.generate([[1, 2], [600]]), "token id 600, outside the vocabulary of 512"),
        (lambda llm: llm.generate(["a", "b"], [GREEDY]), "2 prompts, but 1 params"),
        (lambda llm: llm.generate([5] * 1024), "has 1024 tokens, but max_model_len 1024 allows 1023"),
        (lambda llm: llm.logits([]), "the prompt is empty"),
        (lambda llm: llm.chat("Hi", temperature=3), "temperature"),
        (lambda llm: llm.chat("x" * 2000), "2,?0|context"),
        (lambda llm: llm.chat([]), "messages|empty"),
    ],
)
def test_bad_requests_leave_nothing_behind(llm, call, words):
    with pytest.raises((RequestError, ChatError), match=words):
        call(llm)
    assert idle(llm)


def test_nan_weights_are_an_error_of_the_request():
    model = checkpoint.load("tiny", device="cpu")
    model.norm.weight.data[5] = float("nan")
    with LLM(model) as llm:
        result = llm.generate([3, 4, 5], GREEDY)
        assert result.finish_reason == "error" and "not finite" in result.error and idle(llm)
        with pytest.raises(RuntimeError, match="not finite"):
            llm.logits([3, 4, 5])


def test_close_frees_the_caches(model):
    llm = LLM(model)
    llm.generate([3, 4], GREEDY)
    memory = weakref.ref(llm.engine.runner.memory)
    llm.close()
    llm.close()
    gc.collect()
    assert memory() is None and "closed" in repr(llm)
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([3, 4])
