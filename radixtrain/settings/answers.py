"""The section `evaluate_generation`."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from radixtrain.errors import UserError
from radixtrain.settings.section import FINITE, TINY, Limits, Section

Count = Annotated[int, Limits(1)]


@dataclass
class AnswerSettings(Section):
    """Answers that a model generates and a metric judges: the settings of `EvaluateGeneration`."""

    SECTION: ClassVar[str] = "evaluate_generation"

    metric: Annotated[
        str | None,
        "what judges the answers after each validation: exact_match, contains, regex, or a function of yours by its "
        "path, `module.function`; null generates nothing.",
    ] = None
    pattern: Annotated[
        str | None,
        "for the metric regex: an answer is right if the first group, or the whole match, is that of the target.",
    ] = None
    num_samples: Annotated[Count | None, "rows to answer, drawn once; null answers all."] = None
    max_new_tokens: Annotated[
        Count, "most tokens of an answer. `predict` with `model.generate: true` reads this key and those below."
    ] = 256
    do_sample: Annotated[bool, "draw tokens, with the same seed each time; false takes the most likely one."] = False
    temperature: Annotated[float | None, Limits(TINY, FINITE, "above 0"), "of the draws; null is the model's own."] = (
        None
    )
    generation_kwargs: Annotated[
        dict[str, Any] | None,
        'more of Hugging Face\'s `GenerationConfig`, such as `{top_p: 0.9, stop_strings: ["###"]}`.',
    ] = None
    batch_size: Annotated[
        Count | None, "prompts at once; null leaves it to radixtrain, and is 32 with `dedup: false`."
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.metric is None and self.pattern is not None:
            raise UserError("evaluate_generation.pattern needs evaluate_generation.metric: regex")
