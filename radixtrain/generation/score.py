"""`score_completions`: the log-probabilities of given answers, by forward passes of the shared model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from radixtrain.collators.steps import StepCollator
from radixtrain.collators.token_row import IGNORE_INDEX
from radixtrain.errors import TRAIN_WITHOUT_SHARING, UserError
from radixtrain.hf.backbone import model_inside, parts_of
from radixtrain.hf.guards.batch import check_length
from radixtrain.hf.guards.draws import evaluating
from radixtrain.hf.guards.rules import WITHOUT
from radixtrain.hf.head import has_plain_head
from radixtrain.hf.predicting_rows import check_around, forward_rows, labelled_logprobs
from radixtrain.hf.share import shared_to_score

MAX_TOKENS = 16_384  # unique tokens of a pass, as long as it is more than one completion


def score_completions(
    model: nn.Module, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[Sequence[int]]]
) -> list[list[list[float]]]:
    """Score completions by their log-probabilities, for multiple choice and reranking. Each prompt is computed once.

    model: as `share_prefixes` takes it, shared or not, with a head that predicts next tokens. It runs in evaluation
        mode and without gradients, and is left as it was.
    prompts: lists of token ids.
    completions: of each prompt, a list of its completions, which are lists of token ids.

    Returns, for each completion of each prompt, the log-probability of each token given those before it, in nats.
    Raises UserError for an empty prompt, for a model that cannot use a batch of a `RadixCollator`, for hooks on it, or
    on a module around it, that are not `position_wise`, for the learned prompts of PEFT, and for more tokens than it
    has positions for. Raises ValueError for ids that a `RadixCollator` refuses, and torch's IndexError for larger ones
    than it has embeddings for.

    >>> [scores] = score_completions(model, [[7, 8]], [[[9], [5, 6]]])
    >>> best = max(scores, key=lambda logprobs: sum(logprobs) / len(logprobs))
    >>> [len(logprobs) for logprobs in scores]
    [1, 2]
    """
    if len(prompts) != len(completions):
        raise UserError(f"completions: {len(completions)} lists for {len(prompts)} prompts; give one for each")
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise UserError(f"prompt {number} is empty, so nothing predicts the first token of its completions")
    features = [
        {"input_ids": [*prompt, *completion], "labels": [IGNORE_INDEX] * len(prompt) + [*completion]}
        for prompt, of_prompt in zip(prompts, completions, strict=True)
        for completion in of_prompt
    ]
    scores = iter(_logprobs(model, features) if features else [])
    return [[next(scores) for _ in of_prompt] for of_prompt in completions]


def _logprobs(model: nn.Module, features: Sequence[dict[str, list[int]]]) -> list[list[float]]:
    """Return the log-probability of each label of each feature."""
    step = StepCollator(max_tokens=MAX_TOKENS, merge_labels=False)(features)
    found: list[list[float]] = [[] for _ in features]
    parts = parts_of(model_inside(model))
    try:
        check_around(model, parts)
        with evaluating(parts.base), shared_to_score(parts), torch.no_grad():
            check_length(parts, max(len(feature["input_ids"]) for feature in features))
            plain_head = has_plain_head(parts.base)
            device = next(parts.backbone.parameters()).device
            for batch, members in zip(step.to(device).micro_batches, step.members, strict=True):
                logprobs = forward_rows(parts.base, batch, plain_head).logprobs()
                for sequence, _, logprob in labelled_logprobs(batch, logprobs):
                    found[members[sequence]].append(logprob)
    except UserError as error:
        raise UserError(str(error).replace(TRAIN_WITHOUT_SHARING, WITHOUT["score_completions"])) from None
    return found
