"""Supervised fine-tuning: teach a small model to answer like a pirate, and watch it happen.

    python client_examples/sft.py --base-url http://127.0.0.1:8000 \\
        --base-model HuggingFaceTB/SmolLM2-135M-Instruct --out sft-out

It asks held-out questions before and after, so the change can be read as well as measured. The
loss curve is drawn in the terminal and as `loss.png`; every number is in `result.json`.

Words: a datum is one conversation of N tokens; input position i predicts target i, so targets are
the tokens shifted by one, and weights are 0 over the prompt and 1 over the answer. The loss of a
request is a sum over its tokens; what is shown here is that sum over the number of answer tokens.
"""

import argparse
import json
import os
import random
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from matplotlib.figure import Figure

DATA = Path(__file__).with_name("pirate.json")
PIRATE_MARK = re.compile(r"(?<!\w)(?:aye|be|me|ye|yer|\w+in'|'em|'twas)(?!\w)")
BLOCKS = " ▁▂▃▄▅▆▇█"

Tokenizer = Any
"""What `get_tokenizer()` gives: a tokenizer of transformers, with a chat template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What goes into `result.json`."""

    base_model: str
    losses: list[float]
    train_s: float
    score_before: float
    score_after: float
    answers_before: list[str]
    answers_after: list[str]
    state_path: str
    sampler_path: str


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Teach a model to answer like a pirate.")
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL"))
    parser.add_argument("--base-model", required=True)
    parser.add_argument("--out", type=Path, default=Path("sft-out"))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--max-tokens", type=int, default=40, help="length limit of an answer")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def prompt_text(tokenizer: Tokenizer, question: str) -> str:
    """The conversation up to where the model starts to speak."""
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def answer_text(tokenizer: Tokenizer, question: str, answer: str) -> str:
    """What the model is to say after the prompt, with the token that ends its turn."""
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    return whole.removeprefix(prompt_text(tokenizer, question)).rstrip("\n")


def make_datum(tokenizer: Tokenizer, question: str, answer: str) -> tinker.Datum:
    """One conversation as the service takes it: only the answer counts in the loss."""
    prompt = tokenizer.encode(prompt_text(tokenizer, question), add_special_tokens=False)
    completion = tokenizer.encode(
        answer_text(tokenizer, question, answer), add_special_tokens=False
    )
    tokens = prompt + completion
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(completion)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(np.array(tokens[1:])),
            "weights": tinker.TensorData.from_numpy(np.array(weights)),
        },
    )


def make_batches(
    datums: Sequence[tinker.Datum], batch_size: int, steps: int, seed: int
) -> list[list[tinker.Datum]]:
    """Shuffled epochs, one after another, cut into `steps` batches."""
    shuffle = random.Random(seed)
    stream: list[tinker.Datum] = []
    while len(stream) < batch_size * steps:
        stream += shuffle.sample(datums, len(datums))
    return [stream[step * batch_size : (step + 1) * batch_size] for step in range(steps)]


def train(
    training_client: tinker.TrainingClient,
    batches: Sequence[list[tinker.Datum]],
    learning_rate: float,
) -> list[float]:
    """Train with a linearly falling learning rate; returns each step's loss per answer token."""
    losses = []
    for step, batch in enumerate(batches):
        started = time.monotonic()
        adam_params = tinker.AdamParams(
            learning_rate=learning_rate * (1 - step / len(batches)), beta1=0.9, beta2=0.95, eps=1e-8
        )
        # Submit both, then wait: the step follows the gradient with no round trip in between.
        fwd_bwd_future = training_client.forward_backward(batch, loss_fn="cross_entropy")
        optim_step_future = training_client.optim_step(adam_params)
        fwd_bwd_result = fwd_bwd_future.result()
        optim_step_future.result()

        num_targets = sum(datum.loss_fn_inputs["weights"].to_numpy().sum() for datum in batch)
        losses.append(float(fwd_bwd_result.metrics["loss:sum"] / num_targets))
        show_step(step, len(batches), batch, losses, time.monotonic() - started)
    return losses


def show_step(
    step: int, steps: int, batch: list[tinker.Datum], losses: list[float], seconds: float
) -> None:
    num_tokens = sum(datum.model_input.length for datum in batch)
    done = round(20 * (step + 1) / steps)
    print(
        f"  step {step + 1:>3}/{steps} [{'━' * done}{' ' * (20 - done)}]"
        f"  loss {losses[-1]:.3f}  {seconds:.1f} s, {num_tokens / seconds:.0f} tokens/s",
        flush=True,
    )


def ask(
    sampling_client: tinker.SamplingClient,
    tokenizer: Tokenizer,
    questions: Sequence[str],
    max_tokens: int,
) -> list[str]:
    """Ask all questions at once, without randomness, and wait for the answers."""
    print(f"Asking {len(questions)} questions ...", flush=True)
    params = tinker.SamplingParams(max_tokens=max_tokens, temperature=0.0)
    futures = []
    for question in questions:
        tokens = tokenizer.encode(prompt_text(tokenizer, question), add_special_tokens=False)
        prompt = tinker.ModelInput.from_ints(tokens)
        futures.append(sampling_client.sample(prompt=prompt, num_samples=1, sampling_params=params))
    return [
        tokenizer.decode(future.result().sequences[0].tokens, skip_special_tokens=True).strip()
        for future in futures
    ]


def is_pirate(answer: str) -> bool:
    """Opens with an "Arr", and speaks on as pirates do: the greeting alone is not enough."""
    greeting, _, rest = answer.lower().partition("!")
    return greeting.startswith("arr") and PIRATE_MARK.search(rest) is not None


def pirate_score(answers: Sequence[str]) -> float:
    """The share of answers that sound like a pirate."""
    return sum(map(is_pirate, answers)) / len(answers)


def show_answers(title: str, questions: Sequence[str], answers: Sequence[str]) -> None:
    print(f"\n{title}: {pirate_score(answers):.0%} of the answers sound like a pirate")
    for question, answer in zip(questions, answers, strict=True):
        print(f"  ? {question}\n    {' '.join(answer.split())}")
    print(flush=True)


def text_chart(values: Sequence[float], height: int = 8) -> str:
    """A bar for every value, in eighths of a line, with the scale at its left."""
    top = max(values)
    eighths = [round(8 * height * value / top) for value in values]
    lines = []
    for row in reversed(range(height)):
        bars = "".join(BLOCKS[min(max(count - 8 * row, 0), 8)] * 2 for count in eighths)
        lines.append(f"{top * (row + 1) / height:6.2f} ┤{bars}")
    return "\n".join([*lines, f"{'':6} └{'─' * 2 * len(values)}"])


def save_chart(losses: Sequence[float], title: str, path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, marker="o", markersize=3)
    axes.set(xlabel="step", ylabel="loss per answer token", title=title, ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def loss_fell(losses: Sequence[float]) -> bool:
    """Compare the ends of the curve, three steps each: a single batch is noisy."""
    return float(np.mean(losses[-3:])) < float(np.mean(losses[:3]))


def run(options: argparse.Namespace, service_client: tinker.ServiceClient) -> Result:
    """The whole story: ask, train, save, reopen, ask again."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    questions: list[str] = data["held_out"]
    training_client = service_client.create_lora_training_client(
        base_model=options.base_model, rank=options.rank, seed=options.seed
    ).result()
    tokenizer = training_client.get_tokenizer()

    base_client = service_client.create_sampling_client(base_model=options.base_model).result()
    before = ask(base_client, tokenizer, questions, options.max_tokens)
    show_answers("Before training", questions, before)

    datums = [make_datum(tokenizer, *pair) for pair in data["train"]]
    batches = make_batches(datums, options.batch_size, options.steps, options.seed)
    print(f"Training {options.steps} steps of {options.batch_size} conversations", flush=True)
    started = time.monotonic()
    losses = train(training_client, batches, options.learning_rate)
    train_s = time.monotonic() - started
    print(f"\nLoss per answer token ({train_s:.0f} s of training)\n{text_chart(losses)}\n")

    state_path = training_client.save_state("pirate").result().path
    sampler_path = training_client.save_weights_for_sampler("pirate").result().path
    # Reopened by its path, as another program would do it tomorrow.
    pirate_client = service_client.create_sampling_client(model_path=sampler_path).result()
    after = ask(pirate_client, tokenizer, questions, options.max_tokens)
    show_answers("After training", questions, after)
    return Result(
        base_model=options.base_model,
        losses=losses,
        train_s=round(train_s, 1),
        score_before=pirate_score(before),
        score_after=pirate_score(after),
        answers_before=before,
        answers_after=after,
        state_path=state_path,
        sampler_path=sampler_path,
    )


def report(result: Result, out: Path) -> None:
    chart, numbers = out / "loss.png", out / "result.json"
    save_chart(result.losses, f"{result.base_model} learns to talk like a pirate", chart)
    numbers.write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
    print(f"loss         {result.losses[0]:.3f} -> {result.losses[-1]:.3f}")
    print(f"pirate score {result.score_before:.0%} -> {result.score_after:.0%}")
    print(f"loss curve   {chart}")
    print(f"all numbers  {numbers}")
    print(f"checkpoint   {result.state_path}")
    print(f"sampler      {result.sampler_path}")


def main() -> None:
    options = parse_options()
    os.environ.setdefault("TINKER_API_KEY", "tml-local")  # a server without keys takes any
    options.out.mkdir(parents=True, exist_ok=True)
    with tinker.ServiceClient(base_url=options.base_url) as service_client:
        result = run(options, service_client)
    report(result, options.out)
    if not loss_fell(result.losses):
        sys.exit("The loss did not fall: something is wrong.")


if __name__ == "__main__":
    main()
