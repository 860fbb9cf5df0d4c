"""`share_prefixes` around whole models: classes, adapters, wrappers, copies, and what users do to a model besides.

Loss and gradients are those of the untouched model, in float64; a call that cannot be shared runs untouched.
"""

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from radixtrain import RadixCollator, prepare_model, restore_model, share_prefixes, sharing_report
from radixtrain.errors import UserError
from radixtrain.hf.backbone import backbone_of, model_inside
from radixtrain.testing import relative_error
from radixtrain.verification.oracle import float64_throughout, gradients_of

IDS = torch.tensor([[7, 8, 9, 1, 2, 3], [7, 8, 9, 1, 4, 0], [7, 8, 9, 5, 0, 0], [7, 8, 9, 5, 6, 0]])
MASK = (IDS != 0).long()
KEPT = MASK.bool()
LABELS = IDS.masked_fill(MASK == 0, -100)
BATCH = {"input_ids": IDS, "attention_mask": MASK}  # 20 tokens, 9 unique
FEATURES = [{"input_ids": row[row > 0].tolist(), "labels": row[row > 0].tolist()} for row in IDS]
SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 64, "pad_token_id": 0}
DRAWING = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LORA = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)


def tiny(model_class: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    cls = getattr(transformers, model_class)
    return cls(cls.config_class(**{**SIZES, **changes})).train()


def own_loss(model: Any) -> Tensor:
    return model(**BATCH, labels=LABELS).loss


def both(model: Any, loss_of: Callable[[Any], Tensor], share: Callable[[Any], Any] = share_prefixes) -> Any:
    """Asserts the same loss and the same gradient as the untouched model. Returns the report."""
    with float64_throughout(model, model_inside(model)):
        expected = gradients_of(model, lambda: [loss_of(model)])
        found = gradients_of(share(model), lambda: [loss_of(model)])
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    gradients = [torch.cat([each.flatten() for each in arm.tensors.values()]) for arm in (found, expected)]
    assert relative_error(*gradients) <= 1e-12
    return sharing_report(model)


def one_class(model: Any) -> Tensor:
    return model(**BATCH, labels=torch.tensor([0, 1, 1, 0])).loss


def two_scores(model: Any) -> Tensor:
    return model(**BATCH, labels=torch.arange(8.0).view(4, 2)).loss


def class_of_every_token(model: Any) -> Tensor:
    return model(**BATCH, labels=(IDS % 2).where(KEPT, -100)).loss


def first_output(model: Any) -> Tensor:
    return model(**BATCH)[0][KEPT].sin().sum()


QWEN3 = {"head_dim": 8, "num_key_value_heads": 2}
GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)}
OPT = {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0}
CLASSES: dict[str, tuple[dict[str, Any], Callable[[Any], Tensor]]] = {
    "Qwen3ForCausalLM": (QWEN3, own_loss),
    "Qwen3ForSequenceClassification": (QWEN3, one_class),
    "Qwen3ForTokenClassification": ({**QWEN3, "classifier_dropout": 0.0}, class_of_every_token),
    "Qwen3Model": (QWEN3, first_output),
    "GPT2ForSequenceClassification": (GPT2, one_class),
    "LlamaForSequenceClassification": ({}, two_scores),
    "OPTForCausalLM": (OPT, own_loss),
}


class TestClasses:
    @pytest.mark.parametrize("model_class", CLASSES)
    def test_equal(self, model_class):
        settings, loss_of = CLASSES[model_class]
        report = both(tiny(model_class, **settings), loss_of)
        assert (report.num_shared, report.num_tokens, report.num_unique_tokens) == (1, 20, 9)

    @pytest.mark.parametrize(
        "model_class",
        [
            *(
                "BertForSequenceClassification",
                "BertForMaskedLM",
                "ModernBertModel",
                "EuroBertForSequenceClassification",
            ),
            *("LayoutLMForTokenClassification", "SplinterModel", "FNetForSequenceClassification", "NomicBertModel"),
        ],
    )
    def test_an_encoder_is_refused_before_it_trains(self, model_class):
        """LayoutLM and Splinter do not say of their attention that it is not causal, and trained as if it were."""
        with pytest.raises(UserError, match=f"{model_class} attends in both directions"):
            share_prefixes(tiny(model_class, **DRAWING))

    @pytest.mark.parametrize(
        ("model_class", "settings", "message"),
        [
            ("T5ForConditionalGeneration", {"num_layers": 1, "d_model": 32, "d_ff": 32, "d_kv": 8}, "an encoder and a"),
            ("MambaForCausalLM", {"state_size": 4}, "state-space layers only"),
            ("LlamaForCausalLM", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
            (
                "GPTJForCausalLM",
                {"n_layer": 1, "n_embd": 32, "n_head": 4, "rotary_dim": 4},
                "does not take its attention",
            ),
        ],
    )
    def test_refused_before_it_trains(self, model_class, settings, message):
        with pytest.raises(UserError, match=message):
            share_prefixes(tiny(model_class, **settings))

    def test_the_text_of_a_multimodal_model(self):
        from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

        torch.manual_seed(0)
        vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
        config = LlavaConfig(
            text_config=LlamaConfig(**SIZES),
            vision_config=CLIPVisionConfig(**vision, image_size=28, patch_size=14),
            image_token_id=40,
            vision_feature_layer=-1,
        )
        model = LlavaForConditionalGeneration(config).train()
        assert both(model, own_loss).num_shared == 1
        ids = torch.tensor([[40] * 4 + [7, 8], [40] * 4 + [7, 9]])
        model(input_ids=ids, pixel_values=torch.zeros(2, 3, 28, 28))
        assert dict(sharing_report(model).not_shared) == {"pixel_values is given": 1}


def test_a_span_over_whole_rows_is_refused():
    with pytest.raises(UserError, match="Qwen3ForQuestionAnswering chooses a span among all places of a row"):
        share_prefixes(tiny("Qwen3ForQuestionAnswering", **QWEN3))


class TestAdapters:
    @pytest.mark.parametrize("share_first", [True, False])
    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"target_modules": ["q_proj", "lm_head"]},
            {"use_dora": True},
            {"modules_to_save": ["lm_head"]},
            {"trainable_token_indices": [7, 9]},
        ],
        ids=lambda settings: " ".join(settings) or "lora",
    )
    def test_equal(self, tiny_qwen3, share_first, settings):
        config = LoraConfig(r=2, **{"target_modules": ["q_proj"], "init_lora_weights": False, **settings})
        results = []
        for share in (lambda model: model, share_prefixes):
            torch.manual_seed(0)
            base = tiny_qwen3(tie_word_embeddings=False).train()
            model = get_peft_model(share(base), config) if share_first else share(get_peft_model(base, config))
            with float64_throughout(model):
                results.append(gradients_of(model, lambda model=model: [own_loss(model)]))
        assert sharing_report(model).num_shared == 1
        assert results[1].loss == pytest.approx(results[0].loss, rel=1e-12)
        gradients = [torch.cat([each.flatten() for each in arm.tensors.values()]) for arm in results]
        assert relative_error(gradients[1], gradients[0]) <= 1e-12

    def test_dropout_that_a_trainer_adds_later(self, tiny_qwen3):
        model = share_prefixes(tiny_qwen3())
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.5)).train()
        with pytest.raises(UserError, match=r"dropout p=0\.5 at"):
            adapted(**BATCH)
        share_prefixes(adapted, allow_dropout=["lora_dropout"])(**BATCH)
        assert sharing_report(adapted).num_shared == 1

    def test_noise_that_a_trainer_adds_later(self, tiny_qwen3):
        model = share_prefixes(tiny_qwen3().train())
        model.get_input_embeddings().neftune_noise_alpha = 5.0
        with pytest.raises(UserError, match="NEFTune"):
            model(**BATCH)

    @pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"])
    def test_virtual_tokens(self, tiny_qwen3, kind):
        """Refused if they are there; a call with them is left alone if they come later."""
        import peft

        config = getattr(peft, kind)(num_virtual_tokens=3, task_type="CAUSAL_LM")
        model = share_prefixes(tiny_qwen3().train())
        adapted = get_peft_model(model, config)
        own_loss(adapted).backward()
        report = sharing_report(model)
        assert report.num_shared == 0 and report.not_shared.total() == 1
        with pytest.raises(UserError, match="in front of every sequence"):
            share_prefixes(adapted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allow_dropout": "lora_dropout"}, "must be a list of names, got 'lora_dropout'"),
        ({"allow_dropout": None}, "must be a list of names, got None"),
        ({"min_ratio": True}, "min_ratio must be a number from 0 on, got True"),
        ({"min_ratio": "2"}, "min_ratio must be a number from 0 on, got '2'"),
        ({"min_ratio": float("nan")}, "min_ratio must be a number from 0 on, got nan"),
        ({"min_shared_tokens": True}, "min_shared_tokens must be 'auto' or a number from 1 on, got True"),
        ({"min_shared_tokens": 0}, "min_shared_tokens must be 'auto' or a number from 1 on, got 0"),
    ],
)
def test_options_that_cannot_be_meant(tiny_qwen3, options, message):
    with pytest.raises(UserError, match=message):
        share_prefixes(tiny_qwen3(), **options)


def test_a_name_in_place_of_a_model():
    with pytest.raises(TypeError, match="expected a model, got str: load it first"):
        share_prefixes("Qwen/Qwen3-0.6B")  # type: ignore[type-var]


class Wrapper(nn.Module):
    def __init__(self, *models: nn.Module):
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, **inputs: Any) -> Any:
        return self.models[0](**inputs)


class TestWrappers:
    def test_one_model_inside(self, tiny_qwen3):
        assert both(Wrapper(Wrapper(tiny_qwen3()), nn.Linear(2, 2)), own_loss).num_shared == 1

    @pytest.mark.parametrize("count", [0, 2])
    def test_none_or_several(self, tiny_qwen3, count):
        with pytest.raises(TypeError, match=f"Wrapper has {count}: "):
            share_prefixes(Wrapper(*(tiny_qwen3() for _ in range(count))))

    def test_no_module_of_hugging_face(self):
        with pytest.raises(TypeError, match="has 0: none"):
            sharing_report(nn.Linear(2, 2))

    def test_data_parallel_without_devices(self, tiny_qwen3):
        assert both(tiny_qwen3(), lambda model: nn.DataParallel(model)(**BATCH, labels=LABELS).loss).num_shared == 1


class TestWithPrepareModel:
    @pytest.mark.parametrize(
        "calls", ["share", "prepare share", "share prepare", "share share", "share prepare prepare"]
    )
    def test_both_kinds_of_batches(self, tiny_qwen3, calls):
        model = tiny_qwen3()
        with float64_throughout(model):
            expected = gradients_of(model, lambda: [own_loss(model)])
            for call in calls.split():
                {"share": share_prefixes, "prepare": prepare_model}[call](model)
            arms = [lambda: [own_loss(model)], lambda: [model(**RadixCollator()(FEATURES)).loss]]
            for found in [gradients_of(model, arm) for arm in arms]:
                assert found.loss == pytest.approx(expected.loss, rel=1e-12)
                for name, gradient in expected.tensors.items():
                    assert (found.tensors[name] - gradient).norm() <= 1e-12 * gradient.norm().clamp(min=1e-3), name
        assert sharing_report(model).num_shared == 1
        assert len(backbone_of(model)._forward_hooks) == 1

    def test_prepare_model_keeps_the_options(self, tiny_qwen3):
        model = prepare_model(share_prefixes(tiny_qwen3(), min_ratio=100.0))
        model(**BATCH)
        assert set(sharing_report(model).not_shared) == {"less than min_ratio = 100.0 to save"}

    def test_a_radix_batch_for_another_head(self):
        """Its labels are next tokens."""
        model = share_prefixes(tiny("Qwen3ForSequenceClassification", head_dim=8, num_key_value_heads=2))
        with pytest.raises(UserError, match="Qwen3ForSequenceClassification is not a causal language model"):
            model(**RadixCollator()(FEATURES))

    def test_a_report_of_a_model_that_is_only_prepared(self, tiny_qwen3):
        with pytest.raises(UserError, match=r"shares nothing: call share_prefixes\(model\) first"):
            sharing_report(prepare_model(tiny_qwen3()))

    @pytest.mark.parametrize("calls", ["share", "prepare share", "share prepare"])
    def test_restore(self, tiny_qwen3, calls):
        model, untouched = tiny_qwen3(), tiny_qwen3()
        for call in calls.split():
            {"share": share_prefixes, "prepare": prepare_model}[call](model)
        restore_model(model)
        assert model.config._attn_implementation == "sdpa"
        assert not [module for module in model.modules() if module._forward_hooks or module._forward_pre_hooks]
        assert torch.equal(model(**BATCH).logits, untouched(**BATCH).logits)
        with pytest.raises(UserError):
            sharing_report(model)

    def test_restore_a_wrapper(self, tiny_qwen3):
        wrapper = Wrapper(tiny_qwen3())
        restore_model(share_prefixes(wrapper))
        assert not backbone_of(wrapper.models[0])._forward_hooks


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy(tiny_qwen3, duplicate):
    """Shares as the model does, its head too, and counts by itself."""
    model = share_prefixes(tiny_qwen3())
    own_loss(model)
    twin = duplicate(model)
    torch.testing.assert_close(own_loss(twin), own_loss(model))
    reports = [sharing_report(each) for each in (model, twin)]
    assert reports[0] is not reports[1] and reports[0].num_shared == 2
    assert reports[1].num_head_rows == 10 * reports[1].num_shared > 0


class TestHeadsThatAreReplaced:
    def test_a_copy_by_peft(self, tiny_qwen3):
        """PEFT copies the head with our hooks on it; both sets run, and all of them can be removed."""
        model = share_prefixes(tiny_qwen3())
        adapters = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
        wrapped = get_peft_model(model, adapters)
        report = both(wrapped, own_loss)
        assert (report.num_shared, report.num_head_rows) == (1, 10)
        merged = wrapped.merge_and_unload().requires_grad_(True)
        both(copy.deepcopy(merged), own_loss)
        restore_model(merged)
        assert not any(each._forward_hooks or each._forward_pre_hooks for each in merged.modules())

    def test_a_resized_vocabulary(self, tiny_qwen3):
        model = share_prefixes(tiny_qwen3())
        model.resize_token_embeddings(model.config.vocab_size + 8)
        assert both(model, own_loss, lambda model: model).num_head_rows == 10 * 2  # the first arm was shared, too


class TestHooksOfTheUser:
    """They see what they see in an untouched model: `[B, L, D]`, whenever they were registered."""

    @pytest.mark.parametrize("first", [True, False])
    def test_after_the_backbone(self, tiny_qwen3, first):
        seen: list[tuple[int, ...]] = []

        def register(model: Any) -> Any:
            model.model.register_forward_hook(lambda *call: seen.append(tuple(call[-1].last_hidden_state.shape)))
            return model

        model = share_prefixes(register(tiny_qwen3())) if first else register(share_prefixes(tiny_qwen3()))
        model(**BATCH)
        assert seen == [(4, 6, 32)] and sharing_report(model).num_shared == 1

    @pytest.mark.parametrize("first", [True, False])
    @pytest.mark.parametrize("part", ["model", "lm_head"])
    def test_before(self, tiny_qwen3, first, part):
        seen: list[tuple[int, ...]] = []

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append(tuple((args[0] if args else kwargs["input_ids"]).shape[:2]))

        def register(model: Any) -> Any:
            getattr(model, part).register_forward_pre_hook(hook, with_kwargs=True)
            return model

        model = share_prefixes(register(tiny_qwen3())) if first else register(share_prefixes(tiny_qwen3()))
        model(**BATCH)
        is_after_ours = part == "model" and not first  # the head is hooked by the first call
        assert seen == [(1, 9) if is_after_ours else (4, 6)] and sharing_report(model).num_shared == 1

    def test_what_it_changes_counts(self, tiny_qwen3):
        def double(backbone: nn.Module, args: Any, output: Any) -> Any:
            output.last_hidden_state = output.last_hidden_state * torch.arange(1.0, 7.0)[:, None]
            return output

        model = tiny_qwen3()
        model.model.register_forward_hook(double)
        assert both(model, own_loss).num_head_rows == 0


class TestCallsInAnyOrder:
    def test_twice_before_the_backward_pass(self, tiny_qwen3):
        def loss_of(model: Any) -> Tensor:
            other = {name: value.flip(0)[:3] for name, value in BATCH.items()}
            return own_loss(model) - 0.3 * model(**other, labels=LABELS.flip(0)[:3]).loss

        assert both(tiny_qwen3(), loss_of).num_shared == 2

    def test_the_graph_is_kept(self, tiny_qwen3):
        model = share_prefixes(tiny_qwen3())
        loss = own_loss(model)
        first, second = (torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2))
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))

    @pytest.mark.parametrize("place", ["layer", "head", "after the head"])
    def test_after_an_error_in_the_middle(self, tiny_qwen3, place):
        model = share_prefixes(tiny_qwen3())
        expected = own_loss(model)
        module = model.model.layers[1] if place == "layer" else model.lm_head

        def fail(*_: Any) -> None:
            raise KeyboardInterrupt

        register = module.register_forward_hook if place == "after the head" else module.register_forward_pre_hook
        handle = register(fail)
        with pytest.raises(KeyboardInterrupt):
            own_loss(model)
        handle.remove()
        assert model.lm_head(torch.zeros(2, 3, 32)).shape == (2, 3, 50)
        assert torch.equal(own_loss(model), expected)

    def test_two_threads(self, tiny_qwen3):
        """Both between backbone and head at the same time."""
        model = tiny_qwen3().double().eval()
        batches = [BATCH, {"input_ids": IDS.roll(1, 0).clamp(min=11), "attention_mask": torch.ones_like(IDS)}]
        expected = [model(**batch).logits.detach() for batch in batches]
        share_prefixes(model)
        barrier = threading.Barrier(2, timeout=60)
        found: dict[int, Tensor] = {}

        def wait(*_: Any) -> None:
            barrier.wait()

        model.lm_head.register_forward_pre_hook(wait)

        def run(index: int) -> None:
            with torch.no_grad():
                found[index] = model(**batches[index], use_cache=False).logits

        threads = [threading.Thread(target=run, args=(index,)) for index in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sharing_report(model).num_shared == 2
        for index, batch in enumerate(batches):
            kept = batch["attention_mask"].bool()
            torch.testing.assert_close(found[index][kept], expected[index][kept])

    @pytest.mark.parametrize("frozen", [False, True], ids=["", "the embeddings are frozen"])
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_activation_checkpointing(self, tiny_qwen3, reentrant, frozen):
        model = tiny_qwen3(tie_word_embeddings=False).train()
        model.get_input_embeddings().requires_grad_(not frozen)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        assert both(model, own_loss).num_shared == 1

    def test_the_whole_model_in_a_checkpoint(self, tiny_qwen3):
        from torch.utils.checkpoint import checkpoint

        def loss_of(model: Any) -> Tensor:
            return checkpoint(own_loss, model, use_reentrant=False)

        assert both(tiny_qwen3(), loss_of).num_shared == 2

    def test_functional_call(self, tiny_qwen3):
        def loss_of(model: Any) -> Tensor:
            weights = dict(model.named_parameters())
            return torch.func.functional_call(model, weights, (), {**BATCH, "labels": LABELS}).loss

        assert both(tiny_qwen3(), loss_of).num_shared == 1


class TestLossesThatReadPadding:
    """What the untouched model computes there is not known, so they end in an error, or the gradient is the same."""

    MESSAGE = r"the loss reads \d+ places that attention_mask hides"

    @pytest.mark.parametrize(
        "loss_of",
        [
            lambda model: model(**BATCH, labels=IDS).loss,
            lambda model: model.model(**BATCH).last_hidden_state.square().mean(),
            lambda model: model(**BATCH, output_hidden_states=True).hidden_states[1].square().mean(),
            lambda model: model(**BATCH).logits.logsumexp(-1).square().mean(),
        ],
        ids=["labels", "size of the states", "size of a layer's states", "size of the logits"],
    )
    def test_error(self, tiny_qwen3, loss_of):
        model = share_prefixes(tiny_qwen3().train())
        with pytest.raises(UserError, match=self.MESSAGE):
            loss_of(model).backward()

    def test_directions_that_are_masked_afterwards(self, tiny_qwen3):
        """0 / 0 would be NaN, and NaN * 0 too."""

        def loss_of(model: Any) -> Tensor:
            hidden = model.model(**BATCH).last_hidden_state
            return (hidden / hidden.norm(dim=-1, keepdim=True) * MASK[..., None]).sum(1).sin().sum()

        assert both(tiny_qwen3().train(), loss_of).num_shared == 1

    def test_a_row_without_labels(self, tiny_qwen3):
        labels = LABELS.clone()
        labels[1] = -100
        assert both(tiny_qwen3(), lambda model: model(**BATCH, labels=labels).loss).num_shared == 1
