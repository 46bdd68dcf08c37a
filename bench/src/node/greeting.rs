//! The authentication of a driver by a node: a challenge, an answer that proves knowledge of the token, and a verdict.

use super::token::Token;
use crate::wire::{self, GREETING_MAX_BYTES, LINE_MAX_BYTES, Lines, WireError};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::{Duration, timeout},
};

/// The revision of this protocol. Another revision is refused: both ends of a benchmark should be the same build.
const REVISION: u32 = 2;

/// The deadline of the complete greeting.
const GREETING_TIMEOUT: Duration = Duration::from_secs(10);

/// The node's first line.
#[derive(Debug, Serialize, Deserialize)]
struct Challenge {
    /// The node's [`REVISION`]. The field's name identifies the protocol.
    tensor_relay_bench_node: u32,
    challenge: String,
}

/// The driver's line.
#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    answer: String,
}

/// The node's second line.
#[derive(Debug, Serialize, Deserialize)]
enum Verdict {
    Welcome,
    Refused(String),
}

/// The error of a greeting. In its messages, `it` is the other end.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GreetingError {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error(
        "it did not complete the greeting within {} s: is `bench run` or `bench node` running there?",
        GREETING_TIMEOUT.as_secs()
    )]
    TimedOut,
    #[error("it closed the connection during the greeting")]
    Closed,
    #[error("it does not know this node's token")]
    WrongToken,
    #[error(
        "it uses revision {found} of the benchmark's protocol, and this build {REVISION}: run the same build on all hosts"
    )]
    Revision { found: u32 },
    #[error("it refused: {0:?}")]
    Refused(String),
}

/// The node's part: accepts a driver that knows `token`, and sends a refusal to a driver whose answer is wrong.
///
/// # Errors
/// [`GreetingError`], at the latest at the deadline.
pub(crate) async fn authenticate(
    reader: &mut (impl AsyncRead + Unpin),
    writer: &mut (impl AsyncWrite + Unpin),
    token: &Token,
) -> Result<(), GreetingError> {
    let outcome = timeout(GREETING_TIMEOUT, async {
        let challenge = format!("{:032x}", rand::random::<u128>());
        let first = Challenge { tensor_relay_bench_node: REVISION, challenge };
        wire::send(writer, &first).await.map_err(WireError::from)?;
        // The driver sends no second line before the verdict, so dropping the buffer loses nothing.
        let answer: Answer = next(&mut Lines::new(reader, GREETING_MAX_BYTES)).await?;
        let is_valid = token.accepts(&first.challenge, &answer.answer);
        let verdict = if is_valid { Verdict::Welcome } else { Verdict::Refused("wrong token".into()) };
        wire::send(writer, &verdict).await.map_err(WireError::from)?;
        if is_valid { Ok(()) } else { Err(GreetingError::WrongToken) }
    });
    outcome.await.unwrap_or(Err(GreetingError::TimedOut))
}

/// The driver's part: proves to a node that it knows `token`. Returns the lines of the process that it then
/// starts, whose first line may already have been read together with the last line of the greeting.
///
/// # Errors
/// [`GreetingError`], at the latest at the deadline.
pub(crate) async fn prove_token<R: AsyncRead + Unpin>(
    reader: R,
    writer: &mut (impl AsyncWrite + Unpin),
    token: &Token,
) -> Result<Lines<R>, GreetingError> {
    let mut lines = Lines::new(reader, GREETING_MAX_BYTES);
    let outcome = timeout(GREETING_TIMEOUT, async {
        let first: Challenge = next(&mut lines).await?;
        if first.tensor_relay_bench_node != REVISION {
            return Err(GreetingError::Revision { found: first.tensor_relay_bench_node });
        }
        let answer = Answer { answer: token.answer(&first.challenge) };
        wire::send(writer, &answer).await.map_err(WireError::from)?;
        match next(&mut lines).await? {
            Verdict::Welcome => Ok(()),
            Verdict::Refused(reason) => Err(GreetingError::Refused(reason)),
        }
    });
    outcome.await.unwrap_or(Err(GreetingError::TimedOut))?;
    Ok(lines.with_max(LINE_MAX_BYTES))
}

async fn next<T: DeserializeOwned>(lines: &mut Lines<impl AsyncRead + Unpin>) -> Result<T, GreetingError> {
    lines.next().await?.ok_or(GreetingError::Closed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex, split};

    async fn greet(node: &Token, driver: &Token) -> (Result<(), GreetingError>, Result<(), GreetingError>) {
        let (node_end, driver_end) = duplex(GREETING_MAX_BYTES);
        let ((mut node_in, mut node_out), (driver_in, mut driver_out)) = (split(node_end), split(driver_end));
        let (node, driver) = tokio::join!(
            authenticate(&mut node_in, &mut node_out, node),
            prove_token(driver_in, &mut driver_out, driver)
        );
        (node, driver.map(drop))
    }

    /// The node's error for a peer that sends `bytes` and disconnects.
    async fn error_for(bytes: &[u8]) -> String {
        let (node, mut peer) = duplex(64 << 10);
        peer.write_all(bytes).await.unwrap();
        peer.shutdown().await.unwrap();
        let (mut reader, mut writer) = split(node);
        authenticate(&mut reader, &mut writer, &Token::random())
            .await
            .unwrap_err()
            .to_string()
    }

    #[tokio::test]
    async fn the_right_token_is_accepted() {
        let token = Token::random();
        let (node, driver) = greet(&token, &token).await;
        assert!(node.is_ok() && driver.is_ok(), "{node:?} {driver:?}");
    }

    /// Goal: lines of the process that arrive together with the verdict are kept. Method: all lines are sent at once.
    #[tokio::test]
    async fn lines_after_the_verdict_are_kept() {
        let (driver, mut node) = duplex(4 * GREETING_MAX_BYTES);
        let long = "x".repeat(2 * GREETING_MAX_BYTES);
        let lines = format!(
            "{{\"tensor_relay_bench_node\":{REVISION},\"challenge\":\"c\"}}\n\"Welcome\"\n\"{long}\"\n7\n"
        );
        node.write_all(lines.as_bytes()).await.unwrap();
        let (reader, mut writer) = split(driver);
        let mut lines = prove_token(reader, &mut writer, &Token::random()).await.unwrap();
        assert_eq!(lines.next().await.unwrap(), Some(long), "longer than a line of the greeting may be");
        assert_eq!(lines.next().await.unwrap(), Some(7));
    }

    #[tokio::test]
    async fn a_wrong_token_is_refused_at_both_ends() {
        let (node, driver) = greet(&Token::random(), &Token::random()).await;
        assert!(matches!(node, Err(GreetingError::WrongToken)), "{node:?}");
        assert!(matches!(driver, Err(GreetingError::Refused(reason)) if reason == "wrong token"));
    }

    #[tokio::test]
    async fn invalid_answers_are_refused() {
        assert!(error_for(b"GET / HTTP/1.1\r\n\r\n").await.contains("no line of this protocol"));
        assert!(error_for(&[b'x'; 10_000]).await.contains("more than 1024 bytes"));
        assert!(error_for(b"").await.contains("closed the connection"));
        assert!(error_for(b"{\"answer\":\"\"}\n").await.contains("does not know"));
        assert!(error_for(b"{\"answer\":7}\n").await.contains("no line of this protocol"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_driver_is_refused() {
        let (node, driver) = duplex(GREETING_MAX_BYTES);
        let (mut reader, mut writer) = split(node);
        let error = authenticate(&mut reader, &mut writer, &Token::random()).await.unwrap_err();
        assert!(matches!(error, GreetingError::TimedOut), "{error}");
        drop(driver);
    }

    #[tokio::test]
    async fn another_revision_is_refused() {
        let (driver, mut node) = duplex(GREETING_MAX_BYTES);
        node.write_all(b"{\"tensor_relay_bench_node\":9,\"challenge\":\"c\"}\n")
            .await
            .unwrap();
        let (reader, mut writer) = split(driver);
        let error = prove_token(reader, &mut writer, &Token::random()).await.map(drop).unwrap_err();
        assert!(error.to_string().contains("revision 9"), "{error}");
        drop(writer);
        assert_eq!(node.read(&mut [0; 10]).await.unwrap(), 0, "no answer was sent");
    }
}
