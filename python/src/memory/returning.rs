//! Returning memory of other libraries that was lent to an engine for one call.

use super::foreign::Foreign;
use pyo3::prelude::*;
use std::{
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    time::{Duration, Instant},
};
use tensor_relay_device::Lock;

/// Receives the tensors that were lent for one call, so that they are released before the call returns: then JAX may
/// donate them, and PyTorch may resize them. Without a receiver, the interpreter thread releases them a little later.
#[derive(Debug)]
pub(crate) struct Returning(Lock<Receiver<Foreign>>);

/// The time for the last tensor to return once all copies have ended: the engine releases a copy's memory right after
/// it reports the end. Tensors that return later are released by the interpreter thread.
const RETURN_TIMEOUT: Duration = Duration::from_secs(5);

impl Returning {
    /// A sender, which is cloned for each lent tensor, and its receiver.
    pub(crate) fn new() -> (ToReturn, Self) {
        let (sender, receiver) = mpsc::channel();
        (ToReturn(sender), Self(Lock::new(receiver)))
    }

    /// Releases all tensors. To be called when all copies have ended.
    pub(crate) fn give_back(self, py: Python<'_>) {
        let returned = py.detach(|| self.all());
        returned.into_iter().for_each(|tensor| tensor.give_back(py));
    }

    fn all(self) -> Vec<Foreign> {
        let receiver = self.0.into_inner();
        let (mut returned, until) = (vec![], Instant::now() + RETURN_TIMEOUT);
        loop {
            match receiver.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(tensor) => returned.push(tensor),
                Err(RecvTimeoutError::Disconnected) => return returned,
                Err(RecvTimeoutError::Timeout) => {
                    tracing::warn!(
                        "Tensors on a GPU are returned later: its engine still holds them after their copies."
                    );
                    return returned;
                }
            }
        }
    }
}

/// The sender to a [`Returning`].
#[derive(Debug, Clone)]
pub(crate) struct ToReturn(Sender<Foreign>);

impl ToReturn {
    /// `tensor`, which is sent to the receiver when it is dropped.
    pub(super) fn attach(self, tensor: Foreign) -> LentTensor {
        LentTensor { tensor: Some(tensor), to_return: self }
    }
}

/// A tensor that is sent to a [`Returning`] when it is dropped.
#[derive(Debug)]
pub(super) struct LentTensor {
    /// `None` only during `drop`.
    tensor: Option<Foreign>,
    to_return: ToReturn,
}

impl Drop for LentTensor {
    fn drop(&mut self) {
        // Without a receiver, `send` returns the tensor, which is dropped here.
        let _ = self.tensor.take().map(|tensor| self.to_return.0.send(tensor));
    }
}
