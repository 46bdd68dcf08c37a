"""An inference worker that follows a trainer: between two batches it installs new weights, if there are any.

    python worker.py --ticket policy.ticket

It ends when the trainer ends the topic.
"""

import argparse
import time

import torch

import tensor_relay


class Policy(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ticket", default="policy.ticket", help="the ticket, or a file that holds it")
    parser.add_argument("--batches", type=int, help="how many batches to work on at most")
    args = parser.parse_args()

    model = Policy().to(torch.bfloat16).requires_grad_(False)
    model(torch.randn(16, 64, dtype=torch.bfloat16))  # The first batch takes longest: PyTorch prepares its kernels.
    version, batches = 0, 0
    with tensor_relay.connect(args.ticket) as client:
        # A version is received in separate memory. `next` copies it to the model once it is complete.
        weights = client.subscribe(out=model.state_dict())
        while args.batches is None or batches < args.batches:
            begun = time.monotonic()
            try:
                # Waits for the first weights. Later weights are installed only if they have arrived: a bounded pause.
                snapshot = weights.next(timeout=0 if version else None)
            except tensor_relay.TopicEndedError as ended:
                print(ended, flush=True)
                break
            except tensor_relay.RelayTimeoutError:
                pass
            else:
                version = snapshot.version
                pause_ms = (time.monotonic() - begun) * 1e3
                step = snapshot.metadata["step"]
                print(f"version {version} of step {step}, {snapshot.skipped} skipped, pause {pause_ms:.1f} ms", flush=True)
            model(torch.randn(16, 64, dtype=torch.bfloat16))
            batches += 1
    print(f"{batches} batches, the last with version {version}", flush=True)


if __name__ == "__main__":
    main()
