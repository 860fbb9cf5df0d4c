"""Commands beside Lightning's verbs, one file each."""
