"""What can go wrong, by what a program can do about it.

Everything that tensor_relay raises about its own work is a `TensorRelayError`; an argument of another type, or a number that
is none of its kind, may be Python's own `TypeError`, `ValueError` or `OverflowError`. Where Python has a class for such a
failure (`ConnectionError`, `TimeoutError`, `ValueError`, …), the error is one of those, too. The messages are those of
the command line: what happened, who is to blame, what to do.
"""

from __future__ import annotations


class TensorRelayError(Exception):
    """Anything that went wrong in tensor_relay. As such: what none of the others is for, such as a port in use."""


class RelayConnectionError(TensorRelayError, ConnectionError):
    """The server cannot be used. Says why."""


class ServerUnreachableError(RelayConnectionError):
    """No server answers, or it is gone for longer than `reconnect_timeout`. Trying again later may help."""


class ServerRefusedError(RelayConnectionError):
    """The server has another key than the ticket says, or refuses this client. A fresh ticket may help."""


class DamagedError(RelayConnectionError):
    """What arrived is damaged, or not what tensor-relay sends. It was thrown away: no tensor has such bytes."""


class RelayTimeoutError(TensorRelayError, TimeoutError):
    """Something did not happen in time. Nothing is lost: the same call may be made again."""


class TopicNotFoundError(RelayTimeoutError):
    """No such topic appeared within the client's `topic_timeout`."""


class VersionNotFoundError(TensorRelayError, LookupError):
    """The version of this number, or of this epoch, is not kept any more. Nothing else was received in its place."""


class HoldingTooManyError(TensorRelayError):
    """A version is there, but as many snapshots are held as may be, and none was let go within `hold_timeout`, or within
    the call's own `timeout` if that is shorter. Drop some, and call again.

    It is no `TimeoutError`: a program that polls, and passes over these, would keep the old versions for ever.
    """

    held: list[int]
    """The versions that are held, in the order in which they were taken. Tensors made of them hold them, too."""


class TopicEndedError(TensorRelayError):
    """The topic has ended: nothing more will come. Iteration ends instead of raising this."""


class VersionsMissedError(TensorRelayError):
    """In mode `every`: versions are missing before the next one, or another reader took this one's place.

    After missing versions (`missing` is not unset) the subscription goes on with the next call.
    """

    missing: int | None = None
    """How many are missing; None where nobody can tell, since the publisher was started anew."""


class NoRoomError(TensorRelayError, MemoryError):
    """A version does not fit into the memory that it may take. Says the numbers."""


class TicketError(TensorRelayError, ValueError):
    """A text is no ticket."""


class RequestError(TensorRelayError, ValueError):
    """A name, a pattern or an address is none, an option is out of its range, or `select` matches no tensor of a version."""


class UnsupportedTensorError(TensorRelayError, TypeError):
    """A value cannot travel, or a tensor cannot become what was asked for. Says which, and what to do."""


class PublishError(TensorRelayError):
    """A version cannot be published. Nothing of it was."""


class TargetError(TensorRelayError, ValueError):
    """The tensors of `out` are not those of the version, or share their memory. Nothing was written to any of them.

    A version that does not fit is passed over: the next call goes on with the next one.
    """


class TornError(TensorRelayError):
    """With `atomic=False`: receiving failed, and the tensors of `out` hold bytes of it that nobody vouches for. Of
    `Client.stream`: it failed after the first tensor, so those that were given out are not all of a version.

    Fill them anew before they are used. Why it failed is the `__cause__`.
    """

    version: int
    """The version whose bytes they hold."""


class IntegrationError(TensorRelayError, ImportError):
    """The system that an integration is for is not installed, or in a version that the integration does not know."""


class ForkError(TensorRelayError, RuntimeError):
    """This process was forked from one that uses tensor_relay, and threads do not survive a fork."""


class ClosedError(TensorRelayError, RuntimeError):
    """It was closed before."""
