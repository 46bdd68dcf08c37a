//! The first lines between a driver and a node: who it is, and whether it may.

use super::token::Token;
use crate::wire::{self, GREETING_MAX_BYTES, LINE_MAX_BYTES, Lines, WireError};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::{Duration, timeout},
};

/// The version of this protocol. Another one is refused: both ends of a benchmark
/// should be the same build.
const REVISION: u32 = 1;

/// The deadline of the whole greeting.
const GREETING_MAX: Duration = Duration::from_secs(10);

/// The node's first line.
#[derive(Debug, Serialize, Deserialize)]
struct Challenge {
    /// Says what listens here, and which revision it speaks.
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

/// Why a greeting did not end well.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GreetingError {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("it said nothing for {} s: is a node of this benchmark listening there?", GREETING_MAX.as_secs())]
    Silent,
    #[error("it closed the connection before the greeting was over")]
    Gone,
    #[error("it does not know this node's token")]
    WrongToken,
    #[error(
        "it speaks revision {found} of the benchmark's protocol and this build {REVISION}: run the same build on all hosts"
    )]
    Revision { found: u32 },
    #[error("it refused: {0:?}")]
    Refused(String),
}

/// The node's part: lets a driver in that knows `token`, and tells another one why not.
///
/// # Errors
/// [`GreetingError`], within the deadline, whatever the other end does.
pub(crate) async fn judge(
    reader: &mut (impl AsyncRead + Unpin),
    writer: &mut (impl AsyncWrite + Unpin),
    token: &Token,
) -> Result<(), GreetingError> {
    let judged = timeout(GREETING_MAX, async {
        let challenge = format!("{:032x}", rand::random::<u128>());
        let first = Challenge { tensor_relay_bench_node: REVISION, challenge };
        wire::send(writer, &first).await.map_err(WireError::from)?;
        // Its only line before it hears the verdict: nothing is lost with the buffer.
        let answer: Answer = next(&mut Lines::new(reader, GREETING_MAX_BYTES)).await?;
        let knows = token.accepts(&first.challenge, &answer.answer);
        let verdict = if knows { Verdict::Welcome } else { Verdict::Refused("wrong token".into()) };
        wire::send(writer, &verdict).await.map_err(WireError::from)?;
        if knows { Ok(()) } else { Err(GreetingError::WrongToken) }
    });
    judged.await.unwrap_or(Err(GreetingError::Silent))
}

/// The driver's part: shows a node that it knows `token`. Returns what the worker says next: it does not wait to be asked, and
/// its first line may come with the last one of the greeting.
///
/// # Errors
/// [`GreetingError`], within the deadline, whatever the other end does.
pub(crate) async fn ask<R: AsyncRead + Unpin>(
    reader: R,
    writer: &mut (impl AsyncWrite + Unpin),
    token: &Token,
) -> Result<Lines<R>, GreetingError> {
    let mut lines = Lines::new(reader, GREETING_MAX_BYTES);
    let asked = timeout(GREETING_MAX, async {
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
    asked.await.unwrap_or(Err(GreetingError::Silent))?;
    Ok(lines.with_max(LINE_MAX_BYTES))
}

async fn next<T: DeserializeOwned>(lines: &mut Lines<impl AsyncRead + Unpin>) -> Result<T, GreetingError> {
    lines.next().await?.ok_or(GreetingError::Gone)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex, split};

    async fn greet(node: &Token, driver: &Token) -> (Result<(), GreetingError>, Result<(), GreetingError>) {
        let (here, there) = duplex(GREETING_MAX_BYTES);
        let ((mut node_in, mut node_out), (driver_in, mut driver_out)) = (split(here), split(there));
        let (judged, asked) =
            tokio::join!(judge(&mut node_in, &mut node_out, node), ask(driver_in, &mut driver_out, driver));
        (judged, asked.map(drop))
    }

    /// The node's error for a peer that sends `words` and disconnects.
    async fn judge_words(words: &[u8]) -> String {
        let (here, mut there) = duplex(64 << 10);
        there.write_all(words).await.unwrap();
        there.shutdown().await.unwrap();
        let (mut reader, mut writer) = split(here);
        judge(&mut reader, &mut writer, &Token::random()).await.unwrap_err().to_string()
    }

    #[tokio::test]
    async fn who_knows_the_token_is_let_in() {
        let token = Token::random();
        let (node, driver) = greet(&token, &token).await;
        assert!(node.is_ok() && driver.is_ok(), "{node:?} {driver:?}");
    }

    /// As when the driver's machine is busy: it reads both at once.
    #[tokio::test]
    async fn what_comes_with_the_welcome_is_kept() {
        let (here, mut there) = duplex(4 * GREETING_MAX_BYTES);
        let long = "x".repeat(2 * GREETING_MAX_BYTES);
        let lines = format!(
            "{{\"tensor_relay_bench_node\":{REVISION},\"challenge\":\"c\"}}\n\"Welcome\"\n\"{long}\"\n7\n"
        );
        there.write_all(lines.as_bytes()).await.unwrap();
        let (reader, mut writer) = split(here);
        let mut rest = ask(reader, &mut writer, &Token::random()).await.unwrap();
        assert_eq!(rest.next().await.unwrap(), Some(long), "longer than a line of a stranger may be");
        assert_eq!(rest.next().await.unwrap(), Some(7));
    }

    #[tokio::test]
    async fn who_does_not_is_told_so() {
        let (node, driver) = greet(&Token::random(), &Token::random()).await;
        assert!(matches!(node, Err(GreetingError::WrongToken)), "{node:?}");
        assert!(matches!(driver, Err(GreetingError::Refused(reason)) if reason == "wrong token"));
    }

    #[tokio::test]
    async fn strangers_are_turned_away() {
        assert!(
            judge_words(b"GET / HTTP/1.1\r\n\r\n")
                .await
                .contains("no line of this protocol")
        );
        assert!(judge_words(&[b'x'; 10_000]).await.contains("more than 1024 bytes"));
        assert!(judge_words(b"").await.contains("closed the connection"));
        assert!(judge_words(b"{\"answer\":\"\"}\n").await.contains("does not know"));
        assert!(judge_words(b"{\"answer\":7}\n").await.contains("no line of this protocol"));
    }

    #[tokio::test(start_paused = true)]
    async fn silence_has_an_end() {
        let (here, there) = duplex(GREETING_MAX_BYTES);
        let (mut reader, mut writer) = split(here);
        let error = judge(&mut reader, &mut writer, &Token::random()).await.unwrap_err();
        assert!(matches!(error, GreetingError::Silent), "{error}");
        drop(there);
    }

    #[tokio::test]
    async fn another_revision_is_named() {
        let (here, mut there) = duplex(GREETING_MAX_BYTES);
        there
            .write_all(b"{\"tensor_relay_bench_node\":9,\"challenge\":\"c\"}\n")
            .await
            .unwrap();
        let (reader, mut writer) = split(here);
        let error = ask(reader, &mut writer, &Token::random()).await.map(drop).unwrap_err();
        assert!(error.to_string().contains("revision 9"), "{error}");
        drop(writer);
        assert_eq!(there.read(&mut [0; 10]).await.unwrap(), 0, "it was told nothing");
    }
}
