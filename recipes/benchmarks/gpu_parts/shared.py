"""What a user calls in a loop of their own: `share_prefixes`, and `radixtrain.generate`, beside the model as it is."""

import statistics
from collections.abc import Callable

import torch
from gpu_parts.batches import Case
from gpu_parts.run import Run
from gpu_parts.steps import built

import radixtrain
from radixtrain.timing import peak_bytes, seconds_of

__all__ = ["generation", "shared"]

TURNS = 3


def shared(run: Run, case: Case) -> None:
    """A step on a padded batch, with the model's own head and loss."""
    features = case.batch.features(case.shape)
    batch = {
        name: torch.stack([torch.from_numpy(feature[name]) for feature in features]).to(run.device)
        for name in ("input_ids", "labels")
    }
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    seconds = []
    for name, share in (("as it is", lambda model: model), ("share_prefixes", radixtrain.share_prefixes)):
        if not run.has_time(f"shared {name}"):
            return
        model = share(built(case, run.device))

        def step(model: torch.nn.Module = model) -> float:
            model.zero_grad(set_to_none=True)
            loss = model(**batch, use_cache=False).loss
            loss.backward()
            return float(loss.detach())

        peak, loss = peak_bytes(step, run.device) / 1e9, step()
        seconds.append(statistics.median(seconds_of(step, run.device) for _ in range(TURNS)))
        measures = {"seconds": seconds[-1], "speed_up": seconds[0] / seconds[-1], "peak_gigabytes": peak, "loss": loss}
        run.found("shared", f"{case}, {name}", **measures)
        del model, step


def generation(run: Run, case: Case, num_tokens: int) -> None:
    """Greedy answers of so many tokens, all prompts at once."""
    model = built(case, run.device).eval()
    prompts = [feature["input_ids"].tolist() for feature in case.batch.features(case.shape)]
    padded = torch.tensor(prompts, device=run.device)
    options = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    arms: dict[str, Callable[[], object]] = {
        "model.generate": lambda: model.generate(padded, attention_mask=torch.ones_like(padded), **options),
        "radixtrain.generate": lambda: radixtrain.generate(model, prompts, **options),
    }
    seconds = []
    for name, generate in arms.items():
        if not run.has_time(f"generate {name}"):
            return
        peak = peak_bytes(generate, run.device)
        seconds.append(seconds_of(generate, run.device))
        measures = {"seconds": seconds[-1], "peak_gigabytes": peak / 1e9, "speed_up": seconds[0] / seconds[-1]}
        run.found("generate", f"{case}, {num_tokens} new, {name}", **measures)
