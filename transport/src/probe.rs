//! Probes: filler bytes, sent over a lane to measure its rate (PROTOCOL.md §3.17).

use crate::{DataIn, Lane, LaneError};
use bytes::Bytes;
use std::time::Duration;
use tensor_relay_protocol::{PROBE_REPORT_BYTES, ProbeHeader, ProbeReport, StreamHeader};
use tokio::time::Instant;

/// The repeated piece of a probe. It stays in the cache, so that memory bandwidth does not limit the measurement.
const PIECE: &[u8] = &[0; 64 << 10];

/// The priority of probes, that of chunks.
const PRIORITY: i32 = 0;

/// The result of a received probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeResult {
    /// The number of received filler bytes.
    pub bytes: u64,
    /// The time from the probe's header to its last bytes.
    pub elapsed: Duration,
    /// The sender's counters after sending.
    pub sender: ProbeReport,
}

/// Sends a probe over `lane`, then the counters of `report`, which is awaited only then.
///
/// # Errors
/// [`LaneError`] when the lane ended or the receiver stopped the stream.
pub async fn send_probe(
    lane: &Lane,
    header: ProbeHeader,
    report: impl Future<Output = ProbeReport>,
) -> Result<(), LaneError> {
    let mut stream = lane.open_data(PRIORITY).await?;
    stream.write_header(&StreamHeader::Probe(header)).await?;
    let mut left = header.bytes as usize;
    while left > 0 {
        let piece = left.min(PIECE.len());
        stream.write(Bytes::from_static(&PIECE[..piece]), &|_| ()).await?;
        left -= piece;
    }
    stream.write(Bytes::copy_from_slice(&report.await.encode()), &|_| ()).await?;
    stream.finish()
}

/// Receives a probe after its header.
///
/// # Errors
/// [`LaneError`] when the lane ended, the sender aborted the probe, or the probe's length does not match the header.
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
        _ => Err(LaneError::StreamAborted),
    }
}
