//! [`EffortMeter`]: chooses how much processor time encoding is worth, for the subscribers at one address.

mod choice;
mod meter;

use crate::{LaneKind, Workers, egress::Encoded};
use choice::Level;
use meter::{Meter, Moment, Written};
use quick_cache::sync::Cache;
use std::{convert::Infallible, net::IpAddr, sync::Arc, thread, time::Duration};
use tensor_relay_device::Lock;
use tensor_relay_protocol::{CodecSet, Effort, SMALL_BYTES, SizeEstimate};
use tokio::time::Instant;

/// The meters of a process: one for each recent client address and kind of lane, so that a new subscription benefits
/// from earlier ones. A bounded cache, which drops meters that were not used recently.
#[derive(Debug)]
pub struct EffortMeters {
    meters: Cache<(IpAddr, LaneKind), EffortMeter>,
    workers: Workers,
    processors: f64,
}

/// The maximum number of cached meters, each of about 400 bytes.
const METERS_MAX: usize = 4096;

impl EffortMeters {
    /// No meters; they measure the work of `workers`.
    pub fn new(workers: Workers) -> Self {
        let processors = thread::available_parallelism().map_or(1, usize::from) as f64;
        Self { meters: Cache::new(METERS_MAX), workers, processors }
    }

    /// The meter for `peer` over lanes of this kind.
    pub fn get(&self, peer: IpAddr, kind: LaneKind) -> EffortMeter {
        let Ok(meter) = self.meters.get_or_insert_with(&(peer, kind), || {
            let meter = Meter::new(first_effort(kind), self.processors);
            Ok::<_, Infallible>(EffortMeter { meter: Arc::new(Lock::new(meter)), workers: self.workers })
        });
        meter
    }
}

/// The level with which a meter of lanes of this kind begins, and which versions have that are too small to be
/// measured. TCP is used on short paths, whose links are usually faster than encoding.
fn first_effort(kind: LaneKind) -> Effort {
    match kind {
        LaneKind::Quic => Effort::Light,
        LaneKind::Tcp | LaneKind::Unix => Effort::None,
    }
}

/// A handle to one meter, shared by all sends that it measures. Cheap to clone.
#[derive(Debug, Clone)]
pub struct EffortMeter {
    meter: Arc<Lock<Meter>>,
    workers: Workers,
}

impl EffortMeter {
    /// The level for the next chunk.
    pub(crate) fn effort(&self) -> Effort {
        self.meter.lock().effort()
    }

    /// Handles the beginning of a version.
    pub(crate) fn handle_version(&self) {
        self.meter.lock().handle_pause();
    }

    /// Whether the payload may be sampled now.
    pub(crate) fn may_sample(&self) -> bool {
        self.meter.lock().may_sample()
    }

    /// Handles the time that a sample took.
    pub(crate) fn handle_sampled(&self, took: Duration) {
        self.meter.lock().handle_sampled(self.workers.real(took));
    }

    /// Handles the estimate of a chunk of `raw_bytes`, for a subscriber that can decode the codecs `offered`.
    pub(crate) fn handle_estimate(&self, estimate: &SizeEstimate, offered: CodecSet, raw_bytes: u64) {
        let level = |effort| {
            let codec = estimate.choose(offered, effort);
            Level {
                share: f64::from(estimate.share(codec).unwrap_or(1.0)),
                encode_s: self.workers.real(f64::from(estimate.seconds_per_byte(codec))),
            }
        };
        self.meter.lock().handle_estimate(Effort::ALL.map(level), raw_bytes);
    }

    /// Handles a written chunk, which was encoded with `effort`. `is_chosen` is whether its encoding follows from that.
    /// Small chunks, which are always sent raw, are left out, since reading the clocks would slow them down.
    pub(crate) fn handle_written(&self, encoded: &Encoded, effort: Effort, raw_bytes: u64, is_chosen: bool) {
        if raw_bytes < SMALL_BYTES as u64 {
            return;
        }
        let (wire_bytes, encode_time) = (encoded.bytes.len() as u64, self.workers.real(encoded.worker_time));
        let now = Moment { at: Instant::now(), processor_time: self.workers.processor_time() };
        let chunk = Written { effort, raw_bytes, wire_bytes, encode_time, is_chosen };
        self.meter.lock().handle_written(chunk, now);
    }
}

#[cfg(test)]
mod tests;
