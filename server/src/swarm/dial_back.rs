//! Dialling back: whether a client's port for peers is its own, before anybody is told of it (PROTOCOL.md §3.15).

use std::time::Duration;
use tensor_relay_protocol::{
    ClientMessage, CloseCode, LaneGrant, PeerAddress, PeerSecret, ServerMessage, Transport,
};
use tensor_relay_transport::{
    ConnectError, Connector, Fingerprint, LaneError, LaneKind,
    control::{self, ControlError},
};

/// The time for connecting and for the answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Whose port is to answer.
#[derive(Debug, Clone)]
pub(super) struct Claimed {
    /// The number of the client's session.
    pub(super) session: u64,
    /// The secret that this server shares with the session.
    pub(super) secret: PeerSecret,
    /// The SHA-256 of the public key that the client named.
    pub(super) key: [u8; 32],
}

/// Why a port is not named to peers.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unproven {
    #[error("cannot connect to it: {0}")]
    Connect(#[from] Box<ConnectError>),
    #[error("it did not answer within {} s", TIMEOUT.as_secs())]
    Silent,
    #[error("its connection failed: {0}")]
    Failed(#[from] ControlError),
    #[error("it answered something else: no member of this swarm listens there")]
    OtherAnswer,
    #[error("its proof is wrong: it belongs to another session")]
    WrongProof,
}

impl From<LaneError> for Unproven {
    fn from(error: LaneError) -> Self {
        Self::Failed(error.into())
    }
}

/// Asks the port at `address` for the proof that it belongs to the session that `claimed` it.
pub(super) async fn ask(
    connector: &Connector,
    address: PeerAddress,
    claimed: &Claimed,
) -> Result<(), Unproven> {
    let asked = tokio::time::timeout(TIMEOUT, question(connector, address, claimed)).await;
    asked.unwrap_or(Err(Unproven::Silent))
}

async fn question(connector: &Connector, address: PeerAddress, claimed: &Claimed) -> Result<(), Unproven> {
    let kind = match address.transport {
        Transport::Tcp => LaneKind::Tcp,
        _ => LaneKind::Quic,
    };
    let keys = [Fingerprint(claimed.key)];
    let lane = connector.connect_over(kind, address.address, &keys).await.map_err(Box::new)?;
    let answer = async {
        let (sender, mut receiver) = control::open(&lane, TIMEOUT).await?;
        let nonce = rand::random();
        sender.send(ClientMessage::Check { session: claimed.session, nonce }).await?;
        let ServerMessage::Checked { proof } = receiver.next().await? else {
            return Err(Unproven::OtherAnswer);
        };
        let expected = claimed.secret.proof(&nonce, &claimed.key);
        // Grants are compared in constant time.
        match LaneGrant::new(proof) == LaneGrant::new(expected) {
            true => Ok(()),
            false => Err(Unproven::WrongProof),
        }
    };
    let answered = answer.await;
    lane.close(CloseCode::Done, "");
    lane.flush_close().await;
    answered
}
