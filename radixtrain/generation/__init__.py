"""Generation by transformers' own loops, on prompts that are computed and stored once.

generate          `model.generate` on the cache below, and whether a model is the one that filled a radix cache
    prefill       what a radix cache does not hold of some prompts, computed on their unique tokens
    prompt_cache  the cache of one call, a `Cache` of transformers: shared prompts, and each row's own tokens
cache             a radix tree over token ids, which knows no model
score             log-probabilities of given answers, by forward passes of the shared model
"""
