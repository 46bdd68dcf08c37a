"""The exception classes: one for each error to which a program may react differently.

Every error of tensor_relay's own work is a `TensorRelayError`. An argument of a wrong type or a malformed number may
raise Python's own `TypeError`, `ValueError` or `OverflowError`. Where Python has a class for the failure
(`ConnectionError`, `TimeoutError`, `ValueError`, …), the error is an instance of that class, too. The messages are the
same as on the command line: what happened, which end caused it, what to do.
"""

from __future__ import annotations


class TensorRelayError(Exception):
    """The base class of all errors. Raised itself for failures without a class of their own, such as a port in use."""


class RelayConnectionError(TensorRelayError, ConnectionError):
    """The server cannot be used. The message says why."""


class ServerUnreachableError(RelayConnectionError):
    """No server answers, or a lost connection was not restored within `reconnect_timeout`. Retrying later may help."""


class ServerRefusedError(RelayConnectionError):
    """The server's key is not the key in the ticket, or the server refuses this client. A new ticket may help."""


class DamagedError(RelayConnectionError):
    """The received data is damaged, or not in tensor-relay's format. It was discarded: no tensor holds such bytes."""


class RelayTimeoutError(TensorRelayError, TimeoutError):
    """The call did not finish within its timeout. Nothing is lost: the call may be repeated."""


class TopicNotFoundError(RelayTimeoutError):
    """Within the client's `topic_timeout` no such topic appeared, or the server aborted its first version and sent no
    other."""


class VersionNotFoundError(TensorRelayError, LookupError):
    """The version with this number or epoch is not retained any more. No other version was received in its place."""


class HoldingTooManyError(TensorRelayError):
    """A version is available, but the program holds `versions_held_max` snapshots and dropped none within
    `hold_timeout`, or within the call's own `timeout` if that is shorter. Drop some, and call again.

    This is no `TimeoutError`: a program that polls and ignores timeouts would never notice that it holds too many.
    """

    held: list[int]
    """The versions that are held, in the order of their receipt. A tensor made from a version holds it, too."""


class TopicEndedError(TensorRelayError):
    """The topic has ended: no further version will come. Iteration stops instead of raising this error."""


class VersionsMissedError(TensorRelayError):
    """In mode `every`: versions are missing before the next one, or another reader took this one's place.

    After missing versions, the next call continues the subscription. After the loss of its place, the subscription has
    ended.
    """

    missing: int | None = None
    """How many versions are missing; None if that is unknown because the publisher was restarted."""


class NoRoomError(TensorRelayError, MemoryError):
    """A version does not fit into the memory configured for it. The message names both sizes."""


class TicketError(TensorRelayError, ValueError):
    """The text is not a valid ticket."""


class RequestError(TensorRelayError, ValueError):
    """A name, pattern or address is invalid, an option is out of its range, or `select` matches no tensor."""


class UnsupportedTensorError(TensorRelayError, TypeError):
    """A value cannot be published, or a tensor cannot be converted as requested. The message names it and a remedy."""


class PublishError(TensorRelayError):
    """The version cannot be published. No part of it was published."""


class TargetError(TensorRelayError, ValueError):
    """The tensors of `out` do not match those of the version, or overlap in memory. None of them was written to.

    A version that does not match is skipped: the next call continues with the next version.
    """


class TornError(TensorRelayError):
    """With `atomic=False`: receiving failed or was ended, and the tensors of `out` may hold unverified bytes of an
    incomplete version, until a call returns one. Nothing writes to them after the call. With `atomic=True`: a GPU or its
    framework failed while a verified version was copied into them. With a module as `out`: it has the version's tensors,
    and not all of its extra state.
    From `Client.stream`: it failed after the first tensor, so the tensors that it returned are an incomplete version.

    Fill the tensors again before using them. `__cause__` is the reason.
    """

    version: int
    """The version of which the tensors may hold some bytes."""


class IntegrationError(TensorRelayError, ImportError):
    """The package that an integration is for is not installed, or its version is not supported."""


class ForkError(TensorRelayError, RuntimeError):
    """This process was forked from one that uses tensor_relay, and threads do not survive a fork."""


class ClosedError(TensorRelayError, RuntimeError):
    """The object was closed before or during the call."""
