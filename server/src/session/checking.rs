//! The answer to an origin's `Check`: whether a member with this session listens here (PROTOCOL.md §3.15).

use super::error::SessionError;
use crate::shared::Shared;
use std::time::Duration;
use tensor_relay_protocol::{ClientMessage, CloseCode, ServerMessage};
use tensor_relay_transport::{Lane, control};

/// A `Check`, the first message of an origin.
#[derive(Debug)]
pub(super) struct Check {
    pub(super) session: u64,
    pub(super) nonce: [u8; 32],
}

/// Answers a check, and waits for a bounded time until the origin closes the lane. It counts as a login.
///
/// # Errors
/// [`SessionError::NotHere`] when no member has the session, [`SessionError`] when the origin sends another message.
pub(super) async fn answer(
    Check { session, nonce }: Check,
    lane: &Lane,
    (sender, receiver): (&control::Sender<ServerMessage>, &mut control::Receiver<ClientMessage>),
    timeout: Duration,
    shared: &Shared,
) -> Result<(), SessionError> {
    let proof = shared.forwarding.proof(session, &nonce).ok_or(SessionError::NotHere)?;
    sender.send(ServerMessage::Checked { proof }).await?;
    sender.flush().await;
    match tokio::time::timeout(timeout, receiver.next()).await {
        Ok(Ok(_)) => Err(SessionError::AfterCheck),
        Ok(Err(_)) | Err(_) => {
            lane.close(CloseCode::Done, "");
            Ok(())
        }
    }
}
