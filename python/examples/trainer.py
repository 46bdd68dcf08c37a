"""A trainer that publishes its weights after every step, and never runs too far ahead of its workers.

    python trainer.py --ticket-file policy.ticket --steps 100

Put your own model into `Policy` (worker.py has the same one) and your own step into `train`.
"""

import argparse
import os
import time

import torch

import tensor_relay


class Policy(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    inputs = torch.randn(32, 64)
    loss = (model(inputs) - inputs[:, :8]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def write_ticket(path: str, ticket: str) -> None:
    """Writes the ticket's file atomically and readable by this user only, so that no process reads a partial ticket."""
    descriptor = os.open(f"{path}.part", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(ticket + "\n")
    os.replace(f"{path}.part", path)


def wait_for_workers(version: tensor_relay.Publication, workers: int, pause: float) -> None:
    """Waits until the workers have the version, for `pause` seconds at most: a dead worker must not stop training."""
    try:
        version.wait_committed(workers, timeout=pause)
    except tensor_relay.RelayTimeoutError as late:
        print(f"continuing: {late}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listen", default="0.0.0.0:4747")
    parser.add_argument("--ticket-file", default="policy.ticket")
    parser.add_argument("--state-dir", help="where the server's key is kept")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--workers", type=int, default=1, help="how many workers must have a version before the next")
    parser.add_argument("--pause", type=float, default=5.0, help="how many seconds to wait for them at most")
    args = parser.parse_args()

    model = Policy()
    optimizer = torch.optim.Adam(model.parameters())
    with tensor_relay.serve(args.listen, state_dir=args.state_dir) as relay:
        write_ticket(args.ticket_file, relay.ticket_for("policy"))
        version = None
        for step in range(1, args.steps + 1):
            loss = train(model, optimizer)
            begun = time.monotonic()
            if version is not None:
                wait_for_workers(version, args.workers, args.pause)
            # `publish` copies the weights before it returns, so the next step may change them. bf16 halves the bytes.
            version = relay.publish("policy", model.state_dict(), dtype="bf16", metadata={"step": step})
            pause_ms = (time.monotonic() - begun) * 1e3
            print(f"step {step}: version {version.version}, loss {loss:.4f}, pause {pause_ms:.1f} ms", flush=True)
        if version is not None:
            wait_for_workers(version, args.workers, args.pause)
        relay.end("policy")


if __name__ == "__main__":
    main()
