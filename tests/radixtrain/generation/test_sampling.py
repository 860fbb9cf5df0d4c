"""Each row gets what `model.generate` gives it by itself, in float64; draws belong to answers.

That they follow the distribution: `tests/claims/generation/test_sampling_in_batches.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from older_transformers import IS_OLDER
from tiers import TRIES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper, WatermarkingConfig

from radixtrain.errors import UserError
from radixtrain.generation.options import resolve_config
from radixtrain.generation.sampling import TokenChooser

VOCAB, EOS = 50, [3, 4]
EXACT = 1e-12
PROMPTS = [[7], [5, 6, 5, 6, 5], [9, 8, 9, 8], [1, 2, 1, 2, 1]]
NEW = 5
# One value of each option that a processor comes from.
GREEDY: dict[str, list[Any]] = {
    "repetition_penalty": [1.7, 0.6],
    "no_repeat_ngram_size": [1, 2],
    "bad_words_ids": [[[5], [6, 7], [3]], [[9, 8, 9]]],
    "sequence_bias": [{(5, 6): 9.0, (8,): -7.0}, [[[9, 8], 9.0]]],
    "min_length": [7],
    "min_new_tokens": [3],
    "forced_bos_token_id": [11],
    "forced_eos_token_id": [3, [3, 4]],
    "exponential_decay_length_penalty": [(1, 1.6)],
    "suppress_tokens": [[1, 2, 30, 31]],
    "begin_suppress_tokens": [[*range(10, 40)]],
    "remove_invalid_values": [True],
    "renormalize_logits": [True],
    "watermarking_config": [WatermarkingConfig(greenlist_ratio=0.4, bias=3.0)],
}
SAMPLED: dict[str, list[Any]] = {
    "temperature": [0.4, 1.9],
    "top_k": [0, 1, 7],
    "top_p": [0.3, 0.9],
    "top_h": [0.5],
    "min_p": [0.2],
    "typical_p": [0.6],
    "epsilon_cutoff": [0.03],
    "eta_cutoff": [0.1],
}


ALL = {**GREEDY, **SAMPLED}
SLOW = ("watermarking_config",)  # 10 ms for each length of prompt


class Step(NamedTuple):
    """What `model.generate` saw and made of one token: ids before it, (L,); logits and scores, (V,)."""

    token_ids: Tensor
    prompt_length: int
    logits: Tensor
    scores: Tensor
    token: int


@pytest.fixture(scope="module")
def model(tiny_qwen3: Any) -> Any:
    """Its logits spread enough for every option to matter."""
    return tiny_qwen3(vocab_size=VOCAB, eos_token_id=EOS).double().eval()


def steps_of(model: Any, options: dict[str, Any], processor: Any = None) -> Iterator[Step]:
    """Every step of transformers' loop, one prompt a call."""
    for prompt in PROMPTS:
        torch.manual_seed(len(prompt))
        found = model.generate(
            torch.tensor([prompt]),
            **{"max_new_tokens": NEW, **options},
            logits_processor=processor,
            output_scores=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
        for place, (logits, scores) in enumerate(zip(found.logits, found.scores, strict=True)):
            end = len(prompt) + place
            ids = found.sequences[0]
            yield Step(ids[:end], len(prompt), logits[0], scores[0], int(ids[end]))


class Batch(NamedTuple):
    """The arguments of `choose`, without draws."""

    logits: Tensor
    token_ids: Tensor
    lengths: np.ndarray
    prompt_lengths: np.ndarray


def batched(steps: list[Step]) -> Batch:
    """All steps as rows of one batch; the padding is a token that would change what is chosen."""
    ids = torch.nn.utils.rnn.pad_sequence([step.token_ids for step in steps], batch_first=True, padding_value=5)
    lengths, prompts = ([f(step) for step in steps] for f in (lambda s: len(s.token_ids), lambda s: s.prompt_length))
    return Batch(torch.stack([step.logits for step in steps]), ids, np.array(lengths), np.array(prompts))


def assert_as_transformers(model: Any, options: dict[str, Any], processor: Any = None) -> None:
    steps = list(steps_of(model, options, processor))
    chooser = TokenChooser(model, resolve_config(model, None, **{"max_new_tokens": NEW, **options}), processor, seed=0)
    batch = batched(steps)
    expected = torch.stack([step.scores for step in steps])
    scores = chooser._processed(batch.logits.clone(), *batch[1:]) if chooser.stages else batch.logits
    torch.testing.assert_close(scores, expected, rtol=EXACT, atol=EXACT)
    assert torch.equal(scores.isneginf(), expected.isneginf())
    if not chooser.samples:
        tokens, logprobs = chooser.choose(*batch)
        assert tokens.tolist() == [step.token for step in steps]
        expected = batch.logits.log_softmax(-1)[torch.arange(len(steps)), tokens]
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=EXACT)


@pytest.mark.usefixtures("in_float64")
class TestProcessors:
    @pytest.mark.parametrize("name", [*GREEDY, *SAMPLED])
    def test_each_by_itself(self, model: Any, name: str) -> None:
        for value in ALL[name]:
            assert_as_transformers(model, {"do_sample": name in SAMPLED, name: value})

    @settings(max_examples=TRIES, deadline=None)
    @given(
        options=st.fixed_dictionaries(
            {"do_sample": st.booleans()},
            optional={name: st.sampled_from(values) for name, values in ALL.items() if name not in SLOW},
        )
    )
    def test_any_together(self, model: Any, options: dict[str, Any]) -> None:
        if options.get("remove_invalid_values") and "exponential_decay_length_penalty" in options:
            del options["remove_invalid_values"]  # transformers fails: its largest finite score times a factor is inf
        if IS_OLDER and "forced_eos_token_id" in options:
            options.pop("exponential_decay_length_penalty", None)  # of a score of -inf it makes nan
        assert_as_transformers(model, options)


class Favourite(LogitsProcessor):
    """Adds to the score of the row's first token, and keeps what it saw."""

    def __init__(self, in_place: bool = False) -> None:
        self.in_place = in_place
        self.seen: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(input_ids.clone())
        scores = scores if self.in_place else scores.clone()
        scores[torch.arange(len(scores)), input_ids[:, 0]] += 2.0
        return scores


class TestTheUsersProcessor:
    @pytest.mark.usefixtures("in_float64")
    def test_comes_where_transformers_calls_it(self, model: Any) -> None:
        options = {"do_sample": True, "temperature": 0.5, "top_k": 6, "repetition_penalty": 1.3}
        assert_as_transformers(model, options, LogitsProcessorList([Favourite()]))
        assert_as_transformers(model, {}, LogitsProcessorList([Favourite()]))
        of_a_type_that_is_there = LogitsProcessorList([TemperatureLogitsWarper(3.0)])
        assert_as_transformers(model, {"do_sample": True, "temperature": 0.5}, of_a_type_that_is_there)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    def test_what_it_does_in_place_leaves_log_probabilities_alone(self, model: Any, dtype: torch.dtype) -> None:
        """With rows of many lengths, and of one."""
        for batch in (batched(list(steps_of(model, {}))), rows_of(torch.randn(6, VOCAB))):
            logits = batch.logits.to(dtype)
            before = logits.clone()
            chooser = TokenChooser(model, resolve_config(model, None), [Favourite(in_place=True)])
            tokens, logprobs = chooser.choose(logits, *batch[1:])
            assert torch.equal(logits, before)
            assert torch.equal(logprobs, before.to(logprobs.dtype).log_softmax(-1).gather(1, tokens[:, None])[:, 0])

    @pytest.mark.parametrize("processor", [Favourite(), [3], "temperature"])
    def test_of_the_wrong_kind(self, model: Any, processor: Any) -> None:
        with pytest.raises(UserError, match="logits_processor: expected a LogitsProcessorList"):
            TokenChooser(model, resolve_config(model, None), processor)

    @pytest.mark.parametrize(
        "options", [{"do_sample": True, "temperature": 0.0}, {"bad_words_ids": []}, {"repetition_penalty": 2}]
    )
    def test_a_value_that_a_processor_refuses(self, model: Any, options: dict[str, Any]) -> None:
        with pytest.raises(UserError, match=r"^generation options: `"):
            TokenChooser(model, resolve_config(model, None, **options), seed=0)


class Recorded(TorchDispatchMode):
    """The operations that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


HOST_READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero", "equal"}


def rows_of(logits: Tensor) -> Batch:
    n = len(logits)
    return Batch(logits, torch.zeros(n, 4, dtype=torch.int64), np.full(n, 4), np.full(n, 2))


class TestTheHotPath:
    @pytest.mark.parametrize(
        "options",
        [{}, {"do_sample": True}, {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2}],
    )
    def test_nothing_is_read_by_the_host(self, model: Any, options: dict[str, Any]) -> None:
        chooser = TokenChooser(model, resolve_config(model, None, **options), seed=0)
        batch = rows_of(torch.randn(6, VOCAB))
        with Recorded() as recorded:
            chooser.choose(*batch, np.linspace(0, 0.9, 6))
        assert not HOST_READS & set(recorded.names)


class TestLogProbabilities:
    @pytest.mark.parametrize(("dtype", "do_sample"), [(torch.bfloat16, False), (torch.float32, True)])
    def test_are_the_raw_logits_widened(self, model: Any, dtype: torch.dtype, do_sample: bool) -> None:
        logits = (torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(0)) * 5).to(dtype)
        options = {"do_sample": do_sample, "temperature": 0.3, "top_k": 4} if do_sample else {}
        chooser = TokenChooser(model, resolve_config(model, None, **options), seed=0)
        tokens, logprobs = chooser.choose(*rows_of(logits), np.linspace(0, 0.99, 8))
        truth = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        assert logprobs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        # It subtracts the largest logit, and the logarithm of a sum of 50 exponentials: a rounding of a logit for each.
        bound = 4 * torch.finfo(logprobs.dtype).eps * logits.double().abs().amax()
        assert (logprobs.double() - truth).abs().max() <= bound


def sampler(model: Any, seed: int | None = 0, **options: Any) -> TokenChooser:
    return TokenChooser(model, resolve_config(model, None, do_sample=True, **options), seed=seed)


class TestDistribution:
    def test_is_the_inverse_of_the_cumulative_distribution(self, model: Any) -> None:
        logits = torch.tensor([0.1, 0.0, 0.6, 0.3]).log().expand(8, -1)
        draws = np.array([0.0, 0.0999, 0.1001, 0.5, 0.6999, 0.7001, 0.99, np.nextafter(1, 0)])
        tokens, _ = sampler(model, top_k=0).choose(*rows_of(logits), draws)
        assert tokens.tolist() == [0, 0, 2, 2, 2, 3, 3, 3]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_the_ends_never_give_a_token_without_probability(self, model: Any, dtype: torch.dtype) -> None:
        logits = torch.randn(400, VOCAB, dtype=dtype, generator=torch.Generator().manual_seed(1))
        logits[:, :20] = logits[:, 30:] = -torch.inf
        for end in (0.0, np.nextafter(1, 0)):
            tokens, logprobs = sampler(model, top_k=0).choose(*rows_of(logits), np.full(400, end))
            assert ((tokens >= 20) & (tokens < 30)).all()
            assert logprobs.isfinite().all()

    @pytest.mark.parametrize("value", [-torch.inf, torch.nan])
    def test_a_row_without_probability_gets_no_token(self, model: Any, value: float) -> None:
        logits = torch.zeros(2, VOCAB)
        logits[1] = value
        tokens, _ = sampler(model, top_k=0).choose(*rows_of(logits), np.array([0.5, 0.5]))
        assert tokens.tolist() == [25, -1]


class TestDraws:
    def test_belong_to_the_answer(self, model: Any) -> None:
        chooser = sampler(model, seed=7)
        assert chooser.draws(3, 4).dtype == np.float64
        assert np.array_equal(chooser.draws(3, 100)[:4], chooser.draws(3, 4))
        assert np.array_equal(chooser.draws(3, 4), sampler(model, seed=7).draws(3, 4))
        streams = [tuple(sampler(model, seed=seed).draws(answer, 4)) for seed in (7, 8) for answer in (0, 1, 2, 3)]
        assert len(set(streams)) == 8

    def test_any_whole_number_is_a_seed(self, model: Any) -> None:
        for seed in (-1, 2**63, np.int64(4), 2**70):
            assert sampler(model, seed=seed).draws(0, 2).shape == (2,)
        for wrong in (1.5, "1", [1]):
            with pytest.raises(UserError, match="seed: expected a whole number, got"):
                sampler(model, seed=wrong)  # type: ignore[arg-type]
