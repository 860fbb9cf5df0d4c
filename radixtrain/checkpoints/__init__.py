"""Checkpoints that can be trusted: written whole or not at all, checked before they are read, and free of code.

    folder                    write_checkpoint, read_checkpoint, verify_checkpoint, read_run
        tensors               a file of tensors, written one tensor at a time; checksums; what a rank holds of a tensor
        atomic                a folder or a file replaces another one in one step
    resolve                   newest_valid, the meaning of `--ckpt_path`, how many are kept, the links `last` and `best`

A checkpoint is a folder, `checkpoints/step=N` of a run:

    model.safetensors         the weights, under the names of the module's `state_dict`
    optimizer.safetensors     the optimizer's moments, such as `model.lm_head.weight.exp_avg`
    run.json                  everything else: see `folder.SCHEMA`
    checksums.txt             of the three, as `xxh128sum` writes and checks them; its last file, and the commit

Words, as they are used in this folder:

    whole      of a checkpoint: every byte is the one that was written
    damaged    not whole, for whatever reason
    sequence   of a checkpoint: 1 for the first one written into its folder, then 2; says which is the newest, since
               a run that went back to an earlier step writes that step again
    staging    the hidden folder beside its target in which a checkpoint is written
"""
