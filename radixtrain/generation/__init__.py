"""Generation by transformers' own loops, on prompts that are computed and stored once.

generate          `model.generate` on the cache below
    prefill       what a radix cache does not hold of some prompts, computed on their unique tokens
    prompt_cache  the cache of one call, a `Cache` of transformers: shared prompts, and each row's own tokens
score             log-probabilities of given completions
cache             a radix tree over token ids, which knows no model
    key_values    what is stored in it: keys and values
    fingerprint   whether the weights have changed since these were computed
"""
