//! Connects a session's first lane: races the server's addresses and, for each address, QUIC against TCP.

use std::{net::SocketAddr, pin::pin, sync::atomic::Ordering, time::Duration};
use tensor_relay_protocol::CloseCode;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep_until, timeout, timeout_at},
};

use super::{ConnectError, Connector};
use crate::{Fingerprint, Lane, LaneError, LaneKind, LaneKindReason, Transport};

/// The delay before the next address is tried, as recommended by RFC 8305. Also QUIC's head start over the TLS
/// handshake of TCP on a path that is not short, and the time for that handshake on a short path before QUIC is tried.
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);

/// The maximum TCP connect time of a short path. On a short path TCP is faster and cheaper than QUIC, thanks to
/// segmentation offload; on a longer one it would need larger windows than systems allow by default, and QUIC's loss
/// recovery. The server's kernel answers a SYN, so the connect time is the round trip time even if the server is busy.
const SHORT_PATH_CONNECT_TIME: Duration = Duration::from_millis(5);

/// The time for TCP before QUIC is tried, where TCP is expected.
const EXPECTED_TCP_TIME: Duration = Duration::from_secs(1);

impl Connector {
    /// Opens a lane to the first of `addresses` that answers. The next attempt starts after [`ATTEMPT_DELAY`], or when
    /// one has failed.
    ///
    /// # Errors
    /// The most informative error, once all attempts have failed or `timeout` has passed.
    pub(super) async fn race(
        &self,
        addresses: &[SocketAddr],
        keys: &[Fingerprint],
        timeout: Duration,
    ) -> Result<Lane, ConnectError> {
        let deadline = Instant::now() + timeout;
        let mut waiting = addresses.iter().copied();
        let mut attempts = JoinSet::new();
        let mut best_error: Option<ConnectError> = None;
        loop {
            if let Some(address) = waiting.next() {
                let (this, keys) = (self.clone(), keys.to_vec());
                attempts.spawn(async move { this.connect_address(address, &keys, deadline).await });
            }
            let next_address = async {
                match waiting.len() {
                    0 => std::future::pending().await,
                    _ => tokio::time::sleep(ATTEMPT_DELAY).await,
                }
            };
            tokio::select! {
                Some(ended) = attempts.join_next() => match ended {
                    Ok(Ok(lane)) => return Ok(lane),
                    Ok(Err(error)) => best_error = Some(more_informative(best_error, error)),
                    Err(panic) => std::panic::resume_unwind(panic.into_panic()),
                },
                () = next_address => {}
            }
            if let Some(error) = best_error.take_if(|_| attempts.is_empty() && waiting.len() == 0) {
                return Err(error);
            }
        }
    }

    async fn connect_address(
        &self,
        address: SocketAddr,
        keys: &[Fingerprint],
        deadline: Instant,
    ) -> Result<Lane, ConnectError> {
        let timed_out = || LaneError::TimedOut { peer: address.into() }.into();
        let connect = |kind| async move {
            let connected = timeout_at(deadline, self.connect_one(address, kind, keys, 0)).await;
            connected.unwrap_or_else(|_| Err(timed_out()))
        };
        match self.transport {
            Transport::Quic => connect(LaneKind::Quic).await,
            Transport::Tcp => connect(LaneKind::Tcp).await,
            Transport::Auto => self.race_kinds(address, keys, deadline).await,
        }
    }

    /// Connects over TCP on a short path, otherwise over QUIC or, if QUIC does not answer, over TCP.
    ///
    /// The TCP connection is opened first. On a short path the TLS handshake follows, and QUIC starts only if TCP fails
    /// or takes longer than [`ATTEMPT_DELAY`]. Otherwise QUIC starts, and the TLS handshake over TCP follows
    /// [`ATTEMPT_DELAY`] after the beginning, or as soon as TCP is connected if UDP seemed to be blocked the last time.
    /// Usually only one handshake is begun, since an unused one costs the server as much as a used one. Where TCP is
    /// expected, every path that connects within [`EXPECTED_TCP_TIME`] counts as short.
    async fn race_kinds(
        &self,
        address: SocketAddr,
        keys: &[Fingerprint],
        deadline: Instant,
    ) -> Result<Lane, ConnectError> {
        let timed_out = |_| Err(LaneError::TimedOut { peer: address.into() }.into());
        let began = Instant::now();
        let (connect_time, handshake_time) = match self.expects_tcp {
            true => (EXPECTED_TCP_TIME, EXPECTED_TCP_TIME),
            false => (SHORT_PATH_CONNECT_TIME, ATTEMPT_DELAY),
        };
        let mut opening = pin!(self.open_stream(address, 0));
        let opened = timeout_at((began + connect_time).min(deadline), &mut opening).await;
        let is_short_path = opened.is_ok();
        let mut tcp = pin!(timeout_at(deadline, async {
            let stream = match opened {
                Ok(opened) => opened?,
                Err(_) => opening.await?,
            };
            if !is_short_path && !self.udp_is_blocked.load(Ordering::Relaxed) {
                sleep_until(began + ATTEMPT_DELAY).await;
            }
            self.handshake(stream, address, keys).await
        }));
        let mut failed = None;
        if is_short_path {
            match timeout_at((began + handshake_time).min(deadline), &mut tcp).await {
                Ok(Ok(Ok(lane))) => return Ok(self.over_tcp(lane, true)),
                Ok(answer) => failed = answer.unwrap_or_else(timed_out).err(),
                Err(_) => {}
            }
        }
        let mut tcp_failed = failed.is_some();
        let mut quic_failed = false;
        let mut quic = pin!(timeout_at(deadline, self.connect_one(address, LaneKind::Quic, keys, 0)));
        loop {
            let error = tokio::select! {
                answer = &mut tcp, if !tcp_failed => match answer.unwrap_or_else(timed_out) {
                    Ok(lane) => return Ok(self.over_tcp(lane, is_short_path)),
                    Err(error) => {
                        tcp_failed = true;
                        error
                    }
                },
                answer = &mut quic, if !quic_failed => match answer.unwrap_or_else(timed_out) {
                    Ok(lane) if is_short_path && tcp_failed => {
                        return Ok(self.over_tcp_again(address, keys, lane).await);
                    }
                    Ok(lane) => return Ok(self.over_quic(lane)),
                    Err(error) => {
                        quic_failed = true;
                        error
                    }
                },
            };
            let informative = more_informative(failed.take(), error);
            if quic_failed && tcp_failed {
                return Err(informative);
            }
            failed = Some(informative);
        }
    }

    /// A lane over TCP, if the server accepts that now, or else `quic`. While a server starts, TCP is refused at once,
    /// whereas QUIC repeats its packets until it answers.
    async fn over_tcp_again(&self, address: SocketAddr, keys: &[Fingerprint], quic: Lane) -> Lane {
        let connecting = async {
            let stream = timeout(SHORT_PATH_CONNECT_TIME, self.open_stream(address, 0))
                .await
                .ok()?
                .ok()?;
            timeout(ATTEMPT_DELAY, self.handshake(stream, address, keys)).await.ok()?.ok()
        };
        match connecting.await {
            Some(lane) => {
                quic.close(CloseCode::Done, "the session uses TCP");
                self.over_tcp(lane, true)
            }
            None => self.over_quic(quic),
        }
    }

    fn over_tcp(&self, lane: Lane, is_short_path: bool) -> Lane {
        self.udp_is_blocked.store(!is_short_path, Ordering::Relaxed);
        lane.with_reason(match is_short_path {
            true if self.expects_tcp => LaneKindReason::Expected,
            true => LaneKindReason::ShortPath,
            false => LaneKindReason::UdpSilent,
        })
    }

    fn over_quic(&self, lane: Lane) -> Lane {
        self.udp_is_blocked.store(false, Ordering::Relaxed);
        lane.with_reason(LaneKindReason::Answered)
    }
}

/// The more informative of two errors: a wrong key before another refusal, that before any other failure, and that
/// before a timeout. Of equally informative ones, the first.
fn more_informative(first: Option<ConnectError>, second: ConnectError) -> ConnectError {
    let rank = |error: &ConnectError| match error {
        ConnectError::WrongKey { .. } => 3,
        ConnectError::Incompatible { .. } | ConnectError::Refused { .. } => 2,
        ConnectError::Lane(LaneError::TimedOut { .. }) => 0,
        _ => 1,
    };
    match first {
        Some(first) if rank(&first) >= rank(&second) => first,
        _ => second,
    }
}
