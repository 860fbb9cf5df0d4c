"""Write local stand-ins for the tiny models and data sets that third-party tests load from a hub.

    python recipes/compat/stand_ins.py build/trl build/stand_ins

`build/trl` is a clone of TRL, whose scripts hold the rows. A model has the class of the original, two layers of random
weights, a byte-level tokenizer of those rows, and the chat template that TRL keeps for its family. Models that see
images need torchvision. The folder is laid out as the cache of huggingface_hub; the data sets are next to it, where
`recording.py` finds them.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import DatasetDict
from tokenizers import processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, set_seed
from transformers.utils import is_torchvision_available

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import train_tokenizer

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
ORGANIZATION = "trl-internal-testing"
DATA = ("zen", "zen_image", "zen_multi_image", "toolcall", "harmony")
VOCABULARY = 1000
SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "initializer_range": 0.25}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}

# Tokens that begin, end and pad a sequence.
Marks = tuple[str | None, str, str | None]
CHATML: Marks = (None, "<|im_end|>", "<|endoftext|>")
COHERE: Marks = ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<PAD>")
DEEPSEEK: Marks = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
GEMMA: Marks = ("<bos>", "<eos>", "<pad>")
GLM: Marks = (None, "<|endoftext|>", "<|endoftext|>")
GPT_OSS: Marks = ("<|startoftext|>", "<|return|>", "<|endoftext|>")
LFM: Marks = ("<|startoftext|>", "<|im_end|>", "<|pad|>")
LLAMA: Marks = ("<|begin_of_text|>", "<|eot_id|>", None)
LLAVA: Marks = ("<s>", "</s>", "<pad>")
MISTRAL: Marks = ("<s>", "</s>", None)
NEMOTRON: Marks = ("<s>", "<|im_end|>", "<unk>")
NEOX: Marks = ("<|endoftext|>", "<|endoftext|>", None)
OLMO: Marks = (None, "<|endoftext|>", "<|pad|>")
PHI: Marks = ("<s>", "<|endoftext|>", "<|endoftext|>")

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEP = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 4, "qk_nope_head_dim": 4}
DEEP |= {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4}
HYBRID = {"mamba_num_heads": 8, "mamba_head_dim": 4, "mamba_n_groups": 1, "ssm_state_size": 16, **EXPERTS}
HYBRID |= {"n_routed_experts": 4, "moe_shared_expert_intermediate_size": 32}
HYBRID |= {"layers_block_type": ["mamba", "attention", "moe"]}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LINEAR |= {"layer_types": ["linear_attention", "full_attention"]}
PLAIN = (
    "{% for m in messages %}<|role|>{{ m.role }}\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|role|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Model:
    """A stand-in. template: a file of TRL's without its ending, or the text itself.

    processor: of a tokenizer makes the processor of a model that sees images.
    """

    model_type: str
    marks: Marks
    template: str | None
    settings: dict[str, Any] = field(default_factory=dict)
    processor: Callable[[Any], Any] | None = None


MODELS = {
    "Cohere2ForCausalLM": Model("cohere2", COHERE, "cohere2", {"logit_scale": 1.0}),
    "CohereForCausalLM": Model("cohere", COHERE, "cohere", {"logit_scale": 0.125}),
    "DeepseekV3ForCausalLM": Model("deepseek_v3", DEEPSEEK, "deepseekv3", DEEP),
    "DeepseekV3ForCausalLM-0528": Model("deepseek_v3", DEEPSEEK, "deepseekv3", DEEP),
    "GPTNeoXForCausalLM": Model("gpt_neox", NEOX, None),
    "Gemma2ForCausalLM": Model("gemma2", GEMMA, "gemma"),
    "GemmaForCausalLM": Model("gemma", GEMMA, "gemma"),
    "Glm4MoeForCausalLM": Model("glm4_moe", GLM, "glm4moe", EXPERTS | {"n_routed_experts": 4}),
    "GptOssForCausalLM": Model("gpt_oss", GPT_OSS, "gptoss", EXPERTS | {"num_local_experts": 4}),
    "Lfm2ForCausalLM": Model("lfm2", LFM, "lfm2", {"layer_types": ["conv", "full_attention"]}),
    "Lfm2ForCausalLM-2.5": Model("lfm2", LFM, "lfm2_2_5", {"layer_types": ["conv", "full_attention"]}),
    "LlamaForCausalLM-3": Model("llama", LLAMA, "llama3"),
    "LlamaForCausalLM-3.1": Model("llama", LLAMA, "llama3_1"),
    "LlamaForCausalLM-3.2": Model("llama", LLAMA, "llama3_2"),
    "LlamaForSequenceClassification-3.2": Model("llama", LLAMA, "llama3_2", {"num_labels": 1}),
    "MistralForCausalLM-0.1": Model("mistral", MISTRAL, PLAIN),
    "MistralForCausalLM-0.2": Model("mistral", MISTRAL, PLAIN),
    "NemotronHForCausalLM-nano": Model("nemotron_h", NEMOTRON, "nemotron_3_nano", HYBRID),
    "Olmo3ForCausalLM": Model("olmo3", OLMO, PLAIN),
    "Phi3ForCausalLM": Model("phi3", PHI, "phi3"),
    "Qwen2ForCausalLM-2.5": Model("qwen2", CHATML, "qwen2_5"),
    "Qwen2ForSequenceClassification-2.5": Model("qwen2", CHATML, "qwen2_5", {"num_labels": 1}),
    "Qwen3ForCausalLM": Model("qwen3", CHATML, "qwen3", {"head_dim": 8}),
    "Qwen3ForSequenceClassification": Model("qwen3", CHATML, "qwen3", {"head_dim": 8, "num_labels": 1}),
    "Qwen3MoeForCausalLM": Model("qwen3_moe", CHATML, "qwen3", EXPERTS | {"num_experts": 4, "head_dim": 8}),
}


def qwen_processor(tokenizer: Any, name: str, patch_size: int) -> Any:
    """The processor of this name, for images of two to nine tokens."""
    pixels = {"min_pixels": 2 * (2 * patch_size) ** 2, "max_pixels": 9 * (2 * patch_size) ** 2}
    images = transformers.Qwen2VLImageProcessor(patch_size=patch_size, **pixels)
    of_videos = transformers.Qwen3VLVideoProcessor if "3" in name else transformers.Qwen2VLVideoProcessor
    own = {"image_processor": images, "video_processor": of_videos(patch_size=patch_size)}
    return getattr(transformers, name)(tokenizer=tokenizer, chat_template=tokenizer.chat_template, **own)


def llava_processor(tokenizer: Any, name: str = "", **own: Any) -> Any:
    images = getattr(transformers, f"Llava{name}ImageProcessor")
    images = images(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, **own)
    places = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return getattr(transformers, f"Llava{name}Processor")(
        images, tokenizer, chat_template=tokenizer.chat_template, **places
    )


def gemma_processor(tokenizer: Any) -> Any:
    images = transformers.Gemma3ImageProcessor(size={"height": 56, "width": 56})
    return transformers.Gemma3Processor(images, tokenizer, image_seq_length=4, chat_template=tokenizer.chat_template)


def rotation(*sections: int, **own: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*sections], **own}}


GRID = {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]}
TOWER = SIZES | {"patch_size": 14}
CLIP = TOWER | {"model_type": "clip_vision_model", "image_size": 28}
SIGLIP = TOWER | {"model_type": "siglip_vision_model", "image_size": 56, "vision_use_head": False}
QWEN = {"hidden_size": 16, "intermediate_size": 32, "num_heads": 4, "depth": 2, "out_hidden_size": 16}
SHARED_EXPERT = EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 32}
HYBRID_TEXT = LINEAR | {"head_dim": 4} | rotation(1, 1, 0, mrope_interleaved=True, partial_rotary_factor=1.0)
WITH_IMAGES = {
    "Gemma3": Model(
        "gemma3",
        GEMMA,
        "gemma3",
        {"text_config": {"head_dim": 4}, "vision_config": SIGLIP, "mm_tokens_per_image": 4},
        gemma_processor,
    ),
    "Llava": Model(
        "llava", LLAVA, "llava_next", {"text_config": {"model_type": "llama"}, "vision_config": CLIP}, llava_processor
    ),
    "LlavaNext": Model(
        "llava_next",
        LLAVA,
        "llava_next",
        {"text_config": {"model_type": "mistral"}, "vision_config": CLIP, **GRID},
        partial(llava_processor, name="Next", **GRID),
    ),
    "Qwen2VL": Model(
        "qwen2_vl",
        CHATML,
        "qwen2_5_vl",
        {"text_config": rotation(1, 1, 0), "vision_config": QWEN | {"embed_dim": 16, "mlp_ratio": 2}},
        partial(qwen_processor, name="Qwen2VLProcessor", patch_size=14),
    ),
    "Qwen2_5_VL": Model(
        "qwen2_5_vl",
        CHATML,
        "qwen2_5_vl",
        {"text_config": rotation(1, 1, 0), "vision_config": QWEN | {"fullatt_block_indexes": [1]}},
        partial(qwen_processor, name="Qwen2_5_VLProcessor", patch_size=14),
    ),
    "Qwen3VL": Model(
        "qwen3_vl",
        CHATML,
        "qwen3_vl",
        {
            "text_config": rotation(1, 1, 0) | {"head_dim": 4},
            "vision_config": QWEN | {"deepstack_visual_indexes": [1]},
        },
        partial(qwen_processor, name="Qwen3VLProcessor", patch_size=16),
    ),
    "Qwen3_5-NoThink": Model(
        "qwen3_5",
        CHATML,
        "qwen3_5_nothink",
        {"text_config": HYBRID_TEXT, "vision_config": QWEN},
        partial(qwen_processor, name="Qwen3VLProcessor", patch_size=16),
    ),
    "Qwen3_5Moe-3.6": Model(
        "qwen3_5_moe",
        CHATML,
        "qwen3_6",
        {"text_config": HYBRID_TEXT | SHARED_EXPERT, "vision_config": QWEN},
        partial(qwen_processor, name="Qwen3VLProcessor", patch_size=16),
    ),
}
# What a family calls its tokens of images, and the names that its configuration and its tokenizer have for them.
IMAGE_TOKENS = {
    "qwen": {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
    },
    "llava": {"image_token": "<image>"},
    "gemma": {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trl", type=Path, help="a clone of TRL")
    parser.add_argument("folder", type=Path, help="where to write")
    options = parser.parse_args()
    set_seed(0)
    texts = sorted(set(write_rows(options.trl, options.folder / "datasets")))
    named = {f"{ORGANIZATION}/tiny-{name}": model for name, model in MODELS.items()}
    if is_torchvision_available():
        for name, model in WITH_IMAGES.items():
            family, _, version = name.partition("-")
            named[f"{ORGANIZATION}/tiny-{family}ForConditionalGeneration{version and '-'}{version}"] = model
    for name, model in named.items():
        write_model(name, model, texts, options.folder)


def write_rows(clone: Path, folder: Path) -> Iterable[str]:
    """Save the data sets that TRL's scripts would push to the hub; yields their texts."""
    sys.path.insert(0, str(clone / "scripts"))
    saved: list[DatasetDict] = []

    def save(rows: DatasetDict, repo_id: str, config_name: str) -> None:
        rows.save_to_disk(folder / repo_id / config_name)
        saved.append(rows)

    DatasetDict.push_to_hub = save  # type: ignore[method-assign,assignment]
    for name in DATA:
        repo_id = f"{ORGANIZATION}/{name.replace('_', '-')}"
        import_module(f"generate_{name}_dataset").main(test_size=0.1, push_to_hub=True, repo_id=repo_id)
    for rows in saved:
        for part in rows.values():
            text_only = [name for name in part.column_names if not name.startswith("image")]
            yield from texts_in(part.select_columns(text_only).to_list())


def texts_in(value: Any) -> Iterable[str]:
    """Every string inside of lists and dictionaries."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from texts_in(each)


def write_model(name: str, model: Model, texts: list[str], folder: Path) -> None:
    """Save the model of this name with its tokenizer or its processor, as huggingface_hub's cache has it."""
    cache = folder / "hub" / f"models--{name.replace('/', '--')}"
    named = next((own for family, own in IMAGE_TOKENS.items() if model.model_type.startswith(family)), {})
    named = named if model.processor else {}
    tokenizer = tokenizer_of(model, texts, named)
    own = {f"{mark}_token_id": getattr(tokenizer, f"{mark}_token_id") for mark in ("bos", "eos", "pad")}
    text = SIZES | own | {"vocab_size": len(tokenizer)}
    settings = text | model.settings
    if model.processor:
        settings = model.settings | {"text_config": text | model.settings["text_config"]}
        for token, written in named.items():
            settings |= dict.fromkeys((f"{token}_id", f"{token}_index"), tokenizer.convert_tokens_to_ids(written))
    set_seed(0)
    found = re.search(r"[A-Z]\w*For[A-Z][A-Za-z]+", name)
    kind = getattr(transformers, found[0])._from_config if found else AutoModelForCausalLM.from_config
    made = kind(AutoConfig.for_model(model.model_type, **settings))
    for part in (made.to(torch.bfloat16), model.processor(tokenizer) if model.processor else tokenizer):
        part.save_pretrained(cache / "snapshots" / "0")
    (cache / "refs").mkdir(exist_ok=True)
    (cache / "refs" / "main").write_text("0")


def tokenizer_of(model: Model, texts: list[str], named: dict[str, str]) -> PreTrainedTokenizerFast:
    """A tokenizer of these texts, with a token for each mark that the chat template writes.

    named: tokens of images by their names.
    """
    template = TEMPLATES / f"{model.template}.jinja"
    text = template.read_text() if template.exists() else model.template
    found = re.findall(r"<[|｜/]?[A-Za-z_▁|｜]+[|｜]?>", text or "")
    special = dict.fromkeys([*filter(None, model.marks), *named.values(), *found])
    backend = train_tokenizer(texts, VOCABULARY, special_tokens=list(special)).backend_tokenizer
    bos, eos, pad = model.marks
    if bos and bos != eos:
        start = (bos, backend.token_to_id(bos))
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[start])
    marks = {"bos_token": bos, "eos_token": eos, "pad_token": pad, "extra_special_tokens": named}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=text, **marks)


if __name__ == "__main__":
    main()
