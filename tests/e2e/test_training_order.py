"""What the order, the repetition and the loss of training requests do to the numbers: nothing."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import tinker
from tinker import types

from tests.e2e.client import (
    DATA,
    Raw,
    adam,
    assert_same,
    fingerprint,
    new_run,
    output_logprobs,
    refused,
    same,
    sft,
    step,
    text,
    train,
    wait,
)
from tests.running_server import RunningServer


def test_pipelined_steps_equal_awaited_steps(service: tinker.ServiceClient) -> None:
    """public-reports A1: an optim_step never overtakes a forward_backward."""
    pipelined, awaited = new_run(service), new_run(service)
    train(pipelined, 4)
    for _ in range(4):
        wait(awaited.forward_backward(DATA, "cross_entropy"))
        wait(awaited.optim_step(adam()))
    assert_same(fingerprint(pipelined), fingerprint(awaited), 1e-5)


def test_a_forward_sent_right_after_a_step_sees_its_weights(service: tinker.ServiceClient) -> None:
    """from-users 7"""
    run = new_run(service)
    futures = []
    for _ in range(3):
        wait(run.forward_backward(DATA, "cross_entropy"))
        stepped = run.optim_step(adam())
        futures.append(run.forward(DATA, "cross_entropy"))
        wait(stepped)
    seen = [output_logprobs(wait(future)).sum() for future in futures]
    assert seen == sorted(seen)
    assert seen[0] < seen[1] < seen[2]


@pytest.mark.parametrize("times", [1, 2, 5])
def test_a_step_sent_several_times_is_one_step(raw: Raw, times: int) -> None:
    """from-users 19, public-reports A2"""
    run, once = raw.run(), raw.run()
    for one, repeats in ((run, times), (once, 1)):
        raw.outcome(raw.forward_backward(one, 1))
        ids = {raw.optim_step(one, 2) for _ in range(repeats)}
        assert len(ids) == 1
        metrics = raw.outcome(ids.pop()).json()["metrics"]
        assert metrics["step"] == 1
    assert_same(raw.logprobs(run, 3), raw.logprobs(once, 3), 0)


def test_a_batch_sent_several_times_is_one_gradient(raw: Raw) -> None:
    """public-reports A2"""
    often, once = raw.run(), raw.run()
    assert len({raw.forward_backward(often, 1) for _ in range(5)}) == 1
    raw.forward_backward(once, 1)
    steps = [raw.outcome(raw.optim_step(run, 2)).json()["metrics"] for run in (often, once)]
    assert steps[0] == steps[1]


def test_the_result_of_a_repeated_request_can_be_had_by_both(raw: Raw) -> None:
    """issue 2 item 11: both copies get the result, as often as they ask."""
    run = raw.run()
    request = raw.forward_backward(run, 1)
    first = raw.outcome(request)
    assert raw.forward_backward(run, 1) == request
    assert raw.outcome(request).content == first.content


def test_chunks_that_arrive_last_first_run_in_their_order(raw: Raw) -> None:
    """Protocol 6.2: with parallel chunks the lowest number comes after all others."""
    mixed, ordered = raw.run(), raw.run()
    chunks = {seq: [sft(text(seq))] for seq in (1, 2, 3, 4)}
    for run, order in ((mixed, (1, 3, 4, 2)), (ordered, (1, 2, 3, 4))):
        requests = {seq: raw.forward_backward(run, seq, chunks[seq]) for seq in order}
        requests[5] = raw.optim_step(run, 5)
        assert raw.outcome(requests[5]).json()["metrics"]["num_gradients"] == 4
    assert_same(raw.logprobs(mixed, 6), raw.logprobs(ordered, 6), 1e-5)


def test_a_step_waits_for_the_batch_before_it(raw: Raw) -> None:
    """The step (seq 2) arrives a second before its batch (seq 1)."""
    run, ordered = raw.run(), raw.run()
    stepped = raw.optim_step(run, 2)
    time.sleep(1)
    raw.forward_backward(run, 1)
    assert raw.outcome(stepped).json()["metrics"]["num_gradients"] == 1
    raw.forward_backward(ordered, 1)
    raw.outcome(raw.optim_step(ordered, 2))
    assert_same(raw.logprobs(run, 3), raw.logprobs(ordered, 3), 1e-5)


def test_a_number_that_never_comes_is_not_waited_for_for_ever(raw: Raw) -> None:
    """Protocol 6.3: the client goes on with the next number."""
    run = raw.run()
    raw.outcome(raw.forward_backward(run, 1))
    started = time.monotonic()
    stepped = raw.outcome(raw.optim_step(run, 3))
    assert stepped.json()["metrics"]["num_gradients"] == 1
    assert time.monotonic() - started < 15
    raw.outcome(raw.forward_backward(run, 4))
    assert raw.outcome(raw.optim_step(run, 5)).json()["metrics"]["step"] == 2


def test_a_refused_number_is_not_waited_for(raw: Raw) -> None:
    """public-reports A7"""
    run = raw.run()
    bad = {"model_id": run, "seq_id": 1, "adam_params": {"learning_rate": -1.0}}
    assert raw.post("optim_step", bad).status_code == 400
    started = time.monotonic()
    raw.outcome(raw.forward_backward(run, 2))
    assert time.monotonic() - started < 2.5  # the wait for a gap is 3 s


def test_a_batch_above_the_chunk_limit_is_one_batch(service: tinker.ServiceClient) -> None:
    """public-reports B28: the SDK cuts 1,025 datums in two."""
    whole, halves = new_run(service), new_run(service)
    data = [sft(text(seed, 3)) for seed in range(1025)]
    output = wait(whole.forward_backward(data, "cross_entropy"))
    for part in (data[:500], data[500:]):
        wait(halves.forward_backward(part, "cross_entropy"))
    for run in (whole, halves):
        wait(run.optim_step(adam(1e-3)))
    assert len(output.loss_fn_outputs) == 1025
    total = sum(output_logprobs(output, i).sum() for i in range(1025))
    assert output.metrics["loss:sum"] == pytest.approx(-total, rel=1e-4)
    assert_same(fingerprint(whole), fingerprint(halves))


def test_an_unknown_loss_does_not_spoil_what_follows(service: tinker.ServiceClient) -> None:
    """from-users 11, public-reports A7: at once, and on the same client."""
    run, spared = new_run(service), new_run(service)
    started = time.monotonic()
    with refused("no_such_loss", "cross_entropy"):
        wait(run.forward_backward(DATA, "no_such_loss"))  # type: ignore[arg-type]
    step(run)
    assert time.monotonic() - started < 2.5
    step(spared)
    assert_same(fingerprint(run), fingerprint(spared), 1e-5)


def test_gradients_wait_while_another_run_steps(service: tinker.ServiceClient) -> None:
    """public-reports C35: a swap to another adapter drops nothing."""
    first, alone, other = new_run(service), new_run(service), new_run(service, seed=7, rank=16)
    wait(first.forward_backward(DATA, "cross_entropy"))
    train(other, 3, [sft(text(5))])
    wait(first.optim_step(adam()))
    step(alone)
    assert_same(fingerprint(first), fingerprint(alone), 1e-5)


def test_large_uploads_neither_overtake_each_other_nor_starve_heartbeats(
    service: tinker.ServiceClient, server: RunningServer, raw: Raw
) -> None:
    """public-reports A6, in small: 24 requests of 3 MB, unawaited."""
    run = new_run(service)
    slowest = _slowest_heartbeat(raw)
    futures = [run.forward_backward([_soft_targets(seed)], "cross_entropy") for seed in range(24)]
    orders = [run.optim_step(adam(1e-3)) for _ in range(2)]
    for future in futures:
        wait(future)
    first, second = [wait(order).metrics for order in orders]
    assert first["num_gradients"] == 24
    assert second["num_gradients"] == 0
    assert slowest() < 1.0


def _soft_targets(seed: int) -> types.Datum:
    """256 positions with 1,000 weighted targets each: 3 MB."""
    rng = np.random.default_rng(seed)
    shape = (256, 1000)
    return types.Datum(
        model_input=types.ModelInput.from_ints(text(seed, 256)),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(rng.integers(0, 256, shape)),
            "weights": types.TensorData.from_numpy(np.full(shape, 1e-3, np.float32)),
        },
    )


def _slowest_heartbeat(raw: Raw):
    """Beat in a thread from now on; the function given back stops it and says the slowest."""
    session, over, latencies = raw.session(), threading.Event(), [0.0]

    def beat() -> None:
        while not over.wait(0.05):
            started = time.monotonic()
            raw.post("session_heartbeat", {"session_id": session})
            latencies.append(time.monotonic() - started)

    thread = threading.Thread(target=beat)
    thread.start()

    def stop() -> float:
        over.set()
        thread.join()
        return max(latencies)

    return stop


def test_a_fresh_run_steps_the_same_beside_a_long_trained_one(
    service: tinker.ServiceClient,
) -> None:
    """public-reports D45: no moment of another adapter reaches it."""
    before = new_run(service, seed=3)
    step(before)
    old = new_run(service, seed=4)
    train(old, 10)
    after = new_run(service, seed=3)
    step(after)
    assert_same(fingerprint(after), fingerprint(before), 1e-5)
    assert not same(fingerprint(after), fingerprint(old))
