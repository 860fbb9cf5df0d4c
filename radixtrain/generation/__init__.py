"""Generation on a radix cache: answers to prompts that share their beginnings.

    generate, score           the public calls, and what comes back
        prompts, options      what the user gave, as token ids and settings
    scheduler                 the loop: prompts come in, every sequence gets a token, finished ones leave
        sampling, stopping    the next token of every sequence, and whether it is the last
    prefill                   computes what the cache does not hold of some prompts
        passes                a request; what a forward pass computes, and which stored rows it sees
    cache                     a radix tree over token ids, whose nodes own slots
        store                 keys and values, a row a slot, and which slots are free
        fingerprint           whether the weights have changed since the rows were computed

Words, as they are used in this folder:

    slot    a row of the store: keys and values of one token, under the same number in every layer
    kept    tokens whose slots belong to the cache, because several sequences read them, or a later call may
    tail    the end of a prompt, after its kept tokens
    lane    a private run of slots of one running sequence, for its tail and for what it generates
    run     consecutive tokens, slots or rows
    pass    a forward pass of the model: of some prompts (prefill), or of one token of every sequence (decoding)
    piece   one attention call: some of the queries over keys that all of them see
"""
