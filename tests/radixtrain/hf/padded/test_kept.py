"""The cache of `share_prefixes(model, cache=...)`: what is kept and what goes, when it is not used, what is refused.

Equality over generated batches: `tests/claims/padded/test_kept.py`.
"""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from radixtrain import RadixCache, generate, prepare_model, share_prefixes, sharing_report
from radixtrain.errors import UserError
from radixtrain.hf.sharing_report import SharingReport
from radixtrain.verification.oracle import float64_throughout

BAR = 1e-12
FIRST = [[7, 8, 9, 1, 2], [7, 8, 9, 1, 3]]
OTHER = [[7, 8, 9, 4, 5, 6, 1, 2], [7, 8, 9, 4, 5, 6, 1, 3]]


def ids_of(rows: list[list[int]]) -> dict[str, Any]:
    """Padded on the left, as GRPO pads its prompts."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "use_cache": False}


@torch.no_grad()
def logits_of(model: Any, rows: list[list[int]], **options: Any) -> Tensor:
    given = {**ids_of(rows), **options}
    logits: Tensor = model(**given).logits
    return logits[given["attention_mask"].bool()]


def report_after(model: Any, *calls: list[list[int]], **options: Any) -> SharingReport:
    """Of calls that find what the untouched model finds."""
    untouched = copy.deepcopy(model)
    shared = share_prefixes(model, **{"cache": RadixCache(), **options})
    with float64_throughout(untouched), float64_throughout(shared):
        for rows in calls:
            assert (logits_of(shared, rows) - logits_of(untouched, rows)).abs().max() <= BAR
    return sharing_report(shared)


def drawn(cache: RadixCache) -> list[str]:
    return [line.strip() for line in str(cache).splitlines()[1:]]


class TestLiteral:
    """The last token of every row is computed in any case, and kept if there is room."""

    def test_counts(self, tiny_qwen3: Callable[..., Any]) -> None:
        report = report_after(tiny_qwen3(), FIRST, FIRST, OTHER)
        assert (report.num_tokens, report.num_cached_tokens, report.num_unique_tokens) == (36, 8 + 6, 6 + 2 + 6)
        lines = str(report).splitlines()
        assert "14 of these tokens were in the cache, where one takes 768 bytes" in lines
        assert not report.not_cached and not report.not_shared

    def test_bytes(self, tiny_qwen3: Callable[..., Any]) -> None:
        """2 layers of 2 key/value heads of 8, keys and values, and a hidden state of 32."""
        for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
            model = share_prefixes(tiny_qwen3().to(dtype), cache=RadixCache())
            logits_of(model, FIRST)
            assert sharing_report(model).bytes_per_kept_token == size * (2 * 2 * 2 * 8 + 32)

    def test_one_row_a_call(self, tiny_qwen3: Callable[..., Any]) -> None:
        """Nothing is shared within a call, and `min_ratio` does not ask for it."""
        report = report_after(tiny_qwen3(), FIRST[:1], FIRST[1:], FIRST[:1], min_ratio=2.0)
        assert (report.num_cached_tokens, report.num_unique_tokens) == (4 + 4, 5 + 1 + 1)

    def test_a_row_that_the_mask_hides(self, tiny_qwen3: Callable[..., Any]) -> None:
        report = report_after(tiny_qwen3(), [*FIRST, []], [[], *FIRST])
        assert report.num_cached_tokens == 8

    def test_several_sequences_in_a_row(self, tiny_qwen3: Callable[..., Any]) -> None:
        untouched, shared = tiny_qwen3().double(), share_prefixes(tiny_qwen3().double(), cache=RadixCache())
        packed = {"input_ids": torch.tensor([[*FIRST[0], *FIRST[1]]]), "use_cache": False}
        packed["position_ids"] = torch.tensor([[*range(5), *range(5)]])
        with float64_throughout(untouched), float64_throughout(shared), torch.no_grad():
            for _ in range(2):
                assert (shared(**packed).logits - untouched(**packed).logits).abs().max() <= BAR
        assert sharing_report(shared).num_cached_tokens == 8


class TestBudget:
    def test_what_several_rows_read_comes_first(self, tiny_qwen3: Callable[..., Any]) -> None:
        cache = RadixCache(max_tokens=4)
        report_after(tiny_qwen3(), FIRST, cache=cache)
        assert drawn(cache) == ["[7, 8, 9, 1] 4 tokens"]

    def test_it_evicts_what_only_one_read(self, tiny_qwen3: Callable[..., Any]) -> None:
        cache = RadixCache(max_tokens=6)
        report_after(tiny_qwen3(), FIRST, [[7, 8, 9, 4, 5], [7, 8, 9, 4, 6]], cache=cache)
        assert drawn(cache)[:2] == ["[7, 8, 9] 3 tokens", "[1] 1 token"] and "[4] 1 token" in drawn(cache)

    def test_one_row_evicts_nothing(self, tiny_qwen3: Callable[..., Any]) -> None:
        cache = RadixCache(max_tokens=6)
        report_after(tiny_qwen3(), FIRST, [[9, 9, 9, 9]], cache=cache)
        assert cache.num_tokens == 6 and not cache.counters.num_evictions

    @pytest.mark.parametrize("holds", [True, False])
    def test_what_a_call_reads_is_not_evicted(
        self, tiny_qwen3: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, holds: bool
    ) -> None:
        """Without a lock on 7 8 9 its end would go."""
        if not holds:
            monkeypatch.setattr(RadixCache, "lock", lambda self, node: None)
            monkeypatch.setattr(RadixCache, "unlock", lambda self, node: None)
            with pytest.raises(AssertionError):
                report_after(tiny_qwen3(), FIRST, OTHER, cache=RadixCache(max_tokens=5))
            return
        cache = RadixCache(max_tokens=5)
        report = report_after(tiny_qwen3(), FIRST, OTHER, OTHER, cache=cache)
        assert drawn(cache) == ["[7, 8, 9] 3 tokens", "[4, 5] 2 tokens"] and report.num_cached_tokens == 6 + 10

    def test_the_store_is_not_larger(self, tiny_qwen3: Callable[..., Any]) -> None:
        """It grows to twice its size until then."""
        cache = RadixCache(max_tokens=13)
        report_after(tiny_qwen3(), FIRST, OTHER, [[1, 2, 3], [1, 2, 4]], cache=cache)
        assert cache.pool.capacity == 13 == cache.num_tokens

    def test_less_than_a_prompt(self, tiny_qwen3: Callable[..., Any]) -> None:
        report = report_after(tiny_qwen3(), FIRST, FIRST, cache=RadixCache(max_tokens=2))
        assert report.num_cached_tokens == 4


def in_place(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] += 1e-3


def loaded(model: Any) -> None:
    model.load_state_dict({name: x * 1.01 for name, x in model.state_dict().items()})


CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": in_place,
    "load_state_dict": loaded,
    "a hook": lambda model: model.model.layers[0].register_forward_hook(lambda module, args, output: 2 * output),
    "a setting": lambda model: setattr(model.model.norm, "variance_epsilon", 0.5),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.usefixtures("hooks_that_may_stay")
def test_a_change_of_the_model_is_seen(tiny_qwen3: Callable[..., Any], change: str) -> None:
    untouched, cache = tiny_qwen3(), RadixCache()
    shared = share_prefixes(tiny_qwen3(), cache=cache)
    with float64_throughout(untouched), float64_throughout(shared):
        before = logits_of(shared, FIRST)
        for model in (untouched, shared):
            CHANGES[change](model)
        after = logits_of(shared, FIRST)
        assert (after - logits_of(untouched, FIRST)).abs().max() <= BAR
        assert (after - before).abs().max() > 1e-6
        logits_of(shared, FIRST)
    assert sharing_report(shared).num_cached_tokens == 8, "only of the last call"


class TestAdapters:
    @pytest.fixture
    def adapted(self, tiny_qwen3: Callable[..., Any]) -> tuple[Any, Any]:
        """Untouched, and with a cache: the same two adapters."""
        import peft

        models = []
        for _ in range(2):
            torch.manual_seed(0)
            config = peft.LoraConfig(r=2, target_modules=["k_proj", "up_proj"], init_lora_weights=False)
            models.append(peft.get_peft_model(tiny_qwen3().double(), config))
            models[-1].add_adapter("second", config)
        return models[0], share_prefixes(models[1], cache=RadixCache())

    def test_a_reference_without_its_adapters_outlives_their_training(self, adapted: tuple[Any, Any]) -> None:
        """As TRL computes it. Calls with adapters that are trained do not touch the cache."""
        untouched, shared = adapted
        with float64_throughout(untouched), float64_throughout(shared):
            for step in range(3):
                for model in adapted:
                    model(**ids_of(FIRST))
                    for name, weight in model.named_parameters():
                        if "lora_B.default" in name:
                            weight.data.add_(0.1)
                policy = [logits_of(model, FIRST) for model in adapted]
                with untouched.disable_adapter(), shared.disable_adapter():
                    reference = [logits_of(model, FIRST) for model in adapted]
                for one, other in (policy, reference):
                    assert (one - other).abs().max() <= BAR
                assert (policy[0] - reference[0]).abs().max() > 1e-3
                assert sharing_report(shared).num_cached_tokens == 8 * step
        reasons = {"it has gradients": 3, "a trained adapter is active": 3}
        assert dict(sharing_report(shared).not_cached) == reasons

    def test_a_switch_of_frozen_adapters_is_seen(self, adapted: tuple[Any, Any]) -> None:
        untouched, shared = adapted
        with float64_throughout(untouched), float64_throughout(shared):
            for name in ("default", "second", "second", "default"):
                for model in adapted:
                    model.set_adapter(name)
                    model.requires_grad_(False)
                assert (logits_of(shared, FIRST) - logits_of(untouched, FIRST)).abs().max() <= BAR
        assert sharing_report(shared).num_cached_tokens == 8, "of the third call"


class TestNotUsed:
    """These calls are shared as without a cache."""

    @pytest.mark.parametrize(
        ("given", "reason"),
        [
            ({"output_hidden_states": True}, "output_hidden_states"),
            ({"position_ids": torch.arange(3, 8)[None]}, "position_ids do not count from 0 in every row"),
        ],
    )
    def test_a_call(self, tiny_qwen3: Callable[..., Any], given: dict[str, Any], reason: str) -> None:
        cache = RadixCache()
        model = share_prefixes(tiny_qwen3(), cache=cache)
        assert (logits_of(model, FIRST, **given) - logits_of(tiny_qwen3(), FIRST, **given)).abs().max() < 1e-5
        assert dict(sharing_report(model).not_cached) == {reason: 1} and sharing_report(model).num_shared == 1
        assert f"1 calls without the cache: {reason}" in str(sharing_report(model)) and not cache.num_tokens

    def test_router_logits(self) -> None:
        from tiny_models import tiny_model

        model = share_prefixes(tiny_model("Qwen3MoeForCausalLM"), cache=RadixCache())
        with torch.no_grad():
            assert model(**ids_of(FIRST), output_router_logits=True).router_logits[0].shape[0] == 10
        assert dict(sharing_report(model).not_cached) == {"output_router_logits": 1}

    def test_gradients(self, tiny_qwen3: Callable[..., Any]) -> None:
        model = share_prefixes(tiny_qwen3(), cache=RadixCache())
        model(**ids_of(FIRST)).logits.sum()
        assert dict(sharing_report(model).not_cached) == {"it has gradients": 1}

    def test_weights_on_several_ranks(self, tiny_qwen3: Callable[..., Any]) -> None:
        model = share_prefixes(tiny_qwen3(), cache=RadixCache())
        model.model.norm.weight.ds_id = 0  # type: ignore[union-attr]  # as DeepSpeed marks it
        logits_of(model, FIRST)
        assert dict(sharing_report(model).not_cached) == {"its weights are spread over ranks": 1}


def test_a_trained_head_on_a_frozen_model(tiny_qwen3: Callable[..., Any]) -> None:
    """Its gradient is the ordinary one, from the cache too, and its steps do not empty it."""
    untouched, shared = (tiny_qwen3(tie_word_embeddings=False).train() for _ in range(2))
    for model in (untouched, shared):
        model.model.requires_grad_(False)
    share_prefixes(shared, cache=RadixCache())
    given = ids_of(FIRST)
    with float64_throughout(untouched), float64_throughout(shared):
        for _ in range(2):
            for model in (untouched, shared):
                model.zero_grad()
                model(**given).logits.log_softmax(-1)[..., 3].mean().backward()
            found, truth = (model.lm_head.weight.grad for model in (shared, untouched))
            assert (found - truth).norm() <= BAR * truth.norm()
            for model in (untouched, shared):
                model.lm_head.weight.data.add_(model.lm_head.weight.grad, alpha=-0.1)
    assert sharing_report(shared).num_cached_tokens == 8


def test_a_gradient_that_no_parameter_asks_for_is_refused(tiny_qwen3: Callable[..., Any]) -> None:
    """It would end at what is kept. The next call works."""
    cache = RadixCache()
    model = share_prefixes(tiny_qwen3().train().requires_grad_(False), cache=cache)
    model.enable_input_require_grads()
    with pytest.raises(UserError, match=r"keeps rows without gradients, and a hook requests"):
        model(**ids_of(FIRST))
    logits_of(model, FIRST)
    assert cache.num_tokens == 6 and not cache.num_reserved and not cache.root.locks


def test_an_error_in_a_layer_leaves_nothing_behind(tiny_qwen3: Callable[..., Any]) -> None:
    def fail(*arguments: Any) -> None:
        raise KeyboardInterrupt

    cache = RadixCache()
    model = share_prefixes(tiny_qwen3(), cache=cache)
    logits_of(model, FIRST)
    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        logits_of(model, OTHER)
    hook.remove()
    assert (logits_of(model, OTHER) - logits_of(tiny_qwen3(), OTHER)).abs().max() < 1e-4
    assert cache.num_reserved == cache.root.locks == 0
    assert cache.num_tokens == cache.pool.capacity - cache.pool.num_free


def test_a_copy_has_a_cache_of_its_own(tiny_qwen3: Callable[..., Any]) -> None:
    cache = RadixCache(max_tokens=100)
    model = share_prefixes(tiny_qwen3(), cache=cache)
    logits_of(model, FIRST)
    other = copy.deepcopy(model)
    in_place(other)
    for each in (other, model):
        logits_of(each, FIRST)
    assert sharing_report(other).num_cached_tokens == 0 and sharing_report(model).num_cached_tokens == 8
    assert cache.num_tokens == 6


def test_a_cache_of_generate_is_emptied(tiny_qwen3: Callable[..., Any]) -> None:
    """It has no hidden states; `generate` of a shared model works as before."""
    cache = RadixCache()
    model = share_prefixes(tiny_qwen3().eval(), cache=cache)
    answers = [generate(model, FIRST, max_new_tokens=2, do_sample=False, cache=each) for each in (None, cache)]
    assert answers[0].token_ids == answers[1].token_ids
    assert (logits_of(model, FIRST) - logits_of(tiny_qwen3(), FIRST)).abs().max() < 1e-4
    assert sharing_report(model).num_cached_tokens == 0 and cache.num_tokens == 6


class TestRefused:
    @pytest.mark.parametrize("kind", ["Qwen3.5", "Bamba", "LFM2"])
    def test_recurrent_layers(self, tiny_hybrid: Callable[..., Any], kind: str) -> None:
        model = tiny_hybrid(kind)
        with pytest.raises(UserError, match=r"has recurrent layers, whose state is not kept .*; leave out cache"):
            share_prefixes(model, cache=RadixCache())
        assert not model.model._forward_hooks

    def test_something_else(self, tiny_qwen3: Callable[..., Any]) -> None:
        with pytest.raises(UserError, match="cache: expected a RadixCache, or None to keep nothing, got bool"):
            share_prefixes(tiny_qwen3(), cache=True)

    def test_a_named_attention(self, tiny_qwen3: Callable[..., Any]) -> None:
        with pytest.raises(UserError, match="attention='path' computes whole batches"):
            share_prefixes(tiny_qwen3(), attention="path", cache=RadixCache())
        model = share_prefixes(tiny_qwen3(), cache=RadixCache())
        with pytest.raises(UserError, match="attention='path' computes whole batches"):
            prepare_model(model, attention="path")
        logits_of(prepare_model(model), FIRST)
        assert sharing_report(model).bytes_per_kept_token

    def test_dropout_that_is_allowed_elsewhere(self, tiny_qwen3: Callable[..., Any]) -> None:
        """One draw would be kept for the whole run."""
        model = share_prefixes(tiny_qwen3().train(), allow_dropout=["dropout"], cache=RadixCache())
        model.model.layers[0].dropout = nn.Dropout(0.5)
        with pytest.raises(UserError, match=r"dropout p=0\.5 at"):
            logits_of(model, FIRST)
        logits_of(model.eval(), FIRST)


@pytest.mark.usefixtures("hooks_that_may_stay")
def test_two_threads(tiny_qwen3: Callable[..., Any]) -> None:
    """Both in the first layer at the same time: one of them does without the cache."""
    untouched, model = tiny_qwen3(), share_prefixes(tiny_qwen3(), cache=RadixCache())
    barrier, found = threading.Barrier(2, timeout=600), dict[int, Tensor]()

    def wait(*_: Any) -> None:
        barrier.wait()

    def run(index: int) -> None:
        found[index] = logits_of(model, (FIRST, OTHER)[index])

    expected = [logits_of(untouched, rows) for rows in (FIRST, OTHER)]
    model.model.layers[0].register_forward_pre_hook(wait)
    threads = [threading.Thread(target=run, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((found[index] - expected[index]).abs().max() < 1e-4 for index in (0, 1))
    report = sharing_report(model)
    assert report.num_shared == 2 and dict(report.not_cached) == {"another call uses the cache": 1}
