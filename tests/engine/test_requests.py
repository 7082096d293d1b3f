"""Every kind of bad request gets an error that names the field, and a good one is filled in as documented."""

import math

import pytest

from dskit.engine.seq import RequestError, SamplingParams

from .mock import VOCAB, engine

BAD_PARAMS = [
    {"temperature": -0.1},
    {"temperature": 2.1},
    {"temperature": math.nan},
    {"temperature": "hot"},
    {"temperature": True},
    {"top_p": 0},
    {"top_p": 1.01},
    {"top_k": -2},
    {"top_k": 2.5},
    {"min_p": -0.1},
    {"min_p": 1.1},
    {"seed": 2**64},
    {"seed": 1.5},
    {"max_tokens": 0},
    {"max_tokens": -3},
    {"max_tokens": 1.0},
    {"stop": ""},
    {"stop": ["a", ""]},
    {"stop": [1]},
    {"stop": ["x"] * 17},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": ["1"]},
    {"stop_token_ids": 3.5},
    {"logprobs": -1},
    {"logprobs": 1001},
    {"ignore_eos": 1},
    {"frequency_penalty": 2.5},
    {"presence_penalty": -2.5},
    {"repetition_penalty": 0},
    {"repetition_penalty": math.inf},
    {"logit_bias": {-1: 2}},
    {"logit_bias": {3: 101}},
    {"logit_bias": {"x": 1}},
    {"logit_bias": [1]},
    {"logit_bias": {3: math.nan}},
]


@pytest.mark.parametrize("params", BAD_PARAMS, ids=str)
def test_bad_parameters_name_their_field(params):
    ((name, value),) = params.items()
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**params)
    assert caught.value.param == name and caught.value.status == 400
    assert str(value) in str(caught.value)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "empty"),
        ([3, VOCAB], f"token id {VOCAB}, outside the vocabulary of {VOCAB}"),
        ([-1], "token id -1"),
        ([1.5], "flat list"),
        (["a"], "flat list"),
        ([[1, 2]], "flat list"),
        ("text", "encode the text"),
        ([5] * 64, "has 64 tokens, but max_model_len 64 allows 63"),
    ],
    ids=str,
)
def test_bad_prompts(ids, words):
    with pytest.raises(RequestError, match=words) as caught:
        engine().submit(ids)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"max_tokens": 62}, "3 prompt tokens and max_tokens 62 are more than max_model_len 64"),
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias has token id {VOCAB}"),
        ({"stop_token_ids": [VOCAB]}, f"stop_token_ids has token id {VOCAB}"),
    ],
)
def test_parameters_that_do_not_fit_the_model(params, words):
    with pytest.raises(RequestError, match=words) as caught:
        engine().submit([1, 2, 3], SamplingParams(**params))
    assert caught.value.param == next(iter(params))


def test_the_queue_has_an_end():
    e = engine(max_queued_requests=2)
    handles = [e.submit([1, 2]) for _ in range(2)]
    with pytest.raises(RequestError, match="max_queued_requests allows 2") as caught:
        e.submit([1, 2])
    assert caught.value.status == 429 and caught.value.code == "queue_full"
    assert all(h.result().finish_reason for h in handles)
    assert e.submit([1, 2]).result().finish_reason in ("stop", "length")


def test_a_request_id_is_used_once_at_a_time():
    e = engine()
    first = e.submit([1, 2], SamplingParams(max_tokens=2), request_id="mine")
    with pytest.raises(RequestError, match="'mine' is being served"):
        e.submit([1, 2], request_id="mine")
    first.result()
    assert e.submit([1, 2], request_id="mine").request_id == "mine"


def test_scoring_needs_all_rows():
    with pytest.raises(RequestError, match="replay='compact'"):
        engine(replay="compact").submit([1, 2], scoring=True)


def test_values_come_from_the_request_then_the_checkpoint_then_neutral():
    defaults = {"temperature": 0.6, "top_p": 0.95, "max_new_tokens": 30, "eos_token_id": 1}
    params = SamplingParams(top_p=0.5).resolve(defaults, max_tokens=50)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.6, 0.5, 0, 0.0)
    assert params.max_tokens == 30 and SamplingParams().resolve(defaults, max_tokens=20).max_tokens == 20
    assert SamplingParams().resolve({"do_sample": False, "temperature": 0.6}, max_tokens=1).greedy


def test_a_bad_generation_config_is_refused():
    with pytest.raises(RequestError, match="top_p is 7"):
        SamplingParams().resolve({"top_p": 7}, max_tokens=1)


def test_from_body_reads_openai_fields():
    params = SamplingParams.from_body(
        {
            "model": "demo",
            "messages": [],
            "temperature": 0.5,
            "max_completion_tokens": 9,
            "logprobs": True,
            "top_logprobs": 4,
            "stop": "x",
            "logit_bias": {"7": -3},
            "seed": 11,
            "top_k": None,
        }
    )
    assert params == SamplingParams(
        temperature=0.5, max_tokens=9, logprobs=4, stop=["x"], logit_bias={7: -3.0}, seed=11
    )
    with pytest.raises(RequestError, match="top_logprobs needs logprobs"):
        SamplingParams.from_body({"logprobs": False, "top_logprobs": 2})


def test_choices_of_one_request_have_their_own_seeds():
    assert [SamplingParams(seed=2**64 - 1).fork(i).seed for i in range(3)] == [2**64 - 1, 0, 1]
    assert SamplingParams().fork(3).seed is None
