//! The choice of an [`Effort`] from measured facts. Pure.

use tensor_relay_protocol::Effort;

/// What a level of effort makes of the payload, for each raw byte.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Level {
    /// Encoded bytes.
    pub(super) share: f64,
    /// The seconds of encoding on one processor.
    pub(super) encode_s: f64,
}

/// What was measured while chunks were sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Facts {
    /// The level of the chunks that were sent, and what was measured of them.
    pub(super) current: Effort,
    pub(super) sent: Level,
    /// The seconds that passed for each raw byte.
    pub(super) seconds: f64,
    /// The estimate of each level of [`Effort::ALL`].
    pub(super) levels: [Level; Effort::ALL.len()],
    /// The processors of this process, and how many of them it used.
    pub(super) processors: f64,
    pub(super) used: f64,
}

/// The number of ends that share the processors: the receiver may run on this machine, or on one like it. Its costs are
/// not known here: decoding counts as much as encoding, and receiving as much as sending.
const ENDS: f64 = 2.0;

/// The factor by which a higher level must be faster to be chosen, so that the choice does not alternate between two
/// that are equally fast.
const ADVANTAGE_MIN: f64 = 1.05;

/// The share of the processors that must be idle for the path, not the processors, to count as the bound: with the
/// current level, and with one that needs more. The difference keeps the choice stable.
const IDLE_MIN: f64 = 0.1;
const IDLE_MIN_AFTERWARDS: f64 = 0.2;

impl Level {
    /// Raw bytes, as without effort.
    pub(super) const RAW: Self = Self { share: 1.0, encode_s: 0.0 };
}

impl Facts {
    /// The level that is expected to be the fastest; of levels that encode alike, the lowest.
    ///
    /// Encoding divides the bytes on the path by what it saves, and adds processor time. If so many processors are idle
    /// that they can take that on, only the first counts. Otherwise the processors may be the bound, and an encoding is
    /// chosen only if it is faster even so: if what it saves is worth more than encoding and decoding on all
    /// processors, in addition to everything that they do now. So a wrong choice is never much slower than raw bytes;
    /// on a fast path with few processors, a better one may be missed.
    pub(super) fn choose(&self) -> Effort {
        let mut best = Effort::None;
        for effort in [Effort::Light, Effort::Full] {
            let gain = if effort <= self.current { 1.0 } else { ADVANTAGE_MIN };
            let [seconds, without] = self.seconds_of([effort, best]);
            if seconds * gain < without {
                best = effort;
            }
        }
        best
    }

    /// The expected seconds for each raw byte with `higher` and with a lower level, for a comparison of these two.
    fn seconds_of(&self, [higher, lower]: [Effort; 2]) -> [f64; 2] {
        let pair = [higher, lower].map(|effort| self.level(effort));
        let Level { share, encode_s } = pair[0];
        // The seconds for each encoded byte, if the path is the bound.
        let path_s = self.seconds / self.sent.share;
        let further = ENDS * (encode_s - self.sent.encode_s) / (share * path_s);
        let idle_min = if higher <= self.current { IDLE_MIN } else { IDLE_MIN_AFTERWARDS };
        let idle = self.processors - ENDS * self.used - further.max(0.0);
        if idle >= idle_min * self.processors {
            return pair.map(|level| level.share * path_s);
        }
        // If the processors are the bound, the path is faster than that: by the time of the encoding, the current one
        // or the one to be judged, which must still be the better one once it is the current one.
        let codec_s = |level: Level| ENDS * level.encode_s / self.processors;
        let path_s = path_s - (codec_s(self.sent) / self.sent.share).max(codec_s(pair[0]) / share);
        pair.map(|level| level.share * path_s + codec_s(level))
    }

    /// The level `effort`: measured if it is the current one, otherwise its estimate, corrected by the ratio of
    /// measured and estimated time of the current one. A whole chunk takes longer than a sample, and no time if
    /// subscribers share its encoding.
    fn level(&self, effort: Effort) -> Level {
        if effort == self.current {
            return self.sent;
        }
        let [estimate, current] = [effort, self.current].map(|effort| self.levels[effort as usize]);
        let correction = match current.encode_s > 0.0 {
            true => self.sent.encode_s / current.encode_s,
            false => 1.0,
        };
        Level { encode_s: estimate.encode_s * correction, ..estimate }
    }
}
