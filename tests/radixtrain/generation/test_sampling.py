"""Each row gets what `model.generate` gives it by itself; draws belong to answers and follow the distribution."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper

from radixtrain.errors import UserError
from radixtrain.generation import sampling
from radixtrain.generation.options import resolve_config
from radixtrain.generation.sampling import TokenChooser

VOCAB, EOS = 50, [3, 4]
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
    "watermarking_config": [{"greenlist_ratio": 0.4, "bias": 3.0}],
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
    built = tiny_qwen3(num_hidden_layers=1, vocab_size=VOCAB, eos_token_id=EOS)
    return built.eval()


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
    torch.testing.assert_close(scores, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(scores.isneginf(), expected.isneginf())
    if not chooser.samples:
        tokens, logprobs = chooser.choose(*batch)
        assert tokens.tolist() == [step.token for step in steps]
        expected = batch.logits.log_softmax(-1)[torch.arange(len(steps)), tokens]
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=2e-6)


class TestProcessors:
    @pytest.mark.parametrize(("name", "value"), [(name, value) for name in GREEDY for value in GREEDY[name]])
    def test_each_by_itself(self, model: Any, name: str, value: Any) -> None:
        assert_as_transformers(model, {name: value})

    @pytest.mark.parametrize(("name", "value"), [(name, value) for name in SAMPLED for value in SAMPLED[name]])
    def test_each_of_sampling(self, model: Any, name: str, value: Any) -> None:
        assert_as_transformers(model, {"do_sample": True, name: value})

    @settings(max_examples=25, deadline=None)
    @given(
        options=st.fixed_dictionaries(
            {"do_sample": st.booleans()},
            optional={
                name: st.sampled_from(values) for name, values in {**GREEDY, **SAMPLED}.items() if name not in SLOW
            },
        )
    )
    def test_any_together(self, model: Any, options: dict[str, Any]) -> None:
        if options.get("remove_invalid_values") and "exponential_decay_length_penalty" in options:
            del options["remove_invalid_values"]  # transformers fails: its largest finite score times a factor is inf
        assert_as_transformers(model, options)

    @pytest.mark.parametrize("changes", [{"max_length": 8, "max_new_tokens": None}, {"min_length": 9}])
    def test_lengths_come_from_each_row(self, model: Any, changes: dict[str, Any]) -> None:
        assert_as_transformers(model, {"forced_eos_token_id": 3, "min_new_tokens": 2, **changes})

    def test_a_longer_prompt_beside_it_changes_nothing(self, model: Any) -> None:
        """The padding and the other rows are not read: one row by itself gives the same bits."""
        options = {"repetition_penalty": 1.4, "min_new_tokens": 2, "no_repeat_ngram_size": 2, "max_new_tokens": NEW}
        chooser = TokenChooser(model, resolve_config(model, None, **options))
        batch = batched(list(steps_of(model, options)))
        together = torch.stack(chooser.choose(*batch))
        for row, length in enumerate(batch.lengths):
            logits, ids, lengths, prompts = (each[row : row + 1] for each in batch)
            alone = torch.stack(chooser.choose(logits, ids[:, :length], lengths, prompts))
            assert torch.equal(alone[:, 0], together[:, row])

    def test_are_made_once_if_no_option_depends_on_the_prompts_length(self, model: Any) -> None:
        batch = batched(list(steps_of(model, {})))
        for options, expected in (({"repetition_penalty": 1.5}, {1}), ({"min_new_tokens": 2}, {1, 4, 5})):
            chooser = TokenChooser(model, resolve_config(model, None, **options))
            chooser.made.clear()  # as on another device, where the ones made at first are of no use
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # transformers warns of a prompt without tokens
                chooser.choose(*batch)
            assert {prompt_length for _, prompt_length in chooser.made} == expected

    def test_the_table_names_processors_that_do_not_read_token_ids(self) -> None:
        scores, config = torch.randn(2, VOCAB), {"device": "cpu"}
        arguments = {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "top_h": 0.5, "min_p": 0.1, "mass": 0.5}
        arguments |= {"epsilon": 0.01, "suppress_tokens": [1]} | config
        for kind in sampling.READS_SCORES_ONLY:
            names = kind.__init__.__code__.co_varnames if "__init__" in vars(kind) else ()
            processor = kind(**{name: value for name, value in arguments.items() if name in names})
            assert processor(None, scores).shape == scores.shape


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
    def test_comes_where_transformers_calls_it(self, model: Any) -> None:
        options = {"do_sample": True, "temperature": 0.5, "top_k": 6, "repetition_penalty": 1.3}
        assert_as_transformers(model, options, LogitsProcessorList([Favourite()]))
        assert_as_transformers(model, {}, LogitsProcessorList([Favourite()]))

    def test_replaces_the_one_of_its_type(self, model: Any) -> None:
        options = {"do_sample": True, "temperature": 0.5}
        assert_as_transformers(model, options, LogitsProcessorList([TemperatureLogitsWarper(3.0)]))

    def test_sees_rows_of_one_length_without_padding(self, model: Any) -> None:
        batch = batched(list(steps_of(model, {})))
        favourite = Favourite()
        TokenChooser(model, resolve_config(model, None), [favourite]).choose(*batch)
        rows = sorted(tuple(row) for ids in favourite.seen for row in ids.tolist())
        pairs = zip(batch.token_ids.tolist(), batch.lengths, strict=True)
        assert rows == sorted(tuple(row[:length]) for row, length in pairs)

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
    """The operations that ran, and the dtypes that they made."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        self.dtypes |= {each.dtype for each in (out if isinstance(out, tuple) else [out]) if isinstance(each, Tensor)}
        return out


HOST_READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero", "equal"}


def rows_of(logits: Tensor) -> Batch:
    n = len(logits)
    return Batch(logits, torch.zeros(n, 4, dtype=torch.int64), np.full(n, 4), np.full(n, 2))


class TestTheHotPath:
    def test_greedy_without_processors_is_an_argmax_and_a_log_softmax(self, model: Any) -> None:
        chooser = TokenChooser(model, resolve_config(model, None))
        batch = rows_of(torch.randn(6, VOCAB))
        with Recorded() as recorded:
            chooser.choose(*batch)
        assert recorded.names.count("argmax") == recorded.names.count("_log_softmax") == 1
        assert len(recorded.names) <= 6, recorded.names
        assert torch.float64 not in recorded.dtypes

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
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
    @pytest.mark.parametrize("do_sample", [False, True])
    def test_are_the_raw_logits_widened(self, model: Any, dtype: torch.dtype, do_sample: bool) -> None:
        logits = (torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(0)) * 5).to(dtype)
        options = {"do_sample": do_sample, "temperature": 0.3, "top_k": 4} if do_sample else {}
        chooser = TokenChooser(model, resolve_config(model, None, **options), seed=0)
        tokens, logprobs = chooser.choose(*rows_of(logits), np.linspace(0, 0.99, 8))
        truth = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        assert logprobs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        bound = 4 * torch.finfo(logprobs.dtype).eps * logits.double().abs().amax()
        assert (logprobs.double() - truth).abs().max() <= bound

    def test_the_first_of_equal_logits_is_chosen(self, model: Any) -> None:
        logits = torch.zeros(2, VOCAB)
        logits[0, [7, 9]] = 3.0
        assert TokenChooser(model, resolve_config(model, None)).choose(*rows_of(logits))[0].tolist() == [7, 0]


def sampler(model: Any, seed: int | None = 0, **options: Any) -> TokenChooser:
    return TokenChooser(model, resolve_config(model, None, do_sample=True, **options), seed=seed)


class TestDistribution:
    NUM_DRAWS = 10_000

    @pytest.mark.parametrize(
        "options", [{"top_k": 0}, {"top_k": 12}, {"top_k": 0, "top_p": 0.8}, {"top_k": 20, "temperature": 1.8}]
    )
    @pytest.mark.parametrize("along", ["answers", "tokens"])
    def test_10_000_draws(self, model: Any, options: dict[str, Any], along: str) -> None:
        """Chi-square. Draws of different answers, and those of one answer's tokens."""
        logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5
        chooser = sampler(model, seed=11, **options)
        count = self.NUM_DRAWS
        draws = chooser.draws(5, count)
        if along == "answers":
            draws = np.array([chooser.draws(answer, 1)[0] for answer in range(count)])
        tokens, _ = chooser.choose(*rows_of(logits.expand(count, -1)), draws)
        exact = chooser._processed(logits.double(), *rows_of(logits)[1:]).softmax(-1)[0].numpy()
        counts = np.bincount(tokens.numpy(), minlength=VOCAB)
        assert not counts[exact == 0].any()
        assert chi_square(counts, exact * count) < critical(num_cells(exact * count) - 1)

    def test_the_measure_sees_a_shift_of_two_percent(self) -> None:
        """The chi-square test would fail for a distribution that is this wrong."""
        exact = np.full(20, 500.0)
        assert chi_square(exact * np.where(np.arange(20) < 10, 1.1, 0.9), exact) > critical(19)

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


def num_cells(expected: np.ndarray) -> int:
    return len(merged(expected, expected))


def merged(counts: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """(cells, 2): counts and expectations, with cells of less than 5 as one."""
    large = expected >= 5
    cells = [*zip(counts[large], expected[large], strict=True)]
    if expected[~large].sum() >= 5:
        cells.append((counts[~large].sum(), expected[~large].sum()))
    return np.array(cells)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    observed, wanted = merged(counts, expected).T
    return float(((observed - wanted) ** 2 / wanted).sum())


def critical(freedom: int, z: float = 3.09) -> float:
    """The value that chi-square passes once in 1,000 times: Wilson and Hilferty (1931)."""
    return freedom * (1 - 2 / (9 * freedom) + z * (2 / (9 * freedom)) ** 0.5) ** 3


class TestDraws:
    def test_belong_to_the_answer(self, model: Any) -> None:
        chooser = sampler(model, seed=7)
        assert chooser.draws(3, 4).dtype == np.float64
        assert np.array_equal(chooser.draws(3, 100)[:4], chooser.draws(3, 4))
        assert np.array_equal(chooser.draws(3, 4), sampler(model, seed=7).draws(3, 4))
        streams = [tuple(sampler(model, seed=seed).draws(answer, 4)) for seed in (7, 8) for answer in (0, 1, 2, 3)]
        assert len(set(streams)) == 8

    def test_tokens_do_not_depend_on_the_batch_or_its_order(self, model: Any) -> None:
        options = {"temperature": 1.3, "top_k": 9, "repetition_penalty": 1.2, "max_new_tokens": NEW}
        batch = batched(list(steps_of(model, options)))
        chooser = sampler(model, **options)
        draws = np.array([chooser.draws(answer, 1)[0] for answer in range(len(batch.lengths))])
        together, _ = chooser.choose(*batch, draws)
        order = np.random.default_rng(0).permutation(len(draws))
        shuffled, _ = chooser.choose(*(each[order] for each in batch), draws[order])
        assert torch.equal(shuffled, together[order])
        halves = [chooser.choose(*(each[part] for each in batch), draws[part])[0] for part in np.split(order, [7])]
        assert torch.equal(torch.cat(halves), together[order])

    def test_a_seed_leaves_every_generator_alone(self, model: Any) -> None:
        before = states()
        chooser = sampler(model, seed=5)
        chooser.choose(*rows_of(torch.randn(3, VOCAB, generator=torch.Generator())), chooser.draws(0, 3))
        assert states() == before

    def test_greedy_decoding_leaves_every_generator_alone(self, model: Any) -> None:
        before = states()
        TokenChooser(model, resolve_config(model, None)).choose(
            *rows_of(torch.randn(3, VOCAB, generator=torch.Generator()))
        )
        assert states() == before

    def test_without_a_seed_torch_governs(self, model: Any) -> None:
        found = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            found.append(sampler(model, seed=None).draws(0, 3).tolist())
        assert found[0] == found[1] != found[2]
        torch.manual_seed(1)
        twice = [sampler(model, seed=None).draws(0, 3).tolist() for _ in range(2)]
        assert twice[0] != twice[1]  # two calls after each other differ, as those of model.generate

    @pytest.mark.parametrize("seed", [-1, 2**63, np.int64(4), 2**70])
    def test_any_whole_number_is_a_seed(self, model: Any, seed: Any) -> None:
        assert sampler(model, seed=seed).draws(0, 2).shape == (2,)

    @pytest.mark.parametrize("seed", [1.5, "1", [1]])
    def test_nothing_else_is(self, model: Any, seed: Any) -> None:
        with pytest.raises(UserError, match="seed: expected a whole number, got"):
            sampler(model, seed=seed)


def states() -> list[Any]:
    numpy_state = np.random.get_state()  # noqa: NPY002
    return [torch.get_rng_state().tolist(), numpy_state[1].tolist(), numpy_state[2], random.getstate()]
