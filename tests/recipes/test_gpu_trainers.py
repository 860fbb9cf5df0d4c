"""Arms of trainers on a GPU: the ordinary one does not take the time, and every other one takes as many steps."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from gpu_parts.run import Run
from gpu_parts.trainers import OTHER_ORDER, WARM_UP, compare
from transformers import TrainerControl

CPU = torch.device("cpu")


class Trained:
    """A trainer whose steps take so many seconds, and whose losses are 1 and so much more."""

    def __init__(self, seconds: float = 0.0, more: float = 0.0) -> None:
        self.seconds, self.more, self.callbacks = seconds, more, list[Any]()
        self.state = SimpleNamespace(log_history=[])

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def remove_callback(self, _: Any) -> None: ...

    def train(self) -> None:
        control = TrainerControl()
        for _ in range(30):
            self.callbacks[0].on_step_begin(None, self.state, control)
            time.sleep(self.seconds)
            self.callbacks[0].on_step_end(None, self.state, control)
            self.state.log_history.append({"loss": 1 + self.more, "grad_norm": 1.0})
            if control.should_training_stop:
                return


def found(seconds: float, **arms: Callable[[], Any]) -> dict[str, dict[str, Any]]:
    """Measures of each arm, by its name."""
    run = Run(device=CPU, seconds=1000.0)
    compare(run, "who", 100, {name.replace("_", " "): make for name, make in arms.items()}, seconds)
    return {case.removeprefix("who, "): measures for _, case, measures in run.results}


def test_the_ordinary_arm_stops_at_its_share_and_the_others_take_as_many_steps() -> None:
    slow, fast = (lambda: Trained(0.01)), (lambda: Trained(0.001, 0.5))
    measures = found(0.1, padded=slow, ours=fast, other_order=lambda: Trained(0.001, 0.25), last=fast)
    assert len({each["steps"] for each in measures.values()}) == 1 and WARM_UP < measures["padded"]["steps"] < 10
    assert measures["ours"]["speed_up"] > 1
    assert {name: each.get("over_noise") for name, each in measures.items()} == {
        **{"padded": None, OTHER_ORDER: None},
        **{"ours": 2.0, "last": 2.0},
    }, "also of the arm that was trained before the noise was known"


def test_with_time_every_step_is_taken() -> None:
    assert {name: each["steps"] for name, each in found(60.0, padded=Trained, ours=Trained).items()} == {
        "padded": 30,
        "ours": 30,
    }


def test_an_ordinary_arm_that_fails_leaves_nothing_to_compare_with() -> None:
    def failed() -> Any:
        raise torch.OutOfMemoryError("60 GiB")

    measures = found(60.0, padded=failed, ours=Trained, other_order=Trained)
    assert list(measures) == ["ours", "other order"]
    assert not {"speed_up", "loss_off_by", "over_noise"} & {name for each in measures.values() for name in each}


def test_without_time_the_warm_up_is_trained() -> None:
    assert {each["steps"] for each in found(0.0, padded=Trained, ours=Trained).values()} == {WARM_UP + 1}
