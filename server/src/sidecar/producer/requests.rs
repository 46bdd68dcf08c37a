//! [`PendingRequests`] of a producer, and their answers.

use super::PublishError;
use std::{collections::HashMap, path::PathBuf, sync::Arc};
use tensor_relay_device::Lock;
use tensor_relay_protocol::{
    Epoch, Version,
    sidecar::{Progress, PublicationId, ServerMessage},
};
use tokio::sync::{oneshot, watch};

/// The requests of a producer until they are answered, and for published versions until they are released.
#[derive(Debug)]
pub(super) struct PendingRequests {
    /// These requests by id.
    pub(super) waiting: Lock<HashMap<PublicationId, Waiting>>,
    pub(super) lost: watch::Sender<Option<Arc<str>>>,
    pub(super) path: PathBuf,
}

#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) answered: Option<oneshot::Sender<Answer>>,
    pub(super) progress: watch::Sender<Progress>,
}

/// The number of a published version; `None` if a topic was ended.
pub(super) type Answer = Result<Option<(Epoch, Version)>, PublishError>;

impl PendingRequests {
    pub(super) fn handle(&self, message: ServerMessage) {
        match message {
            ServerMessage::Published { publication, epoch, version } => {
                self.answer(publication, Ok(Some((epoch, version))), true);
            }
            ServerMessage::Refused { publication, reason, text } => {
                let refused = PublishError::Refused { reason, text: text.to_string() };
                self.answer(publication, Err(refused), false);
            }
            ServerMessage::Ended { request } => self.answer(request, Ok(None), false),
            ServerMessage::Progress(progress) => {
                let mut waiting = self.waiting.lock();
                if let Some(request) = waiting.get(&progress.publication) {
                    request.progress.send_replace(progress);
                }
                let is_answered = |request: &Waiting| request.answered.is_none();
                if progress.is_released && waiting.get(&progress.publication).is_some_and(is_answered) {
                    waiting.remove(&progress.publication);
                }
            }
            _ => {}
        }
    }

    /// Delivers an answer to the waiting task, if there is one. After a published version's answer, its progress
    /// `continues`.
    fn answer(&self, publication_id: PublicationId, answer: Answer, continues: bool) {
        let mut waiting = self.waiting.lock();
        if let Some(answered) = waiting.get_mut(&publication_id).and_then(|request| request.answered.take()) {
            let _ = answered.send(answer); // The task may have been cancelled.
        }
        let is_over = |request: &Waiting| !continues || request.progress.borrow().is_released;
        if waiting.get(&publication_id).is_some_and(is_over) {
            waiting.remove(&publication_id);
        }
    }

    /// Fails all pending requests when the connection ended.
    pub(super) fn end(&self, why: impl FnOnce() -> String) {
        self.lost.send_if_modified(|lost| {
            let is_first = lost.is_none();
            if is_first {
                *lost = Some(why().into());
            }
            is_first
        });
        // Cleared after `lost` is set, which later callers check.
        for (_, request) in self.waiting.lock().drain() {
            drop(request.answered);
        }
    }
}
