"""Generation on a radix cache: answers to prompts that share their beginnings.

    options   prompts
         \\    /
        generate ---- engine ---- passes         what a forward pass computes, and which stored rows it sees
                       |    \\
            sampling, stopping  cache, slots     a radix tree over token ids, whose nodes own slots
                                store            keys and values, a row a slot
"""
