//! Returning memory of other libraries that was lent to an engine for one call.

use super::foreign::Foreign;
use pyo3::prelude::*;
use std::{
    sync::{
        Mutex, PoisonError,
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    time::{Duration, Instant},
};

/// Receives the tensors that were lent for one call, so that they are released before the call returns: then JAX may
/// donate them, and PyTorch may resize them. Without a receiver, each is released by an errand, a little later.
#[derive(Debug)]
pub(crate) struct Returning(Mutex<Receiver<Foreign>>);

/// The time for the last of them to return once all copies have ended: the engine releases a copy's memory
/// right after reporting its end. Late ones are released by an errand.
const LAST: Duration = Duration::from_secs(5);

impl Returning {
    /// And the way there, for each tensor that is lent.
    pub(crate) fn new() -> (ToReturn, Self) {
        let (sender, receiver) = mpsc::channel();
        (ToReturn(sender), Self(Mutex::new(receiver)))
    }

    /// Releases all of them. To be called when their user has finished with them.
    pub(crate) fn give_back(self, py: Python<'_>) {
        let returned = py.detach(|| self.all());
        returned.into_iter().for_each(|tensor| tensor.give_back(py));
    }

    fn all(self) -> Vec<Foreign> {
        let receiver = self.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        let (mut returned, until) = (vec![], Instant::now() + LAST);
        loop {
            match receiver.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(tensor) => returned.push(tensor),
                Err(RecvTimeoutError::Disconnected) => return returned,
                Err(RecvTimeoutError::Timeout) => {
                    tracing::warn!(
                        "Tensors on a GPU are given back later: it still holds them after their copies."
                    );
                    return returned;
                }
            }
        }
    }
}

/// The way to a [`Returning`].
#[derive(Debug, Clone)]
pub(crate) struct ToReturn(Sender<Foreign>);

impl ToReturn {
    /// `tensor`, which goes there when it is dropped.
    pub(super) fn bring(self, tensor: Foreign) -> LentTensor {
        LentTensor { tensor: Some(tensor), to: self }
    }
}

/// A tensor that is lent.
#[derive(Debug)]
pub(super) struct LentTensor {
    /// `None` only while it is dropped.
    tensor: Option<Foreign>,
    to: ToReturn,
}

impl Drop for LentTensor {
    fn drop(&mut self) {
        // Without a receiver it is handed back and dropped here.
        let _ = self.tensor.take().map(|tensor| self.to.0.send(tensor));
    }
}
