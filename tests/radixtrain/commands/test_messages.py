"""jsonargparse's messages, as it writes them, and ours."""

import pytest

from radixtrain.commands.messages import usage_message

LITERAL = "Expected a typing.Literal['raise', 'drop', 'truncate']. Got value: "
UNION = (
    "Does not validate against any of the Union subtypes\nSubtypes: [typing.Literal[64, 32, 16], "
    "typing.Literal['bf16-true', 'bf16-mixed'], <class 'NoneType'>]\nErrors:\n- Expected a typing.Literal['x']\n"
    "Given value type: <class 'str'>\nGiven value: "
)
INTEGER = (
    "Does not validate against any of the Union subtypes\nSubtypes: [<class 'int'>, <class 'NoneType'>]\nErrors:\n"
    "- Expected a <class 'int'>\n- Expected a <class 'NoneType'>\nGiven value type: <class 'float'>\nGiven value: "
)
UNIONS = (
    "Does not validate against any of the Union subtypes\n  Subtypes: [<class 'x.Y'>, list[str]]\n  Errors:\n"
    "    - Expected a <class 'x.Y'>. Got value: 3\n  Given value type: <class 'list'>"
)
LISTED = (
    "Does not validate against any of the Union subtypes\n  Subtypes: [list[a.B], <class 'a.B'>]\n  Errors:\n"
    "    - Expected a dot import path string: {0}\n  Given value type: <class 'list'>\n"
    "  Given value: [{{'class_path': '{0}'}}]"
)
NO_CLASS = "Errors:\n- Expected a dot import path string: {0}\nGiven value type: <class 'str'>\nGiven value: {0}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "unrecognized arguments: --model.learning_rte=1",
            "no key model.learning_rte, did you mean model.learning_rate?",
        ),
        ("unrecognized arguments: --output-dir runs/x", "no key output-dir, did you mean output_dir?"),
        ("unrecognized arguments: --learning_rate 1e-4", "no key learning_rate, did you mean model.learning_rate?"),
        ("unrecognized arguments: --max_epoch 2", "no key max_epoch, did you mean trainer.max_epochs?"),
        ("unrecognized arguments: --zzz=1", "no key zzz (`radixtrain fit --help` lists the keys)"),
        (
            "unrecognized arguments: --dta.batch_size=1 --model.dtyp=2",
            "no key dta.batch_size, did you mean data.batch_size?; no key model.dtyp, did you mean model.dtype?",
        ),
        ("unrecognized arguments: stray", "stray is no key: write --key value, and --config FILE for a YAML file"),
        (
            "Subcommand 'fit' does not accept option 'data.max_token'",
            "no key data.max_token, did you mean data.max_tokens?",
        ),
        (
            f'Parser key "data.excess_length_strategy": {LITERAL}dropp',
            "data.excess_length_strategy must be one of raise, drop, truncate; got dropp, did you mean drop?",
        ),
        (
            f'Parser key "trainer.precision": {UNION}bf16mixed',
            "trainer.precision must be one of bf16-true, bf16-mixed; got bf16mixed, did you mean bf16-mixed?",
        ),
        (
            f'Parser key "trainer.logger": {NO_CLASS.format("tensorbord")}',
            "trainer.logger: no 'tensorbord', did you mean tensorboard?",
        ),
        (
            f'Parser key "trainer.callbacks": {NO_CLASS.format("EarlyStoping")}',
            "trainer.callbacks: no 'EarlyStoping', did you mean EarlyStopping?",
        ),
        (
            "Parser key \"model.learning_rate\": Expected a <class 'float'>. Got value: abc",
            "model.learning_rate must be a number; got abc",
        ),
        (f'Parser key "save_every_steps": {INTEGER}0.5', "save_every_steps must be an integer or null; got 0.5"),
        (f'Parser key "save_every_steps": {INTEGER}', "save_every_steps must be an integer or null; got an empty text"),
        (
            "Parser key \"trainer.x\": Expected a <class 'lightning.Trainer'>. Got value: 1",
            "Parser key \"trainer.x\": Expected a <class 'lightning.Trainer'>. Got value: 1",
        ),
        ("argument --save_best: expected one argument", "save_best needs a value: --save_best VALUE"),
        ("Parser key \"config\": File does not exist: '/a/no.yaml'", "--config: no such file: /a/no.yaml"),
        ("Parser key \"config\": Path is not a file: '/a/folder'", "--config: not a file: /a/folder"),
        ("argument -c/--config: expected one argument", "config needs a value: --config VALUE"),
        (
            'Key "model.model_name_or_path" not found in namespace.',
            "model is a section: expected keys with their values",
        ),
        ("Option 'savebest' is not accepted", "no key savebest, did you mean save_best?"),
        (
            "Group 'fit' does not accept option 'model.learning_rate'",
            "a configuration file has no section fit: write what is in it, model.learning_rate, at the top level",
        ),
        (
            "Unexpected config: \n",
            "--config: expected keys with their values, such as `output_dir: runs/a`; got an empty file",
        ),
        (
            "Unexpected config: model:\n\n",
            "--config: expected keys with their values, such as `output_dir: runs/a`; got model:",
        ),
        (
            'Problems parsing config: found character that cannot start any token\n  in "<unicode string>", line 2',
            "--config: the file is not YAML: found character that cannot start any token, in line 2",
        ),
        (
            "Parser key \"data\":\nUnable to load config 'tiny.jsonl'\n  - did not find expected <document start>",
            "data is a section: expected keys with their values; got tiny.jsonl",
        ),
        (
            f'Parser key "trainer.callbacks": {LISTED.format("EarlyStoping")}',
            "trainer.callbacks: no 'EarlyStoping', did you mean EarlyStopping?",
        ),
        (
            f'Parser key "trainer.logger": {LISTED.format("CSVLoger")}',
            "trainer.logger: no 'CSVLoger', did you mean CSVLogger?",
        ),
        (
            f"Parser key \"trainer.logger\": {UNIONS}\nGiven value: NestedArg(key='foo', val='1')",
            "no key foo in trainer.logger, which is no section (`radixtrain fit --help trainer.logger` says more)",
        ),
        (
            'Parser key "trainer.callbacks": Does not validate against any of the Union subtypes\n  Errors:\n'
            "    - Problem with given class_path 'a.EarlyStopping':\n the following arguments are required: monitor\n"
            "    - Expected a",
            "trainer.callbacks: EarlyStopping needs monitor, under its init_args",
        ),
        (
            f"Parser key \"model.lora_target_modules\": {UNIONS}\nGiven value: ['q_proj', 3]",
            "model.lora_target_modules must be list of text or text; got ['q_proj', 3] (`radixtrain fit --help "
            "model.lora_target_modules` says more)",
        ),
        (
            f'Parser key "trainer.plugins": {UNIONS}\nGiven value: {"x" * 99}',
            f"trainer.plugins: no such value; got {'x' * 80} ... (`radixtrain fit --help trainer.plugins` says more)",
        ),
        ("something\nelse", "something else"),
    ],
)
def test_a_message(text, expected):
    assert usage_message(text, "fit") == expected


def test_a_class_that_is_not_imported():
    message = usage_message("Importing 'evil.Callback' is not allowed", "fit")
    assert message.startswith("class_path 'evil.Callback' is not imported: a configuration may name only classes of")


def test_a_command_without_a_trainer():
    assert (
        usage_message("unrecognized arguments: --outputdir=1", "export") == "no key outputdir, did you mean output_dir?"
    )


def test_a_missing_model_and_a_word_that_is_not_true_or_false() -> None:
    missing = """Parser key "model.model_name_or_path": Expected a <class 'str'>. Got value: None"""
    assert usage_message(missing, "fit").startswith("model.model_name_or_path is missing: write --model.model_name")
    maybe = """Parser key "data.split_turns": Expected a <class 'bool'>. Got value: maybe"""
    assert usage_message(maybe, "fit") == "data.split_turns must be true or false; got maybe"


def test_a_word_inside_of_a_value() -> None:
    text = (
        'Parser key "models": Does not validate against any of the Union subtypes\nErrors:\n  - Problem with given '
        "class_path 'radixtrain.bench.cells.ModelShape':\n    Parser key \"family\": Expected a "
        "typing.Literal['qwen3', 'qwen3_5']. Got value: qwen35\n  - Expected a <class 'list'>\n"
        "Given value type: <class 'dict'>\nGiven value: {'family': 'qwen35'}"
    )
    unknown = text[: text.index('Parser key "family')] + "Option 'num_layers' is not accepted"
    no_key = "no key num_layers in models (`radixtrain bench --help models` lists the keys)"
    assert usage_message(unknown, "bench") == no_key
    expected = "models.family must be one of qwen3, qwen3_5; got qwen35, did you mean qwen3_5?"
    assert usage_message(text, "bench") == expected


def test_a_key_of_the_same_section_is_not_near_for_that() -> None:
    assert usage_message("unrecognized arguments: --data.zzz 1", "fit").endswith(
        "(`radixtrain fit --help` lists the keys)"
    )
