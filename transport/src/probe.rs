//! Probes: bytes without meaning, sent over a lane to measure it (PROTOCOL.md §3.17).

use crate::{DataIn, Lane, LaneError};
use bytes::Bytes;
use std::time::Duration;
use tensor_relay_protocol::{PROBE_REPORT_BYTES, ProbeHeader, ProbeReport, StreamHeader};
use tokio::time::Instant;

/// The size of one piece: the bytes repeat, so that they stay in the cache, and the path is measured and not the memory.
const PIECE: &[u8] = &[0; 64 << 10];

/// A probe carries no more weight than a chunk.
const PRIORITY: i32 = 0;

/// What a received probe tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeResult {
    /// The bytes that came.
    pub bytes: u64,
    /// How long they took, from the first to the last.
    pub elapsed: Duration,
    /// The sender's counters when it had sent them.
    pub sender: ProbeReport,
}

/// Sends a probe over `lane`, and then the counters of this end, as `report` reads them.
///
/// # Errors
/// [`LaneError`] when the lane ended or the receiver stopped the stream.
pub async fn send_probe(
    lane: &Lane,
    header: ProbeHeader,
    report: impl FnOnce() -> ProbeReport,
) -> Result<(), LaneError> {
    let mut stream = lane.open_data(PRIORITY).await?;
    stream.write_header(&StreamHeader::Probe(header)).await?;
    let mut left = header.bytes as usize;
    while left > 0 {
        let piece = left.min(PIECE.len());
        stream.write(Bytes::from_static(&PIECE[..piece]), &|_| ()).await?;
        left -= piece;
    }
    stream.write(Bytes::copy_from_slice(&report().encode()), &|_| ()).await?;
    stream.finish()
}

/// Receives the rest of a probe, whose header was read.
///
/// # Errors
/// [`LaneError`] when the lane ended or the sender gave the probe up, also where it sent less than it said.
pub async fn receive_probe(mut stream: DataIn, header: ProbeHeader) -> Result<ProbeResult, LaneError> {
    let (began, expected) = (Instant::now(), u64::from(header.bytes));
    let (mut bytes, mut report) = (0, Vec::with_capacity(PROBE_REPORT_BYTES));
    let mut elapsed = Duration::ZERO;
    let mut take = |piece: &[u8]| {
        let filler = piece.len().min((expected - bytes) as usize);
        bytes += filler as u64;
        let room = PROBE_REPORT_BYTES - report.len();
        report.extend(piece[filler..].iter().take(room));
        piece.len() - filler <= room
    };
    let mut is_short_enough = true;
    while stream.read_pieces(|piece| is_short_enough &= take(piece)).await? && is_short_enough {
        elapsed = began.elapsed();
    }
    match <[u8; PROBE_REPORT_BYTES]>::try_from(report) {
        Ok(report) if is_short_enough && bytes == expected => {
            Ok(ProbeResult { bytes, elapsed, sender: ProbeReport::decode(&report) })
        }
        _ => Err(LaneError::StreamGivenUp),
    }
}
