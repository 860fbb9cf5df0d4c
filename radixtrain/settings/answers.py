"""The section `evaluate_generation`."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from radixtrain.errors import UserError
from radixtrain.settings.section import TINY, Limits, Section

Count = Annotated[int, Limits(1)]


@dataclass
class AnswerSettings(Section):
    """Answers that a model generates and a metric judges: the settings of `EvaluateGeneration`.

    metric: what judges the answers after each validation: exact_match, contains, regex, or a function of yours by its
        path, `module.function`; null generates nothing.
    pattern: for the metric regex: an answer is right if the first group, or the whole match, is that of the target.
    num_samples: rows to answer, drawn once; null answers all.
    max_new_tokens: most tokens of an answer. `predict` with `model.generate: true` reads this key and those below.
    do_sample: draw tokens, with the same seed each time; false takes the most likely one.
    temperature: of the draws; null is the model's own.
    generation_kwargs: more of Hugging Face's `GenerationConfig`, such as `{top_p: 0.9, stop_strings: ["###"]}`.
    batch_size: prompts at once; null leaves it to radixtrain, and is 32 with `dedup: false`.
    """

    SECTION: ClassVar[str] = "evaluate_generation"

    metric: str | None = None
    pattern: str | None = None
    num_samples: Count | None = None
    max_new_tokens: Count = 256
    do_sample: bool = False
    temperature: Annotated[float | None, Limits(TINY, words="above 0")] = None
    generation_kwargs: dict[str, Any] | None = None
    batch_size: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.metric is None and self.pattern is not None:
            raise UserError("evaluate_generation.pattern needs evaluate_generation.metric: regex")
