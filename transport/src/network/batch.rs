//! [`DatagramBatch`]: collects datagrams to one destination for one system call.

use quinn::udp::{EcnCodepoint, Transmit};
use std::{
    io,
    net::{IpAddr, SocketAddr},
};

/// The maximum number of bytes in one system call, for any number of segments (datagrams): the largest UDP payload over
/// IPv4.
pub(super) const BATCH_MAX_BYTES: usize = 65_507;

/// The maximum number of segments that quinn sends at once (its `MAX_TRANSMIT_SEGMENTS`).
pub(super) const QUINN_SEGMENTS: usize = 10;

/// The numbers of segments that are sent together.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    /// The number that quinn passes at once while it has as many. A transmit with fewer is the end of a burst or a
    /// small message, and is sent immediately.
    pub(super) burst: usize,
    /// The kernel's maximum per system call.
    pub(super) kernel: usize,
}

/// Datagrams to one destination, accepted from quinn and not yet passed to the kernel.
///
/// A system call costs as much as encrypting a dozen packets of 1,472 bytes. quinn passes ten at a time to its socket,
/// and the kernel accepts 44. So transmits of ten full segments are buffered, because more are expected. The batch size
/// grows with success: the first batch of a burst is sent after one transmit, the next after two, then four. A transmit
/// of fewer segments completes the batch, which is sent immediately.
///
/// The caller's `send` does the I/O. A `send` that fails with `WouldBlock` has sent nothing.
#[derive(Debug, Default)]
pub(super) struct DatagramBatch {
    kind: Option<Kind>,
    /// Datagrams of `kind`; only the last may be short.
    bytes: Vec<u8>,
    /// The number of bytes that were sent, at the front of `bytes`.
    sent: usize,
    /// The number of consecutive full batches.
    streak: u32,
    /// Incremented for each transmit from quinn and each send, so that a flush task can detect activity.
    changes: u64,
}

/// The common properties of the datagrams in a system call.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Kind {
    destination: SocketAddr,
    source: Option<IpAddr>,
    ecn: Option<EcnCodepoint>,
    /// The length of a full datagram.
    segment: usize,
}

impl DatagramBatch {
    /// Accepts `transmit`: each of its datagrams is sent or held.
    ///
    /// # Errors
    /// That of `send`, usually `WouldBlock`: nothing of `transmit` was accepted; the caller may try again.
    pub(super) fn take(
        &mut self,
        transmit: &Transmit<'_>,
        bounds: Bounds,
        mut send: impl FnMut(&Transmit<'_>) -> io::Result<()>,
    ) -> io::Result<()> {
        self.changes += 1;
        if !self.is_empty() && !self.continues(transmit) {
            self.flush(bounds, &mut send)?;
        }
        match self.is_empty() && !is_worth_holding(transmit, bounds) {
            true => self.pass_through(transmit, bounds, send),
            false => self.append(transmit, bounds, send),
        }
    }

    /// Sends the held datagrams. The next burst begins with a small batch again.
    ///
    /// # Errors
    /// That of `send`, usually `WouldBlock`: the unsent datagrams are still held.
    pub(super) fn flush(
        &mut self,
        bounds: Bounds,
        mut send: impl FnMut(&Transmit<'_>) -> io::Result<()>,
    ) -> io::Result<()> {
        self.streak = 0;
        let sent = self.send_all(bounds, &mut send);
        self.compact();
        if self.is_empty() {
            self.bytes = Vec::new(); // Idle peers use no memory.
        }
        sent
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The counter of changes while datagrams are held; otherwise `None`.
    pub(super) fn change_count(&self) -> Option<u64> {
        (!self.is_empty()).then_some(self.changes)
    }

    /// Whether `transmit` may share a system call with the held datagrams: all held datagrams are full, because the
    /// kernel splits by length, and `transmit` is of the same kind, or a single shorter datagram of otherwise the same
    /// kind.
    fn continues(&self, transmit: &Transmit<'_>) -> bool {
        let (Some(held), new) = (self.kind, Kind::of(transmit)) else { return false };
        let is_open = self.bytes.len().is_multiple_of(held.segment);
        let is_tail = transmit.segment_size.is_none() && new.segment <= held.segment;
        is_open && (new == held || is_tail && new == Kind { segment: new.segment, ..held })
    }

    /// Sends `transmit` without copying it. If the socket accepts only a part of it, the remainder is held.
    fn pass_through(
        &mut self,
        transmit: &Transmit<'_>,
        bounds: Bounds,
        mut send: impl FnMut(&Transmit<'_>) -> io::Result<()>,
    ) -> io::Result<()> {
        let kind = Kind::of(transmit);
        let batch_bytes = equal_batch_bytes(transmit.contents.len(), kind.segment, bounds.kernel);
        let mut sent = 0;
        for contents in transmit.contents.chunks(batch_bytes) {
            match send(&kind.transmit(contents)) {
                Ok(()) => sent += contents.len(),
                Err(error) if sent == 0 => return Err(error),
                Err(_) => break,
            }
        }
        self.kind = Some(kind);
        self.bytes.extend_from_slice(&transmit.contents[sent..]);
        Ok(())
    }

    fn append(
        &mut self,
        transmit: &Transmit<'_>,
        bounds: Bounds,
        mut send: impl FnMut(&Transmit<'_>) -> io::Result<()>,
    ) -> io::Result<()> {
        let held = self.bytes.len();
        let kind = *match self.is_empty() {
            true => self.kind.insert(Kind::of(transmit)),
            false => self.kind.get_or_insert_with(|| Kind::of(transmit)),
        };
        self.bytes.extend_from_slice(transmit.contents);
        let more_may_come = Kind::of(transmit) == kind && is_worth_holding(transmit, bounds);
        let sent = match more_may_come {
            true => self.send_full_batches(bounds, &mut send),
            false => self.send_all(bounds, &mut send),
        };
        // If a part of the transmit was sent, the caller must not send it again, so the remainder is held.
        let refused = sent.is_err() && self.sent <= held;
        if refused {
            self.bytes.truncate(held);
        }
        self.compact();
        if refused { sent } else { Ok(()) }
    }

    /// Sends full batches, of the size that follows from the streak.
    fn send_full_batches(
        &mut self,
        bounds: Bounds,
        send: &mut impl FnMut(&Transmit<'_>) -> io::Result<()>,
    ) -> io::Result<()> {
        while let Some(kind) = self.kind {
            let target = bounds.burst << self.streak.min(3);
            let batch = target.min(batch_segments(kind.segment, bounds.kernel)) * kind.segment;
            if self.bytes.len() - self.sent < batch {
                break;
            }
            self.send_one(batch, kind, send)?;
            self.streak += 1;
        }
        Ok(())
    }

    /// Sends all datagrams, in batches as large as the kernel accepts.
    fn send_all(
        &mut self,
        bounds: Bounds,
        send: &mut impl FnMut(&Transmit<'_>) -> io::Result<()>,
    ) -> io::Result<()> {
        while let (Some(kind), true) = (self.kind, self.sent < self.bytes.len()) {
            let batch = batch_segments(kind.segment, bounds.kernel) * kind.segment;
            self.send_one(batch.min(self.bytes.len() - self.sent), kind, send)?;
        }
        Ok(())
    }

    fn send_one(
        &mut self,
        size: usize,
        kind: Kind,
        send: &mut impl FnMut(&Transmit<'_>) -> io::Result<()>,
    ) -> io::Result<()> {
        send(&kind.transmit(&self.bytes[self.sent..self.sent + size]))?;
        self.sent += size;
        self.changes += 1;
        Ok(())
    }

    /// Removes the sent datagrams. The others, usually less than a batch, move to the front.
    fn compact(&mut self) {
        self.bytes.drain(..self.sent);
        self.sent = 0;
    }
}

impl Kind {
    fn of(transmit: &Transmit<'_>) -> Self {
        Self {
            destination: transmit.destination,
            source: transmit.src_ip,
            ecn: transmit.ecn,
            segment: transmit.segment_size.unwrap_or(transmit.contents.len()).max(1),
        }
    }

    fn transmit(self, contents: &[u8]) -> Transmit<'_> {
        Transmit {
            destination: self.destination,
            ecn: self.ecn,
            contents,
            segment_size: (contents.len() > self.segment).then_some(self.segment),
            src_ip: self.source,
        }
    }
}

/// Whether more transmits like this are likely to follow and would fit the same system call. Jumbo packets never fit:
/// the kernel accepts no more of them at once than quinn sends.
fn is_worth_holding(transmit: &Transmit<'_>, bounds: Bounds) -> bool {
    let segment = Kind::of(transmit).segment;
    transmit.contents.len() >= bounds.burst * segment
        && transmit.contents.len().is_multiple_of(segment)
        && batch_segments(segment, bounds.kernel) > bounds.burst
}

/// The number of segments of this size that quinn should send at once to fill a system call; `None` for quinn's
/// default. Seven jumbo segments fit one call, ten need two calls of five.
pub(super) fn burst_of(segment: usize) -> Option<usize> {
    let fits = BATCH_MAX_BYTES / segment.max(1);
    (BURST_MIN..QUINN_SEGMENTS).contains(&fits).then_some(fits)
}

/// The minimum of [`burst_of`]: it applies to all peers of the socket, and smaller bursts would slow down those with
/// smaller segments.
const BURST_MIN: usize = 5;

/// The maximum number of segments of this size in one system call.
fn batch_segments(segment: usize, segments_max: usize) -> usize {
    (BATCH_MAX_BYTES / segment).clamp(1, segments_max.max(1))
}

/// The length of the equal batches in which `bytes` bytes, in segments of `segment`, are sent. The last batch may be
/// shorter.
fn equal_batch_bytes(bytes: usize, segment: usize, segments_max: usize) -> usize {
    let segments = bytes.div_ceil(segment).max(1);
    let batches = segments.div_ceil(batch_segments(segment, segments_max));
    segments.div_ceil(batches) * segment
}

#[cfg(test)]
mod tests;
